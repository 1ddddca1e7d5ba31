"""The pool of rank processes itself."""

import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.state import PartialState

from tests import ranks
from tests.ranks import EVERY_TURN, RankError, RankFailure, alone, on_ranks, run_alone, run_ranks, turns_of

_ROOT = Path(__file__).resolve().parent.parent


def _scaled_rank(scale: int, *, offset: int = 0) -> tuple[int, int, int]:
    return dist.get_rank() * scale + offset, dist.get_world_size(), int(os.environ["RANK"])


def _sum_of_ranks() -> torch.Tensor:
    total = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return total


def _draws() -> tuple[float, float]:
    return torch.rand(()).item(), random.random()


def _fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        print("about to fail")
        raise KeyError("the cause")
    dist.barrier()
    return "passed"


def _fail_quietly_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError("only here")
    return dist.get_rank()


def _pid() -> int:  # os.getpid would not make new workers import this module, which takes time
    return os.getpid()


def _exit_on(rank: int, code: int) -> int:
    if dist.get_rank() == rank:
        print("last words")
        os._exit(code)
    return dist.get_rank()


def _exit_on_1_hang_on_2() -> None:
    if dist.get_rank() == 2:
        _sleep_for_ever()
    _exit_on(1, 7)


def _sleep_for_ever() -> None:
    while True:
        time.sleep(1.0)


def _hang(group: dist.ProcessGroup | None = None) -> None:
    _sleep_for_ever()


def _break_the_end_of_the_group_on(rank: int) -> int:
    if dist.get_rank() == rank:
        dist.destroy_process_group = _hang
    return _pid()


def _leave_traces() -> None:
    os.environ["HF_ZERO_TRACE"] = "left"
    os.environ.pop("HOME", None)
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    PartialState(cpu=True)


