"""`from_pretrained` of partitioned models: values of the unsharded load, only own rows read, errors on all ranks alike.

The oracle is the same call with the same seed, without hf_zero; each rank runs it for itself and compares its rows.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hf_zero
from hf_zero.sharding import loading
from hf_zero.sharding.init import activate
from hf_zero.sharding.loading import checkpoint_shapes, keeps_rows, names_to_read_whole
from hf_zero.torch_compat import local_of
from tests.engine.twins import STAGES
from tests.models import CASES, VOCAB, make_model
from tests.ranks import by_hand, on_ranks, run_ranks
from tests.sharding.test_construct import (
    STAGE_3,
    LiveBytes,
    clip,
    differences,
    dinov2,
    mamba,
    own_rows,
    wav2vec2,
    window_of,
)

# --- checkpoints ----------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 26, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2}


def bert_backbone() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SMALL, max_position_embeddings=16))


def bert_mlm() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, max_position_embeddings=16))


def llama_tied() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=1, tie_word_embeddings=True, pad_token_id=3)
    )


def mixtral_of_two() -> nn.Module:
    """Fewer experts than three ranks."""
    fields = {**SMALL, "num_key_value_heads": 1, "num_local_experts": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**fields))


def qwen3_moe() -> nn.Module:
    fields = {"num_key_value_heads": 1, "num_experts": 8, "moe_intermediate_size": 10, "num_experts_per_tok": 2}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL, **fields, head_dim=8))


def nomic_bert() -> nn.Module:
    """Its files hold query, key and value in one tensor, which is split on dim 0."""
    return transformers.NomicBertForMaskedLM(transformers.NomicBertConfig(**SMALL))


def vit_mae() -> nn.Module:
    """Its constructor freezes positions; plain `from_pretrained` trains those that the file holds."""
    fields = {"image_size": 8, "patch_size": 4, "decoder_hidden_size": 12, "decoder_intermediate_size": 20}
    decoder = {"decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    small = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    return transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**small, **fields, **decoder))


def lstm_model() -> nn.Module:
    return LSTMModel(transformers.PretrainedConfig())


class LSTMModel(transformers.PreTrainedModel):
    """A recurrent network, which keeps a list of its parameters."""

    config_class = transformers.PretrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lstm = nn.LSTM(5, 7)
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.post_init()

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0] * self.scale.sum()


def rename_keys(folder: Path) -> None:
    file = folder / "model.safetensors"
    state = {name.replace("model.", "zzz.", 1): value for name, value in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})


def to_bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@dataclass(frozen=True)
class Checkpoint:
    """A folder that `save_pretrained` wrote.

    Attributes:
        build: makes the model.
        max_shard_size: of one file.
        edit: changes the folder afterwards.
        dtype: of the weights in the file.
    """

    build: Callable[[], nn.Module]
    max_shard_size: str = "1GB"
    edit: Callable[[Path], None] | None = None
    dtype: torch.dtype = torch.float32


CHECKPOINTS = {
    **{name: Checkpoint(CASES[name].build) for name in ("llama", "gpt2", "bert", "t5", "vit", "mixtral")},
    "llama_tied": Checkpoint(llama_tied),
    "llama_bf16": Checkpoint(CASES["llama"].build, dtype=torch.bfloat16),
    "sharded": Checkpoint(llama_tied, max_shard_size="3KB"),
    "bin": Checkpoint(CASES["gpt2"].build, edit=to_bin),
    "renamed": Checkpoint(CASES["llama"].build, edit=rename_keys),
    "bert_backbone": Checkpoint(bert_backbone),
    "bert_mlm": Checkpoint(bert_mlm),
    "qwen3_moe": Checkpoint(qwen3_moe),
    "mixtral_of_two": Checkpoint(mixtral_of_two),
    "nomic_bert": Checkpoint(nomic_bert),
    "clip": Checkpoint(clip),
    "dinov2": Checkpoint(dinov2),
    "vit_mae": Checkpoint(vit_mae),
    "vit_mae_backbone": Checkpoint(lambda: vit_mae().vit),
    "mamba": Checkpoint(mamba),
    "wav2vec2": Checkpoint(wav2vec2),
    "lstm": Checkpoint(lstm_model),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of all checkpoints; no weight has the value that initialisation would give it."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, checkpoint in CHECKPOINTS.items():
        torch.manual_seed(3)
        model = checkpoint.build()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn(param.shape) * 0.02)
        model.to(checkpoint.dtype).save_pretrained(root / name, max_shard_size=checkpoint.max_shard_size)
        if checkpoint.edit is not None:
            checkpoint.edit(root / name)
    assert (root / "sharded" / "model.safetensors.index.json").exists()
    return str(root)


# --- equal to the unsharded load ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """A call of `from_pretrained`."""

    cls: type
    checkpoint: str
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, root: str) -> nn.Module:
        if self.checkpoint == "state_dict=":
            folder = f"{root}/llama"
            config = transformers.AutoConfig.from_pretrained(folder)
            return self.cls.from_pretrained(None, config=config, state_dict=load_file(f"{folder}/model.safetensors"))
        return self.cls.from_pretrained(f"{root}/{self.checkpoint}", **self.options)


T = transformers
LOADS = {
    "untied": Load(T.LlamaForCausalLM, "llama"),
    "tied": Load(T.LlamaForCausalLM, "llama_tied"),
    "tied, transposed": Load(T.GPT2LMHeadModel, "gpt2"),
    "tied three times": Load(T.T5ForConditionalGeneration, "t5"),
    "image": Load(T.ViTForImageClassification, "vit"),
    "0-dim": Load(T.CLIPModel, "clip"),
    "mamba": Load(T.MambaForCausalLM, "mamba"),
    "weight_norm": Load(T.Wav2Vec2Model, "wav2vec2"),
    "lstm": Load(LSTMModel, "lstm"),
    "files by index": Load(T.LlamaForCausalLM, "sharded"),
    ".bin": Load(T.GPT2LMHeadModel, "bin"),
    "state_dict=": Load(T.LlamaForCausalLM, "state_dict="),
    "dtype=bfloat16": Load(T.LlamaForCausalLM, "llama", {"dtype": torch.bfloat16}),
    "dtype=float16, parts in float32": Load(T.T5ForConditionalGeneration, "t5", {"dtype": torch.float16}),
    "dtype=auto": Load(T.AutoModelForCausalLM, "llama_bf16", {"dtype": "auto"}),
    "bf16 to fp32": Load(T.AutoModelForCausalLM, "llama_bf16", {"dtype": torch.float32}),
    "device_map=cpu": Load(T.LlamaForCausalLM, "llama", {"device_map": "cpu"}),
    "device_map=auto": Load(T.LlamaForCausalLM, "llama", {"device_map": "auto"}),
    "device_map=cpu:0": Load(T.LlamaForCausalLM, "llama", {"device_map": "cpu:0"}),
    "backbone to head": Load(T.BertForSequenceClassification, "bert_backbone", {"num_labels": 3}),
    "backbone to tied head": Load(T.BertForMaskedLM, "bert_backbone"),
    "head to backbone": Load(T.BertModel, "bert_mlm"),
    "fresh head": Load(T.GPT2ForSequenceClassification, "gpt2", {"num_labels": 5, "pad_token_id": 0}),
    "key_mapping": Load(T.LlamaForCausalLM, "renamed", {"key_mapping": {r"^zzz\.": "model."}}),
    "another head": Load(T.BertForSequenceClassification, "bert", {"num_labels": 7, "ignore_mismatched_sizes": True}),
    # 3 and 4 rows are cut into blocks of 2 on two ranks, so rank 0 alone would not see the difference.
    "a head of one more row": Load(
        T.BertForSequenceClassification, "bert", {"num_labels": 4, "ignore_mismatched_sizes": True}
    ),
    "another vocabulary": Load(T.LlamaForCausalLM, "llama", {"vocab_size": VOCAB - 1, "ignore_mismatched_sizes": True}),
    "experts": Load(T.MixtralForCausalLM, "mixtral"),
    "more experts": Load(T.Qwen3MoeForCausalLM, "qwen3_moe"),
    "a rank without an expert": Load(T.MixtralForCausalLM, "mixtral_of_two"),
    "fused rows": Load(T.NomicBertForMaskedLM, "nomic_bert"),
    "fused rows of dinov2": Load(T.Dinov2Model, "dinov2"),
    "frozen by its constructor": Load(T.ViTMAEForPreTraining, "vit_mae"),
    "frozen by its constructor, and not in the file": Load(T.ViTMAEForPreTraining, "vit_mae_backbone"),
    "frozen by its constructor, in half precision": Load(T.ViTMAEForPreTraining, "vit_mae", {"dtype": torch.bfloat16}),
}


@contextlib.contextmanager
def activated(config: dict[str, Any]) -> Iterator[None]:
    """Partition every load within, as the Trainer's arguments do."""
    activate(hf_zero.ZeroConfig.load(config), torch.device("cpu"))
    try:
        yield
    finally:
        hf_zero.undo()


