"""Rank 0 saves alone at the very end, when the others' programs have ended."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_zero as zero
from hf_zero.engine.ranks import leaving
from tests.engine.twins import Net
from tests.ranks import ENVIRONMENT, on_ranks

# One process imports, and is forked into the ranks of several programs: each ends as Python ends.
SCRIPT = """
import gc, json, os, sys, time
import torch, torch.distributed as dist
import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.engine.units.served import ServedParameters
from hf_zero.optim.served import _States
from tests.engine.twins import Net, batch, square_loss

folder, programs = sys.argv[1], json.loads(sys.argv[2])


def main_worker():
    torch.manual_seed(0)
    if not dist.is_initialized():
        dist.init_process_group("gloo", f"file://{folder}/{ending}.store", rank=rank, world_size=2)
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
    if ending == "ended":
        dist.destroy_process_group()
    if not rank:
        time.sleep(0.5)
        torch.save((together, (whole_state_dict(model), optimizer.state_dict()["state"])), f"{folder}/{ending}.saved")
    if ending == "destroyed":
        dist.destroy_process_group()


def main():
    if rank >= 0:
        main_worker()
    else:
        print("alone")


def living(kind):
    return sum(type(each) is kind for each in gc.get_objects())


children = {}
for ending, stage, rank in [(ending, stage, rank) for ending, stage in programs for rank in range(2)]:
    child = os.fork()
    if not child:
        os.dup2(os.open(f"{folder}/{ending}.{rank}", os.O_WRONLY | os.O_CREAT), 2)
        break
    children[child] = f"{ending}.{rank}"
if not child and ending == "swept":
    gc.disable()  # which would collect at any line
    counts = []
    for _ in range(3):
        main()
        dist.barrier()
        counts.append(living(_States))
        gc.collect()
        counts[-1] = counts[-1], living(ServedParameters)
    print(json.dumps(counts), file=sys.stderr)
elif not child:
    main()
else:
    codes = {children[each]: os.waitstatus_to_exitcode(status) for each, status in (os.wait() for _ in children)}
    print(json.dumps(codes))
"""
PROGRAMS = [("returned", 3), ("destroyed", 1), ("ended", 3), ("error", 1), ("swept", 3)]


@dataclass(frozen=True)
class Ended:
    """Programs of two ranks: their folder, and the exit codes and errors of both."""

    folder: Path
    codes: dict[str, int]

    def ranks(self, ending: str) -> list[tuple[int, str]]:
        return [
            (self.codes[f"{ending}.{rank}"], Path(self.folder, f"{ending}.{rank}").read_text()) for rank in range(2)
        ]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("leaving")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).resolve().parents[3])
    command = [sys.executable, str(script), str(folder), json.dumps(PROGRAMS)]
    environment = ENVIRONMENT | {"PYTHONPATH": root}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    return Ended(folder, json.loads(done.stdout))


@pytest.mark.parametrize("ending", ["returned", "destroyed", "ended"])
def test_weights_and_states_saved_by_rank_0_after_the_others_have_ended(ending: str, ended: Ended) -> None:
    assert [(code, error[-2000:] if code else "") for code, error in ended.ranks(ending)] == [(0, "")] * 2
    together, alone = torch.load(ended.folder / f"{ending}.saved")
    assert together[0].keys() == alone[0].keys()
    assert all(torch.equal(alone[0][key], value) for key, value in together[0].items())
    assert len(together[1]) == len(alone[1]) > 0
    for number, state in together[1].items():
        assert torch.equal(alone[1][number]["momentum_buffer"], state["momentum_buffer"])


def test_a_rank_that_ends_by_an_error_does_not_stay(ended: Ended) -> None:
    (_, first), (_, second) = ended.ranks("error")
    assert "ValueError: on purpose" in second
    assert "CollectiveError: rank 0 lost rank 1" in first


def test_what_one_run_of_a_sweep_has_left_is_gone_in_the_next(ended: Ended) -> None:
    for code, told in ended.ranks("swept"):
        assert code == 0, told[-2000:]
        # Rank 0 may still read the states that this rank's `main` has dropped; nobody what `gc.collect` has.
        assert json.loads(told.splitlines()[-1]) == [[1, 0]] * 3


@on_ranks(2)
def test_ranks_that_leave_their_models_in_different_orders_do_not_stay_for_each_other() -> None:
    leaving._leavers.clear()  # of earlier jobs
    models = [zero.shard_model(Net(), {"stage": 3}) for _ in range(2)]
    if dist.get_rank():
        leaving._leavers.reverse()
    assert len(leaving._leavers) == len(models)
    leaving._stay(leaving.Leaves.GROUP)
    dist.barrier()
