"""`save_pretrained` in stage 0, where every rank has the whole model: called by all ranks, by one, and failing."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_zero as zero
from tests.models import CASES, make_model
from tests.ranks import on_ranks, run_ranks


def _model(is_late: bool, **config: Any) -> Any:
    if is_late:
        with zero.Init({"stage": 0, **config}):
            return make_model(CASES["llama"])
    model = make_model(CASES["llama"])
    zero.shard_model(model, {"stage": 0, **config})
    return model


@on_ranks(3, is_late=[False, True])
def test_all_ranks_call_and_one_writes(is_late: bool, tmp_path: Path) -> None:
    """Each rank reads at once what it has saved, several times, with other values each time."""
    model, folder = _model(is_late), tmp_path / f"model{is_late}"
    for number in range(4):
        with torch.no_grad():
            model.lm_head.weight.fill_(number)
        model.save_pretrained(folder)
        read = AutoModelForCausalLM.from_pretrained(folder)
        assert (read.lm_head.weight == number).all(), number
        dist.barrier()  # before the next one is written


@on_ranks(2)
def test_rank_0_saves_alone_as_under_ddp(tmp_path: Path) -> None:
    model = _model(False)
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path / "model")
    model(**CASES["llama"].batch(0, dist.get_rank())).loss.backward()  # the ranks are in step
    dist.barrier()
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def _save_on_another(folder: str) -> None:
    model = _model(False, timeout_s=1)
    if dist.get_rank() == 1:
        model.save_pretrained(folder)


def test_another_rank_alone_is_an_error(tmp_path: Path) -> None:
    nothing, failure = run_ranks(_save_on_another, 2, str(tmp_path / "model"), expect_failure=True)
    assert nothing is None
    assert failure.type_name == "CollectiveError" and "rank 0 has not made the call" in failure.message


def _fail(folder: str) -> None:
    model = _model(False)
    with mock.patch.object(PreTrainedModel, "save_pretrained", lambda *_, **__: Path(folder, "no", "such").touch()):
        model.save_pretrained(folder)


def test_a_failure_reaches_all(tmp_path: Path) -> None:
    first, second = run_ranks(_fail, 2, str(tmp_path), expect_failure=True)
    assert first.type_name == second.type_name == "CheckpointError"
    assert "FileNotFoundError" in first.message and "rank 0: FileNotFoundError" in second.message
