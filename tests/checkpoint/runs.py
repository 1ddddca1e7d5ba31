"""Training runs that save checkpoints, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from tests.integrations.trainer.test_trainer import (
    arguments,
    collate,
    dataset,
    loaded,
)

Values = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]


def make_trainer(folder: str, run: str, build: Callable[[str], nn.Module] = loaded, **options: Any) -> Trainer:
    saving = {"output_dir": run, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    settings = {"stage": 3, "collectives": "pairwise", "timeout_s": 10}
    args = arguments(folder, 3, zero=settings, **saving | options)
    torch.manual_seed(3)
    return Trainer(model=build(folder), args=args, train_dataset=dataset(), data_collator=collate)
