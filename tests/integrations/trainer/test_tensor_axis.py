"""The plain Trainer and `ZeroAccelerator` with tensor parallelism x ZeRO, against one process; resumed on other axes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_zero as zero
from hf_zero.errors import ConfigError
from tests.ranks import on_ranks, run_alone, run_ranks
from tests.tensor_axis import LENGTH, VOCAB, load, loss_of, saved

_STEPS = 3


def _data(num_rows: int, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, VOCAB, (num_rows, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


class _Losses(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.seen.append((logs["loss"], logs["grad_norm"]))


def _train(out: str, batch: int, zero_config: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    """Steps of four samples."""
    resume = options.pop("resume", None)
    values = {
        "output_dir": out,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": 1,
        "max_steps": _STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "save_strategy": "steps" if options.pop("saves", False) else "no",
        "save_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    }
    if zero_config is None:
        args = TrainingArguments(**values)
    else:
        args = zero.ZeroTrainingArguments(zero={"collectives": "pairwise", **zero_config}, **values, **options)
    model = AutoModelForCausalLM.from_pretrained(os.environ["TENSOR_AXIS_MODEL"])
    losses = _Losses()
    trainer = Trainer(model, args, train_dataset=_data(19, 0), eval_dataset=_data(7, 1), callbacks=[losses])
    trainer.train(resume_from_checkpoint=resume)
    evaluated = trainer.evaluate()["eval_loss"]
    predictions = trainer.predict(_data(7, 1)).predictions
    zero.undo()
    return {"losses": losses.seen, "eval": evaluated, "predictions": predictions, "step": trainer.state.global_step}


def _run(folder: str, *args: Any, **options: Any) -> dict[str, Any]:
    os.environ["TENSOR_AXIS_MODEL"] = folder
    return _train(*args, **options)


def _equal(found: dict[str, Any], reference: dict[str, Any], first: int = 0) -> None:
    assert found["step"] == _STEPS
    for ours, theirs in zip(found["losses"], reference["losses"][first:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert found["eval"] == pytest.approx(reference["eval"], rel=1e-5)
    assert found["predictions"].shape == reference["predictions"].shape == (7, LENGTH, VOCAB)
    torch.testing.assert_close(
        torch.tensor(found["predictions"]), torch.tensor(reference["predictions"]), rtol=0, atol=1e-3
    )


_OTHER_AXES = ((3, 3, 4, 2), (2, 1, 2, 3), (4, 1, 1, 2))  # ranks, tp_size, samples a cell, stage


@pytest.mark.parametrize("others", [(), pytest.param(_OTHER_AXES, marks=pytest.mark.slow)], ids=["1x2", "any"])
def test_trainer_trains_evaluates_and_resumes_on_any_axes_as_one_process(
    tmp_path: Path, others: tuple[tuple[int, int, int, int], ...]
) -> None:
    folder = saved("llama")
    reference = run_alone(_run, folder, str(tmp_path / "one"), 4, None)
    whole = run_ranks(_run, 4, folder, str(tmp_path / "a"), 2, {"stage": 3}, tp_size=2, saves=True)
    assert all(each["losses"] == whole[0]["losses"] for each in whole)
    _equal(whole[0], reference)
    middle = str(tmp_path / "a" / "checkpoint-2")
    for num_ranks, size, batch, stage in ((2, 2, 4, 1), *others):
        out = str(tmp_path / f"{num_ranks}-{size}")
        config = {"stage": stage, "tp_size": size}
        _equal(run_ranks(_run, num_ranks, folder, out, batch, config, resume=middle)[0], reference, first=2)
    _equal(run_alone(_run, folder, str(tmp_path / "b"), 4, {"stage": 2}, resume=middle), reference, first=2)


@pytest.mark.slow
def test_trainer_goes_on_with_a_tensor_axis_where_there_was_none(tmp_path: Path) -> None:
    folder = saved("llama")
    reference = run_alone(_run, folder, str(tmp_path / "one"), 4, None)
    run_ranks(_run, 2, folder, str(tmp_path / "c"), 2, {"stage": 2}, saves=True)
    axes = ParallelismConfig(tp_size=2, dp_shard_size=2)
    options = {"resume": str(tmp_path / "c" / "checkpoint-2"), "parallelism_config": axes}
    _equal(run_ranks(_run, 4, folder, str(tmp_path / "d"), 2, {"stage": 1}, **options)[0], reference, first=2)


@on_ranks(4)
def test_arguments_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    def refuses(match: str, config: dict[str, Any], **options: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            zero.ZeroTrainingArguments(output_dir=str(tmp_path), use_cpu=True, zero=config, **options)

    refuses("tp_size is 4 in zero, but 2 in the arguments", {"tp_size": 4}, tp_size=2)
    refuses("tp_size is 4 in zero, but 2 in the Para", {"tp_size": 4}, parallelism_config=ParallelismConfig(tp_size=2))
    refuses("cp_size is 5, but . processes run", {}, parallelism_config=ParallelismConfig(cp_size=5))
    refuses("pp_degree", {"stage": 1, "pp_degree": 2})
    refuses("average_tokens_across_devices=False", {"tp_size": 2}, average_tokens_across_devices=False)
    refuses("dispatch_batches", {"tp_size": 2}, accelerator_config={"dispatch_batches": True})
    zero.undo()


def _accelerate(folder: str, out: str) -> tuple[list[float], list[int], int]:
    options = {"parallelism_config": ParallelismConfig(tp_size=2, dp_shard_size=2)}
    accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=2, collectives="pairwise"), **options)
    model = load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.stack([row["input_ids"] for row in _data(9, 0)])
    loader = DataLoader(TensorDataset(rows, torch.arange(9)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, seen = [], []
    for batch, numbers in loader:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        gathered, which = accelerator.gather_for_metrics((loss.detach().repeat(len(batch)), numbers))
        losses.append(gathered.mean().item())
        seen += which.tolist()
    torch.manual_seed(accelerator.process_index)
    accelerator.save_state(out)
    whole = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    for param in model.parameters():
        param.data.zero_()
    accelerator.load_state(out)
    assert len({float(each) for each in accelerator.gather(torch.rand(1))}) == 2  # a random state a cell
    assert all(torch.equal(value, whole[name]) for name, value in accelerator.get_state_dict(model).items())
    return losses, seen, accelerator.num_processes


@on_ranks(2)
def test_axes_that_accelerate_launch_asks_for_reach_both(tmp_path: Path) -> None:
    asked = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
    with mock.patch.dict(os.environ, asked):
        args = zero.ZeroTrainingArguments(output_dir=str(tmp_path), use_cpu=True, zero={"collectives": "pairwise"})
        assert args.zero_config is not None and args.zero_config.tp_size == 2
        zero.undo()
        accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=2, collectives="pairwise"))
    assert accelerator._zero_config.tp_size == 2 and accelerator.parallelism_config.tp_size == 2


def test_accelerator_deals_out_a_batch_to_each_cell_and_collects_its_results_once(tmp_path: Path) -> None:
    found = run_ranks(_accelerate, 4, saved("llama"), str(tmp_path / "state"))
    for losses, seen, num_processes in found:
        assert losses == found[0][0] and len(losses) == 3
        assert seen == list(range(9))
        assert num_processes == 4
    with pytest.raises(ConfigError, match="dispatch_batches"):
        config = DataLoaderConfiguration(dispatch_batches=True)
        zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=2, tp_size=2), dataloader_config=config)
    assert transformers.__version__
