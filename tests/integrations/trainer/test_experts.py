"""The plain Trainer with some experts on each rank, against one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.experts import make
from tests.integrations.trainer.axis_runs import assert_equal, train
from tests.ranks import run_alone, run_ranks


def _train(*args: Any, **options: Any) -> dict[str, Any]:
    return train(functools.partial(make, "qwen3_moe"), *args, **options)


def test_trainer_trains_evaluates_and_resumes_as_one_process(tmp_path: Path) -> None:
    reference = run_alone(_train, str(tmp_path / "one"), 2, None)
    shared = run_ranks(_train, 2, str(tmp_path / "a"), 1, {"stage": 3, "ep_size": 2}, saves=True)
    assert all(each["losses"] == shared[0]["losses"] for each in shared)
    assert_equal(shared[0], reference)
    middle = str(tmp_path / "a" / "checkpoint-2")
    assert_equal(run_alone(_train, str(tmp_path / "b"), 2, {"stage": 2}, resume=middle), reference, first=2)


@pytest.mark.slow
def test_trainer_goes_on_with_experts_shared_among_other_ranks(tmp_path: Path) -> None:
    reference = run_ranks(_train, 4, str(tmp_path / "one"), 1, {"stage": 2})[0]
    run_ranks(_train, 4, str(tmp_path / "a"), 1, {"stage": 1, "ep_size": 4}, saves=True)
    middle = str(tmp_path / "a" / "checkpoint-2")
    found = run_ranks(_train, 4, str(tmp_path / "b"), 1, {"stage": 3, "ep_size": 2}, resume=middle)
    assert_equal(found[0], reference, first=2)


@pytest.mark.slow
def test_trainer_resumes_with_experts_on_the_ranks_that_share_layers(tmp_path: Path) -> None:
    reference = run_alone(_train, str(tmp_path / "one"), 2, None)
    both = {"stage": 3, "tp_size": 2, "ep_size": 2}
    shared = run_ranks(_train, 4, str(tmp_path / "a"), 1, both, saves=True)
    assert_equal(shared[0], reference)
    middle = str(tmp_path / "a" / "checkpoint-2")
    again = run_ranks(_train, 4, str(tmp_path / "b"), 1, both, resume=middle)
    assert again[0]["losses"] == shared[0]["losses"][2:]
    assert_equal(run_alone(_train, str(tmp_path / "c"), 2, {"stage": 2}, resume=middle), reference, first=2)
