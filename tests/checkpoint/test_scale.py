"""What 1,024 ranks would do on disk for an 8B model, counted without any of them."""

from __future__ import annotations

from collections import Counter

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_zero.checkpoint.files.pieces import identity
from hf_zero.checkpoint.files.tensor_file import CHUNK_BYTES, Source, TensorFile, TensorInfo, layout_file
from hf_zero.checkpoint.files.windows import Holder, divided, held_by, moved
from hf_zero.layout import RowLayout

RANKS = 1024
CONFIG = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)


def _files() -> list[TensorFile]:
    """The weights and an Adam's states, in float32."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    states = [("weights", [""]), ("optimizer", [".exp_avg", ".exp_avg_sq"])]
    return [
        layout_file(
            file, [TensorInfo(name + key, torch.float32, shape) for name, shape in shapes.items() for key in keys], {}
        )
        for file, keys in states
    ]


def test_writes_are_large_and_each_rank_opens_one_file_or_two() -> None:
    files = _files()
    windows = divided([(file, 0, file.nbytes) for file in files], RANKS)
    every = [window for own in windows for window in own]
    assert sum(window.stop - window.start for window in every) == sum(file.nbytes for file in files) > 96e9
    ends = {(file.name, at) for file in files for at in (0, file.nbytes)}
    for window in every:
        is_whole = window.start % CHUNK_BYTES == 0 and window.stop - window.start == CHUNK_BYTES
        assert is_whole or (window.file.name, window.stop) in ends
    opens = Counter(len({window.file.name for window in own}) for own in windows)
    assert opens == {1: RANKS - 1, 2: 1}  # before: every file by every rank
    own_bytes = [sum(window.stop - window.start for window in own) for own in windows]
    assert max(own_bytes) <= sum(own_bytes) / RANKS + 2 * CHUNK_BYTES
    assert len(every) == 11489  # before: 893,916 writes


def test_what_ranks_give_to_a_window_is_all_of_it() -> None:
    file = _files()[0]
    windows = divided([(file, 0, file.nbytes)], RANKS)
    pieces = {tensor.name: (identity(tensor.name, tensor.shape),) for tensor in file.tensors}
    for rank in (0, 500, RANKS - 1):
        for window in windows[rank]:
            numel = 0
            for tensor, part in moved(window, pieces):
                source = Source(torch.empty(0), RowLayout(tensor.shape, RANKS))
                numel += sum(each.numel for holder in range(RANKS) for each in held_by(Holder(holder, 0), source, part))
            header = max(min(len(file.header), window.stop) - window.start, 0)
            assert 4 * numel + header == window.stop - window.start
