"""A warm pool of rank processes for tests: they are forked from one that has torch and transformers, and serve many jobs.

[Note: the life of a job]
1. The parent sends one job to each of workers 0..n-1; each joins a gloo group, runs the function, and replies.
2. A rank that failed leaves its group at once, so that its peers see it. A rank that succeeded stays: closing a socket
   that a peer still reads from would make that peer fail.
3. When all have replied, or are late or dead, the parent tells them to clean up; each replies again when it is clean.
   Those that are late (here after `_CLEAN_S`) or dead are replaced.
Each worker has one pipe to the parent, of which no other process holds an end: it closes when either dies.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import itertools
import multiprocessing
import os
import pickle
import queue
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from io import TextIOWrapper
from math import inf
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, overload

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop, debug

T = TypeVar("T")
Test = Callable[..., None]
EVERY_TURN = "HF_ZERO_EVERY_TURN"
"""Environment variable: if set, tests go through all combinations of their turns."""
_ROOT = str(Path(__file__).resolve().parent.parent)
_START_S, _CLEAN_S, _GROUP_LIMIT, _TAIL_CHARS = 120.0, 5.0, timedelta(seconds=60), 16_000
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Of this moment: what a test patches later must not stay in a worker that happens to start in that test.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}
if sys.platform == "linux":
    ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo resolves the host's name, which may be slow or fail
_CACHES_OF_MESHES: tuple[tuple[Any, str], ...] = (  # of DTensor's; not every version of torch has all of them
    (_collective_utils, "MeshTopoInfo.build_from_mesh.cache_clear"),
    (_redistribute, "_gen_transform_infos.cache_clear"),
    (_redistribute, "clear_redistribute_planner_cache"),
    (_sharding_prop, "ShardingPropagator._propagate_tensor_meta_cached.cache_clear"),
)
_NOTHING = pickle.dumps(pickle.dumps(None))  # the reply of a worker that is ready or clean


@dataclass(frozen=True)
class RankFailure:
    """What a rank raised; `type_name` is RankDied for a process that ended and RankTimeout for one without a reply."""

    rank: int
    type_name: str
    message: str
    traceback: str  # and the end of what the rank wrote to stdout and stderr during the job
    failed_at_s: float = 0.0  # monotonic clock, one for all processes of a machine


class RankError(RuntimeError):
    """One or more ranks failed; `failures` holds them, the first to fail first."""

    def __init__(self, job_name: str, failures: list[RankFailure]) -> None:
        self.failures = failures
        texts = [f"--- rank {each.rank}: {each.type_name}: {each.message}\n{each.traceback}" for each in failures]
        super().__init__("\n".join([f"{job_name} failed; the first to fail first:", *texts]))


def _enter(pipe: "Connection[Any, Any]", folder: str) -> None:
    """Make a forked process one of its own, and serve."""
    os.setsid()  # Ctrl-C is for the parent, which then ends the workers
    for path, mode, fds in ((os.devnull, os.O_RDONLY, (0,)), (f"{folder}/log", os.O_WRONLY | os.O_APPEND, (1, 2))):
        opened = os.open(path, mode)
        for fd in fds:
            os.dup2(opened, fd)
        os.close(opened)
    for stream in (sys.stdout, sys.stderr):
        cast("TextIOWrapper", stream).reconfigure(write_through=True)
    faulthandler.enable(2)
    sys.argv = ["-c"]
    _reset(ENVIRONMENT)
    serve(pipe, folder)


def serve(pipe: "Connection[Any, Any]", folder: str) -> None:
    """Run jobs until the pipe to the parent closes."""
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_pipe, args=(pipe, inbox, folder), daemon=True).start()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    pipe.send_bytes(_NOTHING)
    while True:
        reply = _run_job(*pickle.loads(inbox.get()))
        pipe.send_bytes(pickle.dumps(reply))
        if isinstance(reply, RankFailure):
            _leave_group()
        inbox.get()  # see [Note: the life of a job], 3
        _clean_up()
        pipe.send_bytes(_NOTHING)


def _read_pipe(pipe: "Connection[Any, Any]", inbox: "queue.SimpleQueue[bytes]", folder: str) -> None:
    """Hand messages to the main thread; end the process when the parent is gone, whatever the main thread does."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(pipe.recv_bytes())
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _run_job(call: bytes, launcher: dict[str, str], store: str) -> bytes | RankFailure:
    """Call the function of `call` in a group that meets at the file `store`, or in none if `launcher` is empty."""
    rank = int(launcher.get("RANK", 0))
    try:
        if launcher:
            os.environ.update(launcher)
            dist.init_process_group("gloo", f"file://{store}", _GROUP_LIMIT, int(launcher["WORLD_SIZE"]), rank)
            dist.barrier()  # a rank that fails at once must not leave while its peers still connect to it
        fn, args, kwargs = pickle.loads(call)
        gc.freeze()  # what it imported: each collection that accelerate asks for would go through it
        _seed()
        return pickle.dumps(fn(*args, **kwargs))
    except BaseException as error:
        return RankFailure(rank, type(error).__name__, str(error), traceback.format_exc(), time.monotonic())