def check_load(name: str, is_activated: bool, root: str) -> None:
    """Ranks with different seeds (under `Init`) get the fresh heads of rank 0."""
    load = LOADS[name]
    torch.manual_seed(11)
    reference, after = load(root), torch.get_rng_state()
    torch.manual_seed(11 if is_activated or dist.get_rank() == 0 else 12)
    before = torch.get_rng_state()
    with activated(STAGE_3) if is_activated else hf_zero.Init(STAGE_3):
        model = load(root)
    assert differences(reference, model) == []
    goes_on = is_activated or dist.get_rank() == 0
    assert torch.equal(torch.get_rng_state(), after if goes_on else before)
    assert model.training is reference.training


# What these show, others do: "fused rows", "untied" and "experts" of other models, the two halves of the last one by itself.
_OTHERS = ("fused rows of dinov2", "image", "mamba", "more experts", "frozen by its constructor, in half precision")


@on_ranks(2, name=[*(name for name in LOADS if name not in _OTHERS), *by_hand(*_OTHERS)])
def test_loaded_model_has_the_bits_of_the_unsharded_one(name: str, checkpoints: str) -> None:
    check_load(name, False, checkpoints)


@on_ranks(3, name=list(LOADS))
def test_loaded_model_has_the_bits_of_the_unsharded_one_in_a_whole_program(name: str, checkpoints: str) -> None:
    check_load(name, True, checkpoints)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "is_activated"), [(2, True), (3, False)])
