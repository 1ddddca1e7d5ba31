"""Rank 0 saves alone at the very end, when the others' programs have ended."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_zero as zero
from hf_zero.engine.ranks import leaving
from tests.engine.twins import Net
from tests.ranks import ENVIRONMENT, on_ranks

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from tests.engine.twins import Net, batch, square_loss

store, rank, stage, ending = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def main_worker():
    torch.manual_seed(0)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    model = Net()
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        square_loss(model, batch(step, rank)).backward()
        if ending == "error" and rank and step:
            raise ValueError("on purpose")
        optimizer.step()
        optimizer.zero_grad()
    together = whole_state_dict(model), optimizer.state_dict()["state"]
    dist.barrier()
    if not rank:
        time.sleep(0.5)
        torch.save((together, (whole_state_dict(model), optimizer.state_dict()["state"])), store + " saved")
    if ending == "destroyed":
        dist.destroy_process_group()


def main():
    if rank >= 0:
        main_worker()
    else:
        print("alone")


if __name__ == "__main__":
    main()
"""


def _run(folder: Path, stage: int, ending: str) -> list[subprocess.CompletedProcess[str]]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).resolve().parents[3])
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder / "store"), str(rank), str(stage), ending],
            env=ENVIRONMENT | {"PYTHONPATH": root},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [each.communicate(timeout=240)[1] for each in started]
    finally:
        for each in started:
            each.kill()
    done = [
        subprocess.CompletedProcess(each.args, each.returncode, stderr=e)
        for each, e in zip(started, errors, strict=True)
    ]
    return done


@pytest.mark.parametrize(("stage", "ending"), [(3, "returned"), pytest.param(1, "destroyed", marks=pytest.mark.slow)])
def test_weights_and_states_saved_by_rank_0_after_the_others_have_ended(
    stage: int, ending: str, tmp_path: Path
) -> None:
    assert [
        (each.returncode, each.stderr[-2000:] if each.returncode else "") for each in _run(tmp_path, stage, ending)
    ] == [(0, "")] * 2
    together, alone = torch.load(tmp_path / "store saved")
    assert together[0].keys() == alone[0].keys()
    assert all(torch.equal(alone[0][key], value) for key, value in together[0].items())
    assert len(together[1]) == len(alone[1]) > 0
    for number, state in together[1].items():
        assert torch.equal(alone[1][number]["momentum_buffer"], state["momentum_buffer"])


def test_a_rank_that_ends_by_an_error_does_not_stay(tmp_path: Path) -> None:
    first, second = _run(tmp_path, 1, "error")
    assert "ValueError: on purpose" in second.stderr
    assert "CollectiveError: rank 0 lost rank 1" in first.stderr


@on_ranks(2)
def test_ranks_that_leave_their_models_in_different_orders_do_not_stay_for_each_other() -> None:
    leaving._leavers.clear()  # of earlier jobs
    models = [zero.shard_model(Net(), {"stage": 3}) for _ in range(2)]
    if dist.get_rank():
        leaving._leavers.reverse()
    assert len(leaving._leavers) == len(models)
    leaving._stay()
    dist.barrier()