def _seed() -> None:
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)


def _leave_group() -> None:
    gc.collect()  # first the works and tensors in the cycles that a failure leaves
    gc.collect()  # with what nodes of graphs held
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_meshes()
    gc.collect()  # then the groups that meshes in cycles hold: gloo closes its sockets, and ends its threads, when they go


def _forget_meshes() -> None:
    """Empty what holds the meshes of a job that is over, and so its groups."""
    if (groups := sys.modules.get("hf_zero.comm.groups.process_groups")) is not None:
        groups._program = None
    debug._clear_sharding_prop_cache()
    for owner, name in _CACHES_OF_MESHES:
        clear = functools.reduce(lambda found, part: getattr(found, part, None), name.split("."), owner)
        if clear is not None:
            clear()


def _clean_up() -> None:
    """Undo what a job may leave behind; an error here ends the process, and the parent replaces it."""
    _reset(ENVIRONMENT)
    if (init := sys.modules.get("hf_zero.sharding.init")) is not None and init._active:
        init.undo()  # `ZeroTrainingArguments` partition every model that is made from then on
    _leave_group()
    gc.freeze()  # what is left is modules and caches, of which jobs import more and more


def _reset(environment: dict[str, str]) -> None:
    """What jobs and turns find: the process's settings, and accelerate as it is before its first object."""
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(_ROOT)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a training that fails leaves the Trainer's, which keeps its model
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)


_FORKING = multiprocessing.get_context("forkserver")


@functools.cache
def _start_forking() -> None:
    """Start what workers are forked from, with the environment that libraries read when they are loaded."""
    _FORKING.set_forkserver_preload(["tests.preloaded"])
    was = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(was)


class _Worker:
    """One worker process, its pipe, and its folder: the log of its output, the store of its jobs."""

    def __init__(self, rank: int) -> None:
        self.rank, self.is_ready = rank, False
        self.folder = tempfile.mkdtemp(prefix=f"hf_zero_rank{rank}_")
        self.log = Path(self.folder, "log")
        self.log.touch()
        self._pipe, far_end = Pipe()
        _start_forking()
        self.process = _FORKING.Process(target=_enter, args=(far_end, self.folder))
        self.process.start()
        far_end.close()

    @property
    def pid(self) -> int:
        """Of its process, and of its group."""
        return cast("int", self.process.pid)

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # a worker that is gone is noticed by receive()
            self._pipe.send_bytes(message)

    def receive(self, deadline_s: float) -> bytes | None:
        """The next message, or None when there is none by then; ChildProcessError when the process has ended."""
        try:
            # In steps, because a process that a job forked may hold the pipe open after the worker's end.
            while not self._pipe.poll(max(0.0, min(0.1, deadline_s - time.monotonic()))):
                if not self.process.is_alive() and not self._pipe.poll():
                    raise EOFError
                if time.monotonic() >= deadline_s:
                    return None
            return self._pipe.recv_bytes()
        except (EOFError, OSError):
            self.process.join(1.0)
            code = self.kill()
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise ChildProcessError(f"the process ended: {how}") from None

    def kill(self) -> int:
        """End the process and those that its jobs forked; its exit code, of an earlier end where there was one."""
        if self.process.is_alive():
            self.process.kill()
            with contextlib.suppress(ProcessLookupError):  # it is not yet its group's leader
                os.killpg(self.pid, signal.SIGKILL)
        self.process.join()
        return cast("int", self.process.exitcode)

    def close(self) -> None:
        self.kill()
        self._pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_workers: dict[int, _Worker] = {}


@atexit.register  # before multiprocessing waits for its processes
def close_pool() -> None:
    """End all workers, as the end of this process would; a later job starts new ones."""
    while _workers:
        _workers.popitem()[1].close()


