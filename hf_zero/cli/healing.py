"""`hf-zero launch --max_restarts`: torchrun's agent starts processes again after one has died, unless that would be in vain.

The processes tell how far they are, see `hf_zero.host.progress`; checkpoints tell where to go on. What is added here to the
agent: whether another start makes sense, what it costs, and on how many hosts a run may go on.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import tempfile
import time
import uuid
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero.changes import Changes
from hf_zero.errors import UsageError
from hf_zero.host import progress

_TO_SAVE_S = "120"  # until processes that were told to end are killed; torchrun's 30 s are too few for a large model
_TO_END_S = 10  # the same, where a peer of theirs has failed, so that they cannot save
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_OWN_STORES = (
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # else a start finds addresses of processes that are gone in the agent's
)


@dataclass(frozen=True)
class Failure:
    """What ended a start.

    Attributes:
        rank: the first process that failed.
        how: a signal's name, or an exit code.
        at: how far it was.
    """

    rank: int
    how: str
    at: progress.Progress


class Healing:
    """Decides after each failure.

    Args:
        folder: for the file of progress.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "progress"
        progress.make_file(self.file)
        self._last: Failure | None = None
        self._num_restarts = 0

    def why_in_vain(self, failure: Failure) -> str | None:
        """Why another start would end like this one; None if it need not."""
        last, self._last = self._last, failure
        if failure.at.saved is None:
            return "it failed before the first checkpoint, from which another start would go on"
        if last is not None and (last.rank, last.at.step) == (failure.rank, failure.at.step):
            return "it failed there before"
        return None

    def on_failure(self, result: Any, remaining: int) -> int:
        """Tell what happens now; returns how many more starts there may be."""
        local_rank = min(result.failures, key=lambda each: result.failures[each].timestamp)
        first = result.failures[local_rank]
        how = first.signal_name() if first.exitcode < 0 else f"exit code {first.exitcode}"
        failure = Failure(first.local_rank, how, progress.read(self.file, first.local_rank))
        when = f"at step {failure.at.step}" if failure.at.step else "before its first step"
        what = f"hf-zero: rank {local_rank} failed {when} ({how})"
        why = self.why_in_vain(failure)
        if why is not None:
            print(f"{what}: not started again, since {why}", file=sys.stderr)
            return 0
        if remaining:
            self._num_restarts += 1
            lost = max(failure.at.step - (failure.at.saved or 0), 0)
            print(
                f"{what}: start {self._num_restarts} of at most {self._num_restarts + remaining - 1} more, from the checkpoint "
                f"of step {failure.at.saved}: {lost} steps are done again",
                file=sys.stderr,
            )
            progress.forget_steps(self.file)
        return remaining

    def has_saved_all(self, num_processes: int) -> bool:
        """Whether all processes of this host have saved the step at which they ended."""
        found = [progress.read(self.file, rank) for rank in range(num_processes)]
        return all(each.saved is not None and each.saved >= each.step for each in found)


def is_wanted(args: Namespace) -> bool:
    """Whether a run is to be started again after a failure."""
    return bool(args.max_restarts)


def check(args: Namespace) -> None:
    """Raise before anything is started.

    Raises:
        UsageError: fewer processes are allowed where that cannot be, or nothing is there to start again.
    """
    machines, processes = sizes(args)
    if args.min_processes is not None:
        if not is_wanted(args):
            raise UsageError(
                "--min_processes says on how few a run may go on after a failure: give --max_restarts, too"
            )
        if machines < 2:
            raise UsageError(
                f"--min_processes {args.min_processes} with one machine: its processes are all started again, or none; leave "
                "it out"
            )
        if not 1 <= args.min_processes <= processes:
            raise UsageError(f"--min_processes is {args.min_processes}: give 1 to {processes}, the number of processes")