def test_loaded_model_has_the_bits_of_the_unsharded_one_on_other_ranks(
    num_ranks: int, is_activated: bool, checkpoints: str
) -> None:
    run_ranks(check_loads, num_ranks, is_activated, checkpoints, timeout_s=300)


def check_loads(is_activated: bool, root: str) -> None:
    for name in LOADS:
        check_load(name, is_activated, root)


# --- what is read ---------------------------------------------------------------------------------------------------


class CountingFile:
    """A safetensors file that counts the bytes that are asked of it."""

    num_bytes = 0

    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_slice(self, name: str) -> Any:
        return CountingSlice(self._opened.get_slice(name))


class CountingSlice:
    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __getitem__(self, index: Any) -> Tensor:
        rows = self._opened[index]
        CountingFile.num_bytes += rows.nbytes
        return rows


def bytes_asked_for(root: str, names: list[str]) -> dict[str, tuple[int, int, int]]:
    """Runs on a rank: bytes read of the files, bytes of its rows, and of the whole model."""
    from transformers import modeling_utils

    opens = modeling_utils.safe_open
    counts = {}
    for name in names:
        CountingFile.num_bytes = 0
        counting = mock.patch.object(modeling_utils, "safe_open", lambda *a, **k: CountingFile(opens(*a, **k)))
        headers = mock.patch.object(loading, "checkpoint_shapes", wraps=checkpoint_shapes)
        with counting, headers as shapes, hf_zero.Init(STAGE_3):
            model = LOADS[name](root)
        assert shapes.call_count == (dist.get_rank() == 0)
        whole = sum(4 * param.numel() for param in model.parameters())
        counts[name] = CountingFile.num_bytes, sum(local_of(param).nbytes for param in model.parameters()), whole
    return counts


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_rank_reads_its_rows_only(checkpoints: str, num_ranks: int) -> None:
    sliced = ["untied", "tied", "tied, transposed", "files by index", "experts", "more experts", "backbone to head"]
    by_rank = run_ranks(bytes_asked_for, num_ranks, checkpoints, [*sliced, "fused rows", "a rank without an expert"])
    fresh = 4 * 3 * 16 + 4 * 3  # the classification head, which no file has
    for name in sliced:
        whole = by_rank[0][name][2] - (fresh if name == "backbone to head" else 0)
        assert sum(counts[name][0] for counts in by_rank) == whole
        for read, own, _ in (counts[name] for counts in by_rank):
            assert own - fresh <= read <= own
            assert read < 1.25 * whole / num_ranks
    for read, own, whole in (counts["fused rows"] for counts in by_rank):
        assert own < read < whole
    if num_ranks == 3:
        assert all(counts["a rank without an expert"][0] > counts["experts"][1] / 8 for counts in by_rank)