def _run(call: bytes, num_ranks: int, limit_s: float, *, has_group: bool) -> list[bytes | RankFailure]:
    """Run one job, see [Note: the life of a job]; a failure of any kind on a rank is its reply."""
    try:
        workers = _start(num_ranks)
        starting = [worker for worker in workers if not worker.is_ready]
        _results("the start of workers", _next_replies(starting, _START_S))
        for worker in starting:
            worker.is_ready = True
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        store = f"{workers[0].folder}/store{time.monotonic_ns()}"
        for worker in workers:
            values = (worker.rank, num_ranks, worker.rank, num_ranks, "127.0.0.1", port)
            launcher = dict(zip(_LAUNCHER_VARIABLES, map(str, values), strict=True)) if has_group else {}
            os.truncate(worker.log, 0)
            worker.send(pickle.dumps((call, launcher, store)))
        replies = _next_replies(workers, limit_s)
        for worker in workers:
            worker.send(b"clean up")
        _next_replies([worker for worker in workers if worker.process.is_alive()], _CLEAN_S)
        _start(num_ranks)  # in the place of ended ones; they get ready while the parent goes on
        return replies
    except BaseException:  # Ctrl-C in the middle of a job: no worker is in a known state
        close_pool()
        raise


def _start(num_ranks: int) -> list[_Worker]:
    for rank in range(num_ranks):
        if rank in _workers and not _workers[rank].process.is_alive():
            _workers.pop(rank).close()
        if rank not in _workers:
            _workers[rank] = _Worker(rank)
    return [_workers[rank] for rank in range(num_ranks)]


def _next_replies(workers: list[_Worker], limit_s: float) -> list[bytes | RankFailure]:
    """One reply of each worker; those that are late are killed once all of them have written their stacks."""
    deadline_s = time.monotonic() + limit_s
    replies: dict[int, bytes | RankFailure] = {}
    for worker in workers:
        try:
            if (message := worker.receive(deadline_s)) is not None:
                replies[worker.rank] = pickle.loads(message)
        except ChildProcessError as error:  # failed_at_s 0: sorts first, as what its peers report follows from it
            replies[worker.rank] = RankFailure(worker.rank, "RankDied", str(error), "")
    if late := [worker for worker in workers if worker.rank not in replies]:
        for worker in late:
            os.kill(worker.pid, signal.SIGUSR1)  # faulthandler writes the stacks; it does not need the GIL
            replies[worker.rank] = RankFailure(worker.rank, "RankTimeout", f"no reply in {limit_s:g} s", "", inf)
        time.sleep(0.5)
        for worker in late:
            worker.kill()
    for worker in workers:
        failure = replies[worker.rank]
        if isinstance(failure, RankFailure) and (output := worker.log.read_text(errors="replace")[-_TAIL_CHARS:]):
            replies[worker.rank] = replace(failure, traceback=f"{failure.traceback}--- end of its output:\n{output}")
    return [replies[worker.rank] for worker in workers]


def _results(job_name: str, replies: list[bytes | RankFailure], expect_failure: bool = False) -> list[Any]:
    failures = [reply for reply in replies if isinstance(reply, RankFailure)]
    if any(failure.type_name == "RankTimeout" or not expect_failure for failure in failures):
        raise RankError(job_name, sorted(failures, key=lambda failure: failure.failed_at_s))
    return [reply if isinstance(reply, RankFailure) else pickle.loads(reply) for reply in replies]