def _traces() -> dict[str, object]:
    return {
        "variable": os.environ.get("HF_ZERO_TRACE"),
        "home": os.environ.get("HOME"),
        "folder": os.getcwd(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "accelerate": dict(PartialState._shared_state),
    }


def _alone() -> tuple[bool, bool, int]:
    return dist.is_initialized(), "RANK" in os.environ or "MASTER_PORT" in os.environ, torch.get_num_threads()


def _lock() -> object:
    return threading.Lock()


def _note_pid_and_hang(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    _sleep_for_ever()


def _has_ended(pid: int, within_s: float = 5.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        stat = Path(f"/proc/{pid}/stat")
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":  # ended; whoever adopted it has not reaped it
                return True
        time.sleep(0.05)
    return False


@on_ranks(1, 2, turn=["1a", "1b", "2a", "2b"])
def _turns(folder: Path, turn: str) -> None:
    assert "HF_ZERO_TRACE" not in os.environ and not PartialState._shared_state
    _leave_traces()
    Path(folder, f"{dist.get_world_size()}{turn}").touch()
    assert (dist.get_world_size(), turn) != (2, "2a"), "what is wrong"


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_on_ranks_runs_turns_in_one_job_a_number_of_ranks_and_names_the_one_that_failed(
    is_by_hand: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EVERY_TURN, "1" if is_by_hand else "")
    with pytest.raises(RankError, match=r"what is wrong(?s:.*)in the turn \{'turn': '2a'\}"):
        _turns(folder=tmp_path)
    names = [path.name for path in tmp_path.iterdir()]
    alone = {name[1:] for name in names if name[0] == "1"}
    assert alone == {"1a", "1b", "2a", "2b"} if is_by_hand else len(alone) == 2
    assert is_by_hand or not alone & {name[1:] for name in names if name[0] == "2"}  # dealt out
    assert "22a" in names  # and none after it
    assert {name[0] for name in names} == {"1", "2"}


def test_each_value_comes_up_every_day_and_all_combinations_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"stage": (0, 1, 2, 3), "exchange": ("a", "b"), "dtype": ("x", "y", "z")}
    monkeypatch.delenv(EVERY_TURN, raising=False)
    seen = []
    for name in ("test_one", "test_two", "test_three", "test_four"):
        turns = turns_of(name, values)
        assert len(turns) == 4
        assert all({turn[key] for turn in turns} == set(each) for key, each in values.items())
        assert turns == turns_of(name, values)
        seen += [tuple(turn.values()) for turn in turns]
    assert len(set(seen)) > 8  # what one test leaves out, others have
    monkeypatch.setenv(EVERY_TURN, "1")
    assert len({tuple(turn.values()) for turn in turns_of("test_one", values)}) == 24
    assert turns_of("test_one", {}) == [{}]


@alone(drawn=[0, 1])
def test_alone_runs_turns_from_the_same_seed_without_a_group(tmp_path: Path, drawn: int) -> None:
    assert not dist.is_initialized() and tmp_path.is_dir()
    torch.testing.assert_close(torch.rand(()), torch.tensor(0.49625658988952637))


@on_ranks(2, turn=[0, 1])
def test_what_a_turn_has_patched_is_as_before_in_the_next(monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    assert ranks.EVERY_TURN != "patched"
    monkeypatch.setattr(ranks, "EVERY_TURN", "patched")


def test_run_ranks_gives_results_by_rank() -> None:
    assert run_ranks(_scaled_rank, 3, 10, offset=1) == [(1, 3, 0), (11, 3, 1), (21, 3, 2)]


def test_run_ranks_works_for_any_number_after_any_other() -> None:
    for num_ranks in (3, 2, 1, 3):
        expected = torch.full((3,), num_ranks * (num_ranks + 1) / 2)
        totals = run_ranks(_sum_of_ranks, num_ranks)
        assert len(totals) == num_ranks and all(torch.equal(total, expected) for total in totals)


def test_run_ranks_seeds_each_job() -> None:
    first = run_ranks(_draws, 2)
    assert first[0] == first[1]
    assert run_ranks(_draws, 2) == first


def test_run_ranks_raises_the_first_failure_first() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_fail_on, 3, 1)
    first, *others = caught.value.failures
    assert (first.rank, first.type_name, first.message) == (1, "KeyError", "'the cause'")
    assert sorted(failure.rank for failure in others) == [0, 2]  # their barrier ended when rank 1 left the group
    text = str(caught.value)
    assert "in _fail_on" in text and "about to fail" in text
    assert text.index("the cause") < text.index("dist.barrier()")


def test_run_ranks_returns_failures_when_expected() -> None:
    run_ranks(print, 2, "of an earlier job")
    first, second = run_ranks(_fail_quietly_on, 2, 1, expect_failure=True)
    assert first == 0
    assert isinstance(second, RankFailure)
    assert (second.rank, second.type_name, second.message) == (1, "ValueError", "only here")
    assert "_fail_quietly_on" in second.traceback
    assert "of an earlier job" not in second.traceback


def test_run_ranks_reports_results_that_cannot_be_pickled() -> None:
    with pytest.raises(RankError, match="cannot pickle"):
        run_ranks(_lock, 1)


def test_run_ranks_refuses_functions_without_a_name() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):
        run_ranks(lambda: None, 1)


def test_run_ranks_replaces_workers_that_died_or_hang() -> None:
    before = run_ranks(_pid, 3)
    with pytest.raises(RankError) as caught:
        run_ranks(_exit_on_1_hang_on_2, 3, timeout_s=1.0, expect_failure=True)  # a hang is never expected
    failures = [(failure.rank, failure.type_name, failure.message) for failure in caught.value.failures]
    assert failures == [
        (1, "RankDied", "the process ended: exit code 7"),
        (2, "RankTimeout", "no reply in 1 s"),
    ]
    assert "last words" in caught.value.failures[0].traceback
    assert "in _sleep_for_ever" in caught.value.failures[1].traceback
    assert _has_ended(before[2])
    after = run_ranks(_pid, 3)
    assert after[0] == before[0] and after[1] != before[1] and after[2] != before[2]


def test_run_ranks_restores_the_worker_between_jobs() -> None:
    before = run_ranks(_traces, 2)
    run_ranks(_leave_traces, 2)
    assert run_ranks(_traces, 2) == before
    assert before[0]["variable"] is None and before[0]["accelerate"] == {}


def test_run_alone_has_no_group() -> None:
    assert run_alone(_alone) == (False, False, 1)
    assert run_ranks(_alone, 1) == [(True, True, 1)]


def test_run_ranks_replaces_a_worker_that_cannot_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_CLEAN_S", 1.0)
    before = run_ranks(_break_the_end_of_the_group_on, 2, 1)
    assert _has_ended(before[1])
    assert ranks._workers[0].process.pid == before[0] and ranks._workers[1].process.pid != before[1]


def test_close_pool_leaves_no_process_and_no_folder() -> None:
    pids = run_ranks(os.getpid, 2)
    first, second = run_ranks(_exit_on, 2, 1, 7, expect_failure=True)
    assert first == 0
    assert isinstance(second, RankFailure) and second.type_name == "RankDied"
    workers = list(ranks._workers.values())  # one of them is still starting
    ranks.close_pool()
    assert not any(worker.process.is_alive() for worker in workers)
    assert not any(Path(worker.folder).exists() for worker in workers)
    assert all(_has_ended(pid) for pid in pids)


@pytest.mark.slow
def test_workers_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    code = f"from tests import test_ranks; test_ranks.run_alone(test_ranks._note_pid_and_hang, {str(noted)!r})"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=_ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as parent:
        while not (noted.exists() and noted.read_text()):
            assert parent.poll() is None
            time.sleep(0.05)
        parent.send_signal(signal.SIGKILL)
    assert _has_ended(int(noted.read_text()))  # although its main thread is in a job
    assert list(tmp_path.glob("hf_zero_rank*")) == []
