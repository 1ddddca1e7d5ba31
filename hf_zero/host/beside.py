"""Threads beside the program's, which end before the interpreter does.

[Note: threads at the end] Python ends daemon threads when it finalises: one that comes back from inside torch then, where any
operator gives the interpreter's lock away, is unwound through C++ that forbids it, and the process aborts after its work is
done ("terminate called without an active exception"). So at the exit each is told to end, and waited for.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

_LIMIT_S = 5.0  # for a thread that has been told to end; beyond, the process may abort, but it does not hang
_LOOKS_EVERY_S = 0.02

_running: dict[threading.Thread, Callable[[], None]] = {}


def start(name: str, work: Callable[[], None], end: Callable[[], None]) -> threading.Thread:
    """Run `work` on a thread.

    Args:
        name: of the thread.
        work: what it does.
        end: called at the exit of the program, if it still runs: lets it end soon, or waits for it.
    """

    def run() -> None:
        try:
            work()
        finally:
            _running.pop(thread, None)  # and with it what it holds

    thread = threading.Thread(target=run, name=name, daemon=True)
    _running[thread] = end
    thread.start()
    return thread


@atexit.register  # with the import, and so after whatever makes use of a thread as it leaves
def _end_all() -> None:
    running = dict(_running)
    for end in running.values():
        end()
    for thread in running:
        thread.join(_LIMIT_S)


def let_threads_rest(first_s: float, limit_s: float) -> None:
    """Wait until no other thread of this process runs, or is kept from running by other processes.

    Args:
        first_s: waited in any case.
        limit_s: waited for threads that go on.
    """
    time.sleep(first_s)
    late = time.monotonic() + limit_s
    while _another_runs() and time.monotonic() < late:
        time.sleep(_LOOKS_EVERY_S)


def _another_runs() -> bool:
    for place in Path("/proc/self/task").glob("[0-9]*/stat"):  # on Linux alone
        with contextlib.suppress(OSError):  # it has just ended
            if (
                int(place.parent.name) != threading.get_native_id()
                and place.read_text().rpartition(")")[2].split()[0] == "R"
            ):
                return True
    return False