@overload
def run_ranks(
    fn: Callable[..., T], num_ranks: int, *args: Any, expect_failure: Literal[True], timeout_s: float = 60, **kw: Any
) -> list[T | RankFailure]: ...
@overload
def run_ranks(fn: Callable[..., T], num_ranks: int, *args: Any, timeout_s: float = 60, **kwargs: Any) -> list[T]: ...
def run_ranks(
    fn: Callable[..., T], num_ranks: int, *args: Any, timeout_s: float = 60, expect_failure: bool = False, **kwargs: Any
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on gloo ranks, which find rank and world size in torch.distributed; results by rank.

    Args:
        fn: function at the top of a module that the workers can import.
        num_ranks: 1 to 4.
        args, kwargs: pickled, as the results are: tensors travel by value.
        timeout_s: from the start of the job on ready workers, with imports; ranks without a reply by then are killed.
        expect_failure: put a RankFailure in the place of the result of a rank that raised or died.

    Raises:
        RankError: a rank raised or died (unless `expect_failure`), or did not reply in time (always).
    """
    replies = _run(pickle.dumps((fn, args, kwargs)), num_ranks, timeout_s, has_group=True)
    return _results(fn.__qualname__, replies, expect_failure)


@dataclass(frozen=True)
class _Body:
    """The body of a test under `on_ranks` or `alone`, found by name on a rank, and run once for each of its turns."""

    module: str
    __qualname__: str
    first: int = 0  # of the test's turns, and how many of these on the next one is
    stride: int = 1

    def __call__(self, **arguments: Any) -> None:
        test = getattr(importlib.import_module(self.module), self.__qualname__)
        gc.freeze()
        environment = dict(os.environ)
        for number, turn in enumerate(test.turns[self.first :: self.stride]):
            if number:
                next_turn(environment)
            try:
                test.__wrapped__(**arguments, **turn)
            except BaseException as error:
                error.add_note(f"in the turn {turn}") if turn else None
                raise
            finally:
                for given in arguments.values():
                    if isinstance(given, pytest.MonkeyPatch):
                        given.undo()  # pytest does so in its own process, and not with the copy of a rank


def next_turn(environment: dict[str, str] | None = None) -> None:
    """Between the turns of a job, which `on_ranks` and `alone` make: seeds and settings become those of a new job."""
    if dist.is_initialized():
        dist.barrier()  # a peer may still read from what the last turn has left here
    gc.collect()
    _reset(dict(os.environ) if environment is None else environment)
    _seed()


def on_ranks(*num_ranks: int, timeout_s: float = 60, **values: Sequence[Any]) -> Callable[[Test], Test]:
    """Let a test run on that many ranks of the pool: what it asserts, it asserts on each of them. See `run_ranks`.

    Args:
        num_ranks: one job for each number. By hand, each goes through all turns; every day, they are dealt out.
        timeout_s: of a job; each further turn adds 15 s, all of them at most 240 s.
        values: by argument of the test, values to go through inside the job ("turns", see `turns_of`). Each turn begins
            with the seeds and settings of a new job, and a failure names its own. Everything else the test asks for,
            parameters of pytest and fixtures, is pickled.
    """

    def run(body: _Body, arguments: dict[str, Any], num_turns: int) -> None:
        deals = not os.environ.get(EVERY_TURN) and num_turns >= len(num_ranks)
        for place, number in enumerate(num_ranks):
            own = replace(body, first=place, stride=len(num_ranks)) if deals else body
            run_ranks(own, number, timeout_s=_limit_s(timeout_s, num_turns), **arguments)

    return lambda test: _on_parent(test, values, run)


def alone(*, timeout_s: float = 60, **values: Sequence[Any]) -> Callable[[Test], Test]:
    """Let a test run in a worker without a process group; else as `on_ranks`."""

    def run(body: _Body, arguments: dict[str, Any], num_turns: int) -> None:
        run_alone(body, timeout_s=_limit_s(timeout_s, num_turns), **arguments)

    return lambda test: _on_parent(test, values, run)


def _limit_s(timeout_s: float, num_turns: int) -> float:
    return timeout_s + min(240, 15 * (num_turns - 1))


def turns_of(name: str, values: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The turns of a test: all combinations by hand; every day as many as its longest argument has values.

    Then each value of each argument comes up. Where the others begin depends on the test's name, so that what one test
    leaves out, the tests beside it have.
    """
    if os.environ.get(EVERY_TURN):
        return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    offsets = {key: zlib.crc32(f"{name} {key}".encode()) for key in values}
    count = max(map(len, values.values()), default=1)
    return [{key: each[(turn + offsets[key]) % len(each)] for key, each in values.items()} for turn in range(count)]


def by_hand(*values: T) -> tuple[T, ...]:
    """Further values of an argument of turns, of which everyday ones show the like in less time; see `turns_of`."""
    return values if os.environ.get(EVERY_TURN) else ()


def _on_parent(test: Test, values: dict[str, Sequence[Any]], run: Callable[[_Body, dict[str, Any], int], None]) -> Test:
    turns = turns_of(test.__qualname__, values)

    @functools.wraps(test)
    def on_parent(**arguments: Any) -> None:
        run(_Body(test.__module__, test.__qualname__), arguments, len(turns))

    signature = inspect.signature(test)
    asked = [each for name, each in signature.parameters.items() if name not in turns[0]]
    on_parent.__signature__ = signature.replace(parameters=asked)  # type: ignore[attr-defined]  # read by pytest
    on_parent.turns = turns  # type: ignore[attr-defined]
    return on_parent


def run_alone(fn: Callable[..., T], *args: Any, timeout_s: float = 60, **kwargs: Any) -> T:
    """Run `fn(*args, **kwargs)` in worker 0 without process group and launcher variables; else as `run_ranks`."""
    replies = _run(pickle.dumps((fn, args, kwargs)), 1, timeout_s, has_group=False)
    return cast(T, _results(fn.__qualname__, replies)[0])


def run_fresh(fn: Callable[[], T]) -> T:
    """Run `fn` in a process of its own, in which all is imported and nothing has run yet."""
    _start_forking()
    with ProcessPoolExecutor(1, mp_context=_FORKING) as fresh:
        return fresh.submit(fn).result()
