"""Threads beside the program's, and the exit of a program that has some."""

import subprocess
import sys
import threading
import time

from hf_zero.host.beside import let_threads_rest
from tests.ranks import ENVIRONMENT

# The thread is inside torch nearly always: were it not ended, Python would abort when it finalises.
_PROGRAM = """
import threading, torch
from hf_zero.host import beside

told, begun = threading.Event(), threading.Event()

def work():
    while not told.is_set():
        torch.empty(8).add_(1)
        begun.set()
    print("ended", flush=True)

beside.start("adds", work, told.set)
begun.wait()
"""


def test_threads_end_before_the_interpreter_does() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_threads_that_run_are_waited_for() -> None:
    until, has_ended = time.monotonic() + 0.3, threading.Event()

    def spin() -> None:
        while time.monotonic() < until:
            pass
        has_ended.set()

    threading.Thread(target=spin).start()
    let_threads_rest(0.0, 60.0)
    assert has_ended.is_set()