@on_ranks(2)
def test_loading_holds_the_rows_and_little_more(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4
    )
    if dist.get_rank() == 0:
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    dist.barrier()
    with LiveBytes() as live, window_of(1), hf_zero.Init(STAGE_3):
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    own = sum(local_of(param).nbytes for param in model.parameters())
    own += sum(buffer.nbytes for buffer in model.buffers())
    sizes = [4 * param.numel() for param in model.parameters()]
    assert own < 0.51 * sum(sizes)
    assert live.now <= own + 1024
    assert live.peak <= own + max(sizes)


# --- which tensors are read whole -----------------------------------------------------------------------------------


def whole_names(root: str, checkpoint: str, num_ranks_wanted: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    from hf_zero.layout import Cut, RowLayout

    def cut_by_rows(param: Tensor, num_ranks: int) -> Cut:
        shape = tuple(param.shape)
        return Cut(shape, RowLayout(shape, num_ranks if param.ndim else 1), 0)

    counts = {}
    with torch.device("meta"):
        model = CHECKPOINTS[checkpoint].build()
    for n in num_ranks_wanted:
        world = mock.Mock(num_shards=n, cut_of=lambda param, n=n: cut_by_rows(param, n))
        shapes = checkpoint_shapes(None, [f"{root}/{checkpoint}/model.safetensors"], None)
        whole = names_to_read_whole(model, shapes, get_model_conversion_mapping(model), world)
        counts[n] = len(whole), len(list(model.parameters()))
    return counts


def test_experts_are_read_by_rows_and_fused_tensors_whole(checkpoints: str) -> None:
    assert whole_names(checkpoints, "llama", (2, 3)) == {2: (0, 21), 3: (0, 21)}
    mixtral = whole_names(checkpoints, "mixtral", (2, 3, 16, 17))
    assert [mixtral[n][0] for n in (2, 3, 16, 17)] == [0, 0, 0, 4]  # two expert parameters a layer
    assert whole_names(checkpoints, "nomic_bert", (2,))[2][0] >= 3  # query, key and value
    assert whole_names(checkpoints, "clip", (2,))[2][0] == 1  # the scalar


def test_keeps_rows_knows_which_conversions_mix_rows() -> None:
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose

    stacked, experts = [(4, 6, 5)], [[(6, 5)] * 4]
    assert keeps_rows([MergeModulelist(dim=0)], experts, stacked, 2)
    assert keeps_rows([MergeModulelist(dim=0), Concatenate(dim=1)], [[(3, 5)] * 4] * 2, stacked, 4)
    assert not keeps_rows([MergeModulelist(dim=0)], experts, stacked, 3)  # 2, 2 and 0 experts
    assert not keeps_rows([MergeModulelist(dim=0), Concatenate(dim=0)], experts, stacked, 2)
    assert not keeps_rows([MergeModulelist(dim=0)], [[(6, 5)] * 3], stacked, 2)
    assert not keeps_rows([MergeModulelist(dim=1)], experts, stacked, 2)
    assert keeps_rows([Concatenate(dim=1)], [[(4, 3)], [(4, 3)]], [(4, 6)], 2)
    assert keeps_rows([Concatenate(dim=-1)], [[(4, 3)], [(4, 3)]], [(4, 6)], 2)
    assert not keeps_rows([Concatenate(dim=0)], [[(2, 6)], [(2, 6)]], [(4, 6)], 2)
    assert not keeps_rows([Concatenate(dim=-2)], [[(2, 6)], [(2, 6)]], [(4, 6)], 2)
    assert not keeps_rows([Chunk(dim=0)], [[(12, 6)]], [(4, 6)] * 3, 2)
    assert keeps_rows([Chunk(dim=1)], [[(4, 6)]], [(4, 2)] * 3, 2)
    assert keeps_rows([Transpose(1, 2)], [[(4, 5, 6)]], stacked, 2)
    assert not keeps_rows([Transpose(0, 1)], [[(6, 4, 5)]], stacked, 2)
    assert not keeps_rows([object()], [[(4, 6, 5)]], stacked, 2)
    assert keeps_rows([MergeModulelist(dim=0)], experts, stacked, 8, cut=1)  # more ranks than experts
    assert keeps_rows([MergeModulelist(dim=0), Concatenate(dim=1)], [[(3, 5)] * 4] * 2, stacked, 8, cut=2)
    assert not keeps_rows([MergeModulelist(dim=0), Concatenate(dim=1)], [[(3, 5)] * 4] * 2, stacked, 8, cut=1)
    assert not keeps_rows([MergeModulelist(dim=0)], [[(6, 5)] * 3], stacked, 8, cut=1)
    assert keeps_rows([Concatenate(dim=0)], [[(2, 6)], [(2, 6)]], [(4, 6)], 2, cut=1)
    assert not keeps_rows([Concatenate(dim=0)], [[()]], [()], 2)


# --- errors ---------------------------------------------------------------------------------------------------------


BAD_LOADS = {
    "mismatch": ("RuntimeError", "mismatch"),
    "one more row": ("RuntimeError", "mismatch"),
    "device_map": ("PartitionError", "device_map"),
    "device_map of two names": ("PartitionError", "device_map"),
    "device_map on one rank": ("PartitionError", "rank 1: device_map"),
    "quantised": ("PartitionError", "quantised"),
    "broken file on one rank": ("PartitionError", "rank 1: .*input/output error"),
}


@on_ranks(2, kind=list(BAD_LOADS))
def test_a_load_that_fails_fails_on_all_ranks(kind: str, checkpoints: str) -> None:
    rank, (type_name, message) = dist.get_rank(), BAD_LOADS[kind]
    options: dict[str, Any] = {}
    folder, cls = f"{checkpoints}/llama", transformers.LlamaForCausalLM
    if kind == "mismatch":
        options = {"vocab_size": VOCAB + 1}
    elif kind == "one more row":
        folder, cls, options = f"{checkpoints}/bert", transformers.BertForSequenceClassification, {"num_labels": 4}
    elif kind == "device_map":
        options = {"device_map": {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.layers": "cpu", "": "disk"}}
    elif kind == "device_map of two names":
        options = {"device_map": {"model": "cpu", "lm_head": "cpu:0"}}
    elif kind == "device_map on one rank":
        options = {"device_map": "meta" if rank == 1 else None}
    elif kind == "quantised":
        options = {"quantization_config": transformers.FineGrainedFP8Config()}
    with contextlib.ExitStack() as stack:
        if kind == "quantised":
            stack.enter_context(quantisers_run_anywhere())
        if kind == "broken file on one rank" and rank == 1:
            stack.enter_context(mock.patch("transformers.modeling_utils.safe_open", broken_open))
        caught = stack.enter_context(pytest.raises(Exception, match=re.compile(message, re.DOTALL)))
        with hf_zero.Init(STAGE_3):
            cls.from_pretrained(folder, **options)
    assert type(caught.value).__name__ == type_name, caught.value
    assert (torch.get_default_dtype(), "HF_DEACTIVATE_ASYNC_LOAD" in os.environ) == (torch.float32, False)
    with hf_zero.Init(STAGE_3):
        transformers.LlamaForCausalLM.from_pretrained(f"{checkpoints}/llama")


def broken_open(*args: Any, **kwargs: Any) -> None:
    raise OSError("input/output error")


@contextlib.contextmanager
def quantisers_run_anywhere() -> Iterator[None]:
    """Let a quantiser pass its check of the machine, so that the load goes on to ours."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer as Quantizer

    with (
        mock.patch.object(Quantizer, "validate_environment", lambda *a, **k: None),
        mock.patch.object(Quantizer, "preprocess_model", lambda *a, **k: None),
        mock.patch.object(Quantizer, "update_device_map", lambda self, device_map: device_map),
    ):
        yield


@pytest.fixture
def with_other_files(checkpoints: str, tmp_path: Path) -> Path:
    """Two folders with a folder `model`, which differ in the width of an embedding."""
    for name in ("llama", "other"):
        shutil.copytree(f"{checkpoints}/llama", tmp_path / f"of_{name}" / "model")
    file = tmp_path / "of_other" / "model" / "model.safetensors"
    state = load_file(file)
    state["model.embed_tokens.weight"] = torch.cat([state["model.embed_tokens.weight"]] * 2)
    save_file(state, file, metadata={"format": "pt"})
    return tmp_path


@on_ranks(2, other=[0, 1])
def test_ranks_with_other_files_fail_all(other: int, with_other_files: Path) -> None:
    """The same path is a model of another width on the rank `other`, as on a host with a copy of its own."""
    name = "other" if dist.get_rank() == other else "llama"
    with (
        contextlib.chdir(with_other_files / f"of_{name}"),
        hf_zero.Init(STAGE_3),
        pytest.raises((RuntimeError, hf_zero.PartitionError)),
    ):
        transformers.LlamaForCausalLM.from_pretrained("model", vocab_size=VOCAB)


# --- trained afterwards ---------------------------------------------------------------------------------------------


def train(model: nn.Module, name: str, ranks: list[int], num_steps: int = 2) -> list[float]:
    """Losses of some steps; of several ranks' batches their mean, as the exchange of gradients takes it."""
    case, losses = CASES[name], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=False)
    for step in range(num_steps):
        optimizer.zero_grad()
        for rank in ranks:
            loss = case.loss(model, case.batch(step, rank))
            (loss / len(ranks)).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def farthest(reference: nn.Module, model: nn.Module) -> float:
    """The greatest difference of a weight of this rank's rows."""
    pairs = zip(reference.parameters(), model.parameters(), strict=True)
    gaps = [(local_of(param) - own_rows(wanted, param)).abs().flatten() for wanted, param in pairs]
    return torch.cat(gaps).max().item()


def check_training(stage: int, name: str, root: str) -> None:
    """Two steps of a loaded model, against the unsharded model that sees the batches of all ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    cls = type(make_model(CASES[name]))
    reference = cls.from_pretrained(f"{root}/{name}").train()
    with hf_zero.Init({"stage": stage, "timeout_s": 20}):
        model = cls.from_pretrained(f"{root}/{name}")
    losses = train(model.train(), name, [rank])
    wanted = train(reference, name, list(range(num_ranks)))[rank::num_ranks]
    # As in test_parity: some units in the last place for another order of additions.
    assert farthest(reference, model) < 4e-6
    assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < 2e-6
    assert losses[0] != losses[1]


@on_ranks(2, stage=STAGES, name=["gpt2", "t5", "bert", "vit", *by_hand("llama", "mixtral")])
def test_loaded_model_trains_as_the_unsharded_one(stage: int, name: str, checkpoints: str) -> None:
    check_training(stage, name, checkpoints)


@on_ranks(3, name=["llama", "mixtral", *by_hand("gpt2", "t5", "bert", "vit")])
def test_loaded_model_trains_as_the_unsharded_one_on_three_ranks(name: str, checkpoints: str) -> None:
    check_training(3, name, checkpoints)


@on_ranks(2)
def test_bf16_checkpoint_has_fp32_masters_and_computes_in_bf16(checkpoints: str) -> None:
    with hf_zero.Init({"stage": 3}):
        model = transformers.LlamaForCausalLM.from_pretrained(f"{checkpoints}/llama_bf16", dtype="auto")
    seen = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append((module.weight.dtype, args[0].dtype)))
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    reference = transformers.LlamaForCausalLM.from_pretrained(f"{checkpoints}/llama_bf16", dtype=torch.float32)
    assert farthest(reference, model) == 0
    train(model, "llama", [dist.get_rank()], 1)
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert 0 < farthest(reference, model) < 0.02


@on_ranks(2)
def test_a_copy_of_a_loaded_model_is_a_model_of_its_own(checkpoints: str) -> None:
    """It trains by itself, before and after the original has its engine."""
    with hf_zero.Init({"stage": 3, "timeout_s": 20}):
        model = transformers.LlamaForCausalLM.from_pretrained(f"{checkpoints}/llama")
    reference = transformers.LlamaForCausalLM.from_pretrained(f"{checkpoints}/llama")
    own, ranks = [dist.get_rank()], list(range(dist.get_world_size()))
    early = copy.deepcopy(model)
    train(model, "llama", own)
    assert farthest(reference, early) == 0
    late = copy.deepcopy(model)
    train(early, "llama", own)
    assert farthest(early, model) == 0
    train(reference, "llama", ranks)
    assert farthest(reference, model) < 1e-6
    train(late, "llama", own)
    train(reference, "llama", ranks)
    assert farthest(reference, late) < 1e-6 and farthest(reference, model) > 1e-3
    engines = [hf_zero.engine_of(each) for each in (model, early, late)]
    assert len(set(map(id, engines))) == 3 and None not in engines
