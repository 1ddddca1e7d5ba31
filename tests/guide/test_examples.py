"""The examples of the guide run as they stand, on two ranks."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import hf_zero
from tests.ranks import on_ranks

_GUIDE = Path(hf_zero.__file__).parent / "guide"
EXAMPLES = [
    (path.name, number)
    for path in sorted(_GUIDE.glob("*.md"))
    for number in range(len(re.findall(r"```python\n", path.read_text())))
]


class Engine:
    """What an example of the guide hands weights over to."""

    def load(self, name: str, weight: Tensor) -> None:
        """Whole weights come."""
        assert weight.dtype == torch.bfloat16
        assert name.startswith(("model.", "lm_head."))


@on_ranks(2, timeout_s=120, example=EXAMPLES)
def test_an_example_runs_as_it_stands(example: tuple[str, int]) -> None:
    page, number = example
    code = re.findall(r"```python\n(.*?)```", (_GUIDE / page).read_text(), re.S)[number]
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    names = _what_readers_have(Path(folder[0]))
    os.chdir(folder[0])
    try:
        exec(compile(code.replace("path-or-hub-name", f"{folder[0]}/model"), page, "exec"), names)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        hf_zero.undo()
        os.chdir(Path(hf_zero.__file__).parents[1])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def _what_readers_have(folder: Path) -> dict[str, Any]:
    config = transformers.LlamaConfig(
        vocab_size=45,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "model")
    dist.barrier()
    words = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(42))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    ids = torch.arange(8 * 6).reshape(8, 6) % 42
    rows = [{"input_ids": row, "labels": row} for row in ids.tolist()]
    batches = [{"input_ids": ids[:2], "labels": ids[:2]}] * 2
    return {
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "Trainer": transformers.Trainer,
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "dataset": Dataset.from_list(rows),
        "texts": Dataset.from_dict({"text": ["w1 w2 w3 w4"] * 8}),
        "tokenizer": tokenizer,
        "batch": batches[0],
        "loader": torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=transformers.default_data_collator),
        "engine": Engine(),
    }
