"""An exchange in flight between ranks, and the error that names the peer and the operation when it fails.

[Note: left in flight] An exchange that has begun is completed, even when nobody here wants its result any more: a model was
dropped, or a pass was broken off. A peer may want it; and gloo, if it finds the memory of a message gone that it is about to
send, sends nothing to that peer ever after. So an exchange that is dropped in flight is kept, until a later one of the same
ranks has been waited for (the peers have begun both then), or until the group is closed.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from hf_zero.comm.beside import waits
from hf_zero.comm.groups import torch_groups
from hf_zero.comm.ledger import LedgerLine
from hf_zero.errors import CollectiveError

logger = logging.getLogger(__name__)

_SHOWN = 8  # missing ranks that an error lists


@dataclass(frozen=True)
class Work:
    """One piece of work in an exchange that has to be waited for.

    Attributes:
        work: torch's handle.
        peer: the rank that it depends on; None: all.
        follow: it runs on a GPU stream. Then the compute stream waits, and this process does not; passing torch a timeout
            would block this process. This is called with a description and the timeout in seconds instead.
    """

    work: dist.Work
    peer: int | None
    follow: Callable[[str, float], None] | None = None

    def wait(self, description: str, timeout_s: float) -> None:
        """Wait, or make the compute stream wait."""
        if self.follow is None:
            self.work.wait(datetime.timedelta(seconds=timeout_s))
        else:
            self.work.wait()
            self.follow(description, timeout_s)


@dataclass
class InFlight:
    """Exchanges of some ranks that were dropped in flight, see [Note: left in flight].

    Attributes:
        ranks: of the program.
        break_off: gives what lets their waits fail; weak.
        dropped: those, until they are waited for.
        is_broken: a wait of these ranks has failed.
    """

    ranks: tuple[int, ...] = ()
    break_off: Callable[[], Callable[[], None] | None] = lambda: None
    dropped: list[Exchange] = field(default_factory=list)
    is_broken: bool = False


class Exchange:
    """An exchange in flight. Its tensors may be read, written or freed only after `wait()`.

    Args:
        description: for errors.
        timeout_s: that each part may take.
        parts: what has to be waited for, in order.
        entry: in the ledger.
        finish: called once all parts are complete.
        keep: tensors that the transport still reads.
        in_flight: of its ranks; takes this exchange if it is dropped.
    """

    _in_flight: InFlight | None = None  # of those that wrap another one

    def __init__(
        self,
        description: str,
        timeout_s: float,
        parts: Sequence[Work] = (),
        entry: LedgerLine | None = None,
        finish: Callable[[], None] | None = None,
        keep: object = None,
        in_flight: InFlight | None = None,
    ) -> None:
        self._description = description
        self._timeout_s = timeout_s
        self._parts = list(reversed(parts))  # the next to be waited for is the last
        self._entry = entry
        self._finish = finish
        self._keep = keep
        self._in_flight = in_flight
        self._is_done = False

    def wait(self) -> None:
        """Block until the exchange is complete on this rank.

        Raises:
            CollectiveError: a peer is gone, is late by more than the timeout, or never took part.
        """
        if self._is_done:
            return
        started = time.perf_counter()
        self._wait_for_parts()
        while self._in_flight is not None and self._in_flight.dropped:
            self._in_flight.dropped.pop()._wait_for_parts()
        if self._finish is not None:
            self._finish()
        if self._entry is not None:
            self._entry.seconds += time.perf_counter() - started
        self._is_done = True
        self._keep, self._finish = None, None

    @property
    def place(self) -> waits.Place | None:
        """Which of the exchanges of its ranks this is; None of one that tells no other."""
        return waits.Place(*self._description.parts) if isinstance(self._description, waits.Description) else None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its ranks, by their numbers in the program."""
        return () if self._in_flight is None else self._in_flight.ranks

    @property
    def break_off(self) -> Callable[[], None] | None:
        """Lets waits of its ranks fail; None if nothing can."""
        return None if self._in_flight is None else self._in_flight.break_off()

    def _wait_for_parts(self) -> None:
        if not self._parts:
            return
        thread = threading.get_ident()
        waits.by_thread[thread] = self
        try:
            while self._parts:  # what is complete is not waited for again, should `finish` be interrupted
                self._parts[-1].wait(self._description, self._timeout_s)
                self._parts.pop()
        except RuntimeError as error:
            if self._in_flight is not None:
                self._in_flight.is_broken = True
                self._in_flight = None  # its peer is gone
            if (verdict := waits.verdict_on(self.place)) is not None:
                raise CollectiveError(verdict) from error
            raise named(error, self._description, self._parts[-1].peer, self._timeout_s) from error
        finally:
            waits.by_thread.pop(thread, None)

    def __del__(self) -> None:
        if self._in_flight is not None and self._parts:
            self._in_flight.dropped.append(self)


def named(
    error: RuntimeError, description: str, missing: int | Sequence[int] | None, timeout_s: float
) -> CollectiveError:
    """The error of one exchange, which names the operation and the rank that is missing, or several, if they are known.

    Where torch watches exchanges on a device, it ends this process for the same reason, perhaps before anybody has printed the
    error: so it is logged at once.
    """
    made = CollectiveError(told(error, description, missing, timeout_s))
    if torch_groups.watches_a_device():
        logger.error("%s", made)
    return made


def told(error: RuntimeError, description: str, missing: int | Sequence[int] | None, timeout_s: float) -> str:
    """What `named` says."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    ranks = () if missing is None else (missing,) if isinstance(missing, int) else tuple(missing)
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    whom = f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}" if ranks else "its peers"
    if is_late(error):
        what = f"waited {timeout_s:g} s for {whom}"
        advice = (
            f"Every rank must run the same units in the same order: look for an error on {whom}, a unit that only some "
            "ranks call, or a call made on one rank only (timeout_s raises the limit)"
        )
    else:
        what = f"lost {whom}"
        advice = f"Look for the error of {whom}; without one, its system may have killed it for its memory (dmesg)"
    return f"rank {dist.get_rank()} {what} in {description}. {advice}. Cause: {reason}"


def is_late(error: RuntimeError) -> bool:
    """Whether a wait has failed because it took too long."""
    return "imed out" in str(error) or "imeout" in str(error)