def sizes(args: Namespace) -> tuple[int, int]:
    """Hosts, and processes on all of them, by the command line or the file that accelerate reads."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    machines, processes = args.num_machines, args.num_processes
    if None in (machines, processes) and (args.config_file is not None or os.path.isfile(default_config_file)):
        config = load_config_from_file(args.config_file)
        machines, processes = machines or config.num_machines, processes or config.num_processes
    return machines or 1, processes or 1


@contextmanager
def healing(args: Namespace) -> Iterator[Healing]:
    """While active, torchrun's agent asks `Healing` after each failure, and goes on with fewer hosts where that is allowed."""
    import accelerate.commands.launch as accelerate_launch
    import torch.distributed.run as torchrun
    from torch.distributed.elastic.agent.server.api import WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    with tempfile.TemporaryDirectory(prefix="hf_zero_") as folder, Changes() as changes:
        healer = Healing(Path(folder))
        os.environ[progress.FILE_VARIABLE] = str(healer.file)
        os.environ.setdefault(progress.RUN_VARIABLE, _name(args))
        os.environ.setdefault(_SHUTDOWN, _TO_SAVE_S)
        os.environ[_OWN_STORES] = "1"
        monitor, run, close = LocalElasticAgent._monitor_workers, torchrun.run, SubprocessContext.close

        def end(context: Any, death_sig: Any = None, timeout: int | None = None) -> None:
            if timeout is None:
                timeout = _TO_END_S if context._failures else 30
            close(context, death_sig, timeout)

        def stop(agent: Any, group: Any) -> None:
            is_well = group.state is WorkerState.HEALTHY and not _has_lost_a_host(group)
            theirs = getattr(agent, "_shutdown_timeout", None)
            # Where a host comes they save, as when a scheduler ends them. Torch 2.11 gives everyone 30 s.
            if theirs is None:
                agent._shutdown()
            else:
                agent._shutdown(timeout=theirs if is_well else _TO_END_S)

        @functools.wraps(monitor)
        def monitored(agent: Any, group: Any) -> Any:
            result = monitor(agent, group)
            if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY) and result.failures:
                agent._remaining_restarts = healer.on_failure(result, agent._remaining_restarts)
            return result

        def as_processes_that_come_again(given: Namespace) -> None:
            _meet_anew(given, args)
            run(given)  # type: ignore[no-untyped-call]

        changes.replace(LocalElasticAgent, "_monitor_workers", monitored)
        changes.replace(LocalElasticAgent, "_stop_workers", stop)
        changes.replace(SubprocessContext, "close", end)
        changes.replace(torchrun, "run", as_processes_that_come_again)
        changes.replace(accelerate_launch, "simple_launcher", accelerate_launch.multi_gpu_launcher)  # of one process
        yield healer


def _has_lost_a_host(group: Any) -> bool:
    """Whether another host has left the round that is under way, as it does when its processes have failed."""
    state = getattr(getattr(group.spec.rdzv_handler, "_state_holder", None), "state", None)
    return state is not None and len(state.participants) < group.group_world_size


def _meet_anew(given: Namespace, args: Namespace) -> None:
    """Let the hosts meet again for each start, as torchrun's static rendezvous cannot."""
    machines, processes = sizes(args)
    if machines == 1:
        given.standalone = True
        return
    if not given.rdzv_endpoint:
        given.rdzv_endpoint = f"{given.master_addr}:{given.master_port}"
    given.rdzv_backend, given.rdzv_id = "c10d", os.environ.get("SLURM_JOB_ID", "hf_zero")
    if args.min_processes is not None:
        given.nnodes = f"{-(-args.min_processes // (processes // machines))}:{machines}"


def _name(args: Namespace) -> str:
    """Of a run: a scheduler that queues a job again keeps the job's number, and the job starts the same command."""
    job = os.environ.get("SLURM_JOB_ID")
    command = hashlib.sha256("\0".join([args.training_script, *args.training_script_args]).encode()).hexdigest()[:8]
    return f"slurm-{job}-{command}" if job else f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"
