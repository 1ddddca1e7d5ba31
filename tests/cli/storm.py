"""Trainings that are hit again and again, beside one that is not: `python -m tests.cli.storm [RUNS [RANKS [HOSTS [SEED]]]]`.

A seed decides what happens to a run of 200 steps, and at which of them: a rank is killed, stops or raises, the disk is full;
with two hosts also: the second dies and comes back, or the line between them is cut for a while. Each run has to end with the
samples of the undisturbed one, and on one host with its bits. Printed for each: what it survived, the steps done again,
seconds from a hit to the next step.
"""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.cli.test_healing import SCRIPT, samples
from tests.hosts import ADDRESS, Hosts, two_hosts
from tests.ranks import ENVIRONMENT

_STEPS, _HITS = 200, 4
_ON_ONE_HOST = ["SIGKILL", "SIGSTOP", "SIGSEGV", "once", "full"]
_BETWEEN_HOSTS = ["host", "cut"]
_AWAY_S, _CUT_S, _LIMIT_S = 5, 15, 900


@dataclass
class _Run:
    """One training, by the launchers of one host or two.

    Attributes:
        folder: where it runs.
        name: of its outputs.
        lines: what its launchers say.
        gaps: seconds from a hit to the next step.
    """

    folder: Path
    name: str
    lines: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_down: bool = False

    def listen(self, process: subprocess.Popen[str]) -> subprocess.Popen[str]:
        """Note what a launcher says, as it says it."""

        def take() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                with self._lock:
                    self._take(line)

        threading.Thread(target=take, daemon=True).start()
        return process

    def _take(self, line: str) -> None:
        self.lines.append(line)
        if "going on from" in line:
            self._is_down = True
        elif "'loss'" in line and self._is_down:
            self._is_down = False
            self.gaps.append(time.time() - max((path.stat().st_mtime for path in self.hits()), default=time.time()))

    def hits(self) -> list[Path]:
        """The marks of what has happened to it."""
        return sorted(Path(self.folder, self.name).glob("done-*"))

    def result(self) -> tuple[str, dict[int, list[list[int]]]]:
        """The weights' digest, and the samples of each step."""
        found = re.search("weights (.*)", "".join(self.lines))
        return (found[1] if found else "none"), samples(self.folder, self.name)


@contextlib.contextmanager
def _own_disk(folder: Path) -> Iterator[None]:
    """A small disk in memory at a folder, which nobody minds to be full."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _words(num_ranks: int, name: str, places: list[str], *more: str) -> list[str]:
    words = f"launch --max_restarts 20 --num_processes {num_ranks} --zero zero.yaml"
    return [sys.executable, "-m", "hf_zero.cli.main", *words.split(), *more, "train.py", name, *places]


def on_one_host(run: _Run, num_ranks: int, places: list[str]) -> None:
    """Train to the end."""
    process = subprocess.Popen(
        _words(num_ranks, run.name, places),
        cwd=run.folder,
        env=ENVIRONMENT | {"STEPS": str(_STEPS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    _until_ended([run.listen(process)])


def on_two_hosts(run: _Run, hosts: Hosts, num_ranks: int, places: list[str]) -> None:
    """Train to the end, and do to the second host and to the line what the ranks mark."""
    names = run.folder / "names"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{ADDRESS.format(each + 1)} host{each}\n" for each in (0, 1)))
    where = f"--num_machines 2 --min_processes {num_ranks // 2} --main_process_port 29411"

    def start(host: int) -> subprocess.Popen[str]:
        more = [*where.split(), "--main_process_ip", ADDRESS.format(1), "--machine_rank", str(host)]
        command = _words(num_ranks, run.name, places, *more)
        return run.listen(hosts.start(host, command, run.folder, {Path("/etc/hosts"): names}, STEPS=str(_STEPS)))

    launchers, seen = [start(0), start(1)], set[Path]()

    def strike() -> None:
        for mark in set(run.hits()) - seen:
            seen.add(mark)
            if mark.name.endswith("-host"):
                launchers[1].kill()
                launchers[1].wait()
                time.sleep(_AWAY_S)
                launchers[1] = start(1)
            elif mark.name.endswith("-cut"):
                with hosts.cut():
                    time.sleep(_CUT_S)

    _until_ended(launchers, strike)


def _until_ended(launchers: list[subprocess.Popen[str]], meanwhile: Callable[[], None] = lambda: None) -> None:
    late = time.monotonic() + _LIMIT_S
    while any(process.poll() is None for process in launchers):
        meanwhile()
        time.sleep(0.1)
        if time.monotonic() > late:
            for process in launchers:
                process.kill()
    time.sleep(0.5)  # what they have said last is read


def main(num_runs: int = 50, num_ranks: int = 3, num_hosts: int = 1, first: int = 0) -> int:
    """Run all; returns the number of runs that did not end as the undisturbed one."""
    hows = _ON_ONE_HOST + _BETWEEN_HOSTS * (num_hosts - 1)
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder, num_bad = Path(place), 0
        hosts = stack.enter_context(two_hosts()) if num_hosts > 1 else None

        def run(name: str, places: list[str]) -> _Run:
            made = _Run(folder, name)
            with _own_disk(folder / name):
                if hosts is None:
                    on_one_host(made, num_ranks, places)
                else:
                    on_two_hosts(made, hosts, num_ranks, places)
            return made

        (folder / "train.py").write_text(SCRIPT)
        (folder / "zero.yaml").write_text("stage: 2\ntimeout_s: 10\n")
        undisturbed = run("undisturbed", []).result()
        assert undisturbed[0] != "none" and list(undisturbed[1]) == list(range(_STEPS)), undisturbed
        for seed in range(first, first + num_runs):
            draw = random.Random(seed)
            steps = sorted(draw.sample(range(5, _STEPS), _HITS))
            places = [f"{step}:{draw.randrange(num_ranks)}:{draw.choice(hows)}" for step in steps]
            ended = run(f"run{seed}", places)
            weights, seen = ended.result()
            again = [int(steps) for steps in re.findall(r": (\d+) steps are done again", "".join(ended.lines))]
            is_right = weights != "none" and seen == undisturbed[1] and (num_hosts > 1 or weights == undisturbed[0])
            num_bad += not is_right
            print(
                f"{seed}: {'right' if is_right else 'WRONG: ' + ''.join(ended.lines)[-4000:]}; {' '.join(places)}; same "
                f"bits: {weights == undisturbed[0]}, same samples: {seen == undisturbed[1]}; steps done again {again}, seconds "
                f"to the next step {[round(gap, 1) for gap in ended.gaps]}",
                flush=True,
            )
        print(f"{num_runs} runs on {num_ranks} ranks of {num_hosts} hosts, {num_bad} wrong")
        return num_bad


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > 0)
