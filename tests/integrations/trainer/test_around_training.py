"""What a Trainer does around its training: searching for hyperparameters, pushing to the hub; against plain DDP."""

from __future__ import annotations

import importlib.machinery
import shutil
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback
from transformers import trainer as transformers_trainer
from transformers.hyperparameter_search import OptunaBackend

import hf_zero as zero
from tests.integrations.trainer.runs import arguments, dataset, loaded, logged, trained, trainer_of, undone
from tests.ranks import on_ranks

RATES = (1e-3, 3e-2)


class Trial:
    """A trial of optuna, as far as transformers uses one."""

    def __init__(self, params: dict[str, float], number: int) -> None:
        self.params, self.number, self.value = params, number, 0.0


class Study:
    """A search that goes through `RATES`."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []

    def _is_multi_objective(self) -> bool:
        return False

    def optimize(self, objective: Any, n_trials: int, **_: Any) -> None:
        for number in range(n_trials):
            self.trials.append(Trial({"learning_rate": RATES[number]}, number))
            self.trials[-1].value = objective(self.trials[-1])

    @property
    def best_trial(self) -> Trial:
        return min(self.trials, key=lambda each: each.value)


def optuna() -> Any:
    """A stand-in for the package."""
    module: Any = types.ModuleType("optuna")
    module.__spec__ = importlib.machinery.ModuleSpec("optuna", None)
    module.trial = types.SimpleNamespace(FixedTrial=Trial, BaseTrial=Trial)
    module.Trial, module.create_study = Trial, lambda **_: Study()
    return module


class Evaluations(TrainerCallback):  # type: ignore[misc]
    """Learning rates and losses of all evaluations."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        self.seen.append((args.learning_rate, metrics["eval_loss"]))


def searched(folder: str, stage: int | None, **options: Any) -> tuple[list[tuple[float, float]], Any, Any]:
    args = arguments(folder, stage, eval_strategy="steps", eval_steps=2, **options)

    def init(trial: Any = None) -> Any:
        torch.manual_seed(3)
        return loaded(folder)

    seen = Evaluations()
    trainer = trainer_of(None, args, model_init=init, eval_dataset=dataset(8, 1), callbacks=[seen])
    with (
        mock.patch.dict(sys.modules, optuna=optuna()),
        mock.patch.object(OptunaBackend, "is_available", lambda _: True),
    ):
        best = trainer.hyperparameter_search(hp_space=lambda trial: trial.params, n_trials=len(RATES), backend="optuna")
    return seen.seen, best, trainer


@on_ranks(2)
@undone
def test_a_search_for_hyperparameters_finds_what_ddp_finds(folder: str, tmp_path: Path) -> None:
    """Rank 0 lets go of its model after each trial, the others do not."""
    saves = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    expected, best, _ = searched(folder, None, output_dir=str(tmp_path / "ddp"), **saves)
    assert len(expected) == 2 * len(RATES)
    for stage in (1, 3):
        found, ours, _ = searched(folder, stage, output_dir=str(tmp_path / f"zero{stage}"), **saves)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0)
        assert (ours is None) == (best is None) == (dist.get_rank() > 0)
        assert best is None or (ours.run_id, ours.hyperparameters) == (best.run_id, best.hyperparameters)


@on_ranks(2)
@undone
def test_each_trial_of_a_search_scales_the_loss_of_fp16(folder: str) -> None:
    *_, trainer = searched(folder, 2, fp16=True, max_steps=2)
    assert type(trainer.accelerator.scaler) is zero.LossScaler


@on_ranks(2)
@undone
def test_weights_only_and_a_model_init_exclude_each_other(folder: str, tmp_path: Path) -> None:
    options = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
    trainer_of(loaded(folder), arguments(folder, 3, **options)).train()
    args = arguments(folder, 3, zero_weights_only=True, **options)
    with pytest.raises(zero.UsageError, match="load the weights there"):
        trainer_of(None, args, model_init=lambda: loaded(folder)).train(resume_from_checkpoint=True)


class Hub:
    """Takes what is uploaded when the training has ended, as a thread may do."""

    def __init__(self) -> None:
        self.uploads: list[tuple[Path, str | None, list[str]]] = []

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        return types.SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(self, folder_path: str, path_in_repo: str | None = None, **options: Any) -> Any:
        ignored = options.get("ignore_patterns") or []
        self.uploads.append((Path(folder_path), path_in_repo, ignored))
        return types.SimpleNamespace(is_done=lambda: True, result=lambda: None, done=lambda: True)

    def deliver(self, target: Path) -> list[str]:
        for folder, place, ignored in self.uploads:
            shutil.copytree(folder, target / (place or ""), ignore=shutil.ignore_patterns(*ignored), dirs_exist_ok=True)
        return sorted(str(path.relative_to(target)) for path in target.rglob("*"))


@on_ranks(2, saves_async=[False, True])
@undone
def test_checkpoints_are_pushed_once_they_are_whole(saves_async: bool, folder: str, tmp_path: Path) -> None:
    hub, out, target = Hub(), str(tmp_path / f"out{saves_async}"), tmp_path / f"hub{saves_async}"
    at_upload: list[bool] = []
    config = {"stage": 3, "collectives": "pairwise", "async_save": saves_async}
    options = {"output_dir": out, "save_strategy": "steps", "save_steps": 1, "max_steps": 2, "zero": config}
    pushing = {"push_to_hub": True, "hub_strategy": "checkpoint", "hub_model_id": "thing", **options}
    uploads = hub.upload_folder

    def upload(**given: Any) -> Any:
        at_upload.append(any(path.name.startswith(".checkpoint") for path in Path(out).iterdir()))
        return uploads(**given)

    hub.upload_folder = upload  # type: ignore[method-assign]
    with (
        mock.patch.object(transformers_trainer, "hf_api", lambda *_, **__: hub),
        mock.patch.object(Trainer, "create_model_card", lambda *_, **__: None),
    ):
        trainer = trainer_of(loaded(folder), arguments(folder, 3, **pushing))
        trained(trainer)
        trainer.accelerator.wait_for_everyone()
    assert (at_upload == []) == (dist.get_rank() > 0)
    assert not any(at_upload)  # nothing half done lies beside what is uploaded
    if dist.get_rank() == 0:
        files = hub.deliver(target)
        assert "model.safetensors" in files
        assert "last-checkpoint/hf_zero_manifest.json" in files
        assert not any(name.startswith((".", "checkpoint")) for name in files)
    trainer.accelerator.wait_for_everyone()
    again = trainer_of(loaded(folder), arguments(folder, 3, **options | {"max_steps": 3}))
    again.train(resume_from_checkpoint=str(target / "last-checkpoint"))
    assert logged(again)[:2] == logged(trainer)
    assert again.state.global_step == 3
