"""Records a few steps of this rank, and writes them with those of the others.

[Note: recording] Nothing in the engine knows of this. For the steps that are recorded, some methods of the engine's classes
are wrapped, and put back afterwards: so no other step pays for it, and whoever reads the engine need not read past it. Times
are the host's. On a GPU the host runs ahead: there they say when work was queued, and what the host waited for.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_zero import torch_compat
from hf_zero.changes import Changes
from hf_zero.checkpoint.commit import StagedCheckpoint
from hf_zero.comm.exchange import Exchange
from hf_zero.comm.host.one_host import HostCollectives, HostExchange
from hf_zero.comm.ledger import Ledger
from hf_zero.engine.backward.backward import Backward
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.calls.call import Call
from hf_zero.engine.units.gathering import Gathering
from hf_zero.engine.units.storage.memory import GatheredMemory
from hf_zero.errors import ConfigError
from hf_zero.trace.report import in_words
from hf_zero.trace.timeline import Kind, Lane, Span, Timeline

logger = logging.getLogger(__name__)

TRACE_VARIABLE = "HF_ZERO_TRACE"
"""Environment variable: the file of the trace, where the configuration names none."""
FIRST, COUNT = 3, 3  # the first steps settle orders and memory
_IN_WORDS = re.compile(r"^(?P<what>.*?)(?: \(exchange \d+\))?$")
_recorders: dict[str, Recorder] = {}  # of the process, by file


def record_if_asked(engine: ZeroEngine) -> None:
    """Record some steps, where the configuration or the environment names a file; called by all ranks together.

    Raises:
        ConfigError: on all ranks, the file cannot be written.
    """
    world = engine.world
    file = world.config.trace or os.environ.get(TRACE_VARIABLE)
    if not file or file in _recorders or not all(recorder.is_over for recorder in _recorders.values()):
        return
    error = world.share(_why_not(Path(file)) if world.rank == 0 else None, "whether the trace can be written")
    if error:
        raise ConfigError(f"the trace cannot be written: {error}; name another file, or leave `trace` out")
    _recorders[file] = Recorder(world, Path(file).absolute())


def _why_not(path: Path) -> str | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


class Recorder:
    """Waits for the steps that are to be recorded, records them, and lets rank 0 write them.

    Args:
        world: of the model whose steps count; what the process does for other models in the meantime is recorded, too.
        file: that rank 0 writes.
        first: the step that is recorded first, from 1 on.
        count: how many are.

    Attributes:
        lane: what it has recorded.
        is_over: it records no more.
    """

    def __init__(self, world: World, file: Path, first: int = FIRST, count: int = COUNT) -> None:
        self.lane, self.is_over = Lane(), False
        self._world, self._rank = weakref.ref(world), world.rank  # weak: a run may end before its steps
        self._file, self._first, self._count = file, first, count
        self._num_steps = 0
        self._counting, self._recording = Changes(), Changes()
        self._counting.wrap(Gathering, "after_step", self._after_step)
        self._open: dict[object, float] = {}
        self._numbers: Counter[str] = Counter()
        self._bytes = 0
        atexit.register(self._at_exit)

    # --- which steps ----------------------------------------------------------------------------------------------

    def _after_step(self, original: Callable[..., None], gathering: Gathering, held: list[Any]) -> None:
        before = self._open.pop(gathering, None)
        original(gathering, held)
        now = time.perf_counter()
        if before is not None:
            self._add("step", "optimizer", before, now)
        world = gathering._world
        if not held or world is not self._world():
            return
        self._num_steps += 1
        if self._num_steps == self._first - 1:
            world.meet("the beginning of a trace")
            self._begin()
        elif self._recording:
            self.lane.ends_s.append(now)
            if len(self.lane.ends_s) > self._count:
                self._end(world)

    def _begin(self) -> None:
        wrap = self._recording.wrap
        wrap(Gathering, "before_step", self._before_step)
        wrap(Gathering, "acquire", self._acquire)
        wrap(Call, "end_forward", self._end_forward)
        wrap(Backward, "on_call_begin", self._on_call_begin)
        wrap(Backward, "_finish_call", self._finish_call)
        wrap(Ledger, "add", self._on_ledger)
        wrap(Exchange, "__init__", self._on_exchange)
        for owner in (Exchange, HostExchange):
            wrap(owner, "wait", self._wait)
        wrap(HostCollectives, "before_write", self._before_write)
        wrap(GatheredMemory, "take", self._on_memory)
        wrap(GatheredMemory, "give_back", self._on_memory)
        wrap(StagedCheckpoint, "__init__", self._on_save)
        wrap(StagedCheckpoint, "commit", self._on_commit)
        self.lane.ends_s.append(time.perf_counter())

    def _end(self, world: World) -> None:
        """All ranks are at the end of the last step: rank 0 gets what they have, and writes it."""
        self._stop()
        lanes = world.collect(self.lane, "the trace")
        if world.rank == 0:
            about = {"stage": world.config.stage, "ranks": world.num_ranks, "device": world.device.type}
            timeline = Timeline.of(lanes, about | {"exchanges": type(world.shards).__name__})
            try:
                timeline.save(self._file)
            except OSError as error:  # a training of days does not end for that
                logger.error("the trace could not be written to %s (%s): training goes on", self._file, error.strerror)
                return
            logger.warning("%s\nwritten to %s: open it in ui.perfetto.dev", in_words(timeline), self._file)

    def _stop(self) -> None:
        self.is_over = True
        self._open.clear()
        self._recording.undo()
        self._counting.undo()
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if self._rank == 0:
            last = self._first + self._count - 1
            logger.warning(
                "%s was not written: a trace records steps %d to %d, and the run ended after step %d",
                self._file,
                self._first,
                last,
                self._num_steps,
            )

    def _add(self, kind: Kind, name: str, start_s: float, end_s: float, number: int = -1, num_bytes: int = 0) -> None:
        self.lane.spans.append(Span(kind, name, start_s, end_s, number, num_bytes))

    # --- what is recorded -----------------------------------------------------------------------------------------

    def _before_step(self, original: Callable[..., None], gathering: Gathering, optimizer: object) -> None:
        self._open[gathering] = time.perf_counter()
        original(gathering, optimizer)

    def _acquire(self, original: Callable[..., None], gathering: Gathering, call: Call) -> None:
        original(gathering, call)
        if call.ended is None and not torch_compat.in_backward():
            self._open["forward", call] = time.perf_counter()

    def _end_forward(self, original: Callable[..., Any], call: Call) -> Any:
        self._close("forward", call)
        return original(call)

    def _on_call_begin(self, original: Callable[..., None], backward: Backward, call: Call, tensors: Any) -> None:
        before = None if backward.session is None else call in backward.session.open_calls
        original(backward, call, tensors)
        if not before:
            self._open["backward", call] = time.perf_counter()

    def _finish_call(self, original: Callable[..., None], backward: Backward, call: Call, session: Any) -> None:
        self._close("backward", call)
        original(backward, call, session)

    def _close(self, kind: Kind, call: Call) -> None:
        start_s = self._open.pop((kind, call), None)
        if start_s is not None:
            self._add(kind, ", ".join(unit.name for unit in call.units), start_s, time.perf_counter())

    def _on_ledger(self, original: Callable[..., Any], ledger: Ledger, kind: str, unit: str, num_bytes: int) -> Any:
        self._bytes = num_bytes  # of the exchange that is made next
        return original(ledger, kind, unit, num_bytes)

    def _on_exchange(
        self, original: Callable[..., None], exchange: Any, description: str, *args: Any, **kw: Any
    ) -> None:
        original(exchange, description, *args, **kw)
        found = _IN_WORDS.match(description)
        name = found["what"] if found else description
        self._numbers[name] += 1
        exchange.recorded_as = name, self._numbers[name], time.perf_counter(), self._bytes
        self._bytes = 0

    def _wait(self, original: Callable[..., None], exchange: Any) -> None:
        known, is_done = vars(exchange).pop("recorded_as", None), exchange._is_done
        start_s = time.perf_counter()
        original(exchange)
        if known is None or is_done:
            return
        (name, number, begun_s, num_bytes), end_s = known, time.perf_counter()
        self._add("exchange", name, begun_s, end_s, number, num_bytes)
        self._add("wait", name, start_s, end_s, number)

    def _before_write(self, original: Callable[..., None], shards: Any, label: str) -> None:
        start_s = time.perf_counter()
        original(shards, label)
        name = f"write of {label!r}"
        self._numbers[name] += 1
        for kind in ("exchange", "wait"):
            self._add(kind, name, start_s, time.perf_counter(), self._numbers[name])

    def _on_memory(self, original: Callable[..., None], memory: GatheredMemory, *args: Any) -> None:
        original(memory, *args)
        self.lane.memory.append((time.perf_counter(), memory.bytes))

    def _on_save(self, original: Callable[..., None], staged: StagedCheckpoint, *args: Any, **kwargs: Any) -> None:
        self._open[staged] = time.perf_counter()
        original(staged, *args, **kwargs)

    def _on_commit(self, original: Callable[..., Any], staged: StagedCheckpoint, *args: Any, **kwargs: Any) -> Any:
        found = original(staged, *args, **kwargs)
        start_s = self._open.pop(staged, None)
        if start_s is not None:
            self._add("save", staged.final.name, start_s, time.perf_counter())
        return found
