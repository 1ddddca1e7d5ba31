"""What the tests train with the plain Trainer: data, models, arguments, and what the log says afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import hf_zero as zero
from tests.models import CASES, LENGTH, VOCAB, make_model

Values = dict[str, Any]
Build = Callable[[str], nn.Module]  # a model, from a folder with what can be loaded
COLLECTIVES = "pairwise"  # alike on every machine, whether its processes can share memory or not


def dataset(num_rows: int = 16, seed: int = 0) -> list[dict[str, list[int]]]:
    """Rows of 3 to 6 tokens, so that batches are padded and ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LENGTH + 1, (num_rows,), generator=generator).tolist()
    rows = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(name: str, filler: int) -> Tensor:
        return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100), "attention_mask": mask}


class PlainModule(nn.Module):
    """Nothing of transformers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, VOCAB)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        assert labels is not None
        return {
            "loss": nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100),
            "logits": logits,
        }


def loaded(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(f"{folder}/llama")


def with_dropout(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(f"{folder}/llama", attention_dropout=0.3)


def with_adapters(folder: str) -> nn.Module:
    model = loaded(folder)
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "v_proj"]))


def from_config(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(f"{folder}/llama"))


def mixtral(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(f"{folder}/mixtral")


def gpt2(folder: str) -> nn.Module:
    return make_model(CASES["gpt2"])


def t5(folder: str) -> nn.Module:
    return make_model(CASES["t5"])


def plain_module(folder: str) -> nn.Module:
    return PlainModule()


def arguments(
    folder: str, stage: int | None, kind: type[TrainingArguments] | None = None, **options: Any
) -> TrainingArguments:
    """Arguments of four short steps; those of plain transformers where there is no stage."""
    values: Values = {
        "output_dir": f"{folder}/out",
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    } | options
    if stage is None:
        return (kind or TrainingArguments)(**values)
    values.setdefault("zero", {"stage": stage, "collectives": COLLECTIVES})
    return (kind or zero.ZeroTrainingArguments)(**values)


def trainer_of(model: nn.Module | None, args: TrainingArguments, kind: type[Trainer] = Trainer, **options: Any) -> Any:
    """A Trainer on the usual rows."""
    return kind(model=model, args=args, **{"train_dataset": dataset(), "data_collator": collate, **options})


def make_trainer(folder: str, stage: int, build: Build = loaded, **options: Any) -> Any:
    """A Trainer of a model that is the same each time."""
    args = arguments(folder, stage, **options)
    torch.manual_seed(3)
    return trainer_of(build(folder), args)


def trained(trainer: Any, **options: Any) -> list[float]:
    """Train; the losses."""
    trainer.train(**options)
    return logged(trainer)


def logged(trainer: Any, key: str = "loss", since: int = 0) -> list[float]:
    """What the Trainer has logged under a key, by step."""
    return [entry[key] for entry in trainer.state.log_history if key in entry and entry["step"] > since]


def undone(job: Callable[..., Any]) -> Callable[..., Any]:
    """A job that leaves transformers as it was, since the next one runs in the same process."""

    @functools.wraps(job)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return job(*args, **kwargs)
        finally:
            zero.undo()
            _clear_sharding_prop_cache()  # it refers to the groups of this job

    return wrapped
