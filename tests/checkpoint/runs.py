"""Training runs that save checkpoints, for the tests of this folder."""

from __future__ import annotations

from typing import Any

from tests.integrations.trainer import runs
from tests.integrations.trainer.runs import Build, loaded


def make_trainer(folder: str, run: str, build: Build = loaded, **options: Any) -> Any:
    saving = {"output_dir": run, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    settings = {"stage": 3, "collectives": "pairwise", "timeout_s": 10}
    return runs.make_trainer(folder, 3, build, zero=settings, **saving | options)
