"""Trainings that are hit again and again, beside one that is not: `python -m tests.cli.storm [RUNS] [RANKS]`.

A seed decides what happens to a run of 200 steps: which rank is killed, is stopped or raises, at which steps. Each has
to end with the bits of the undisturbed run. Printed for each: what was survived, the steps done again, seconds from a failure
to the next step.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cli.test_healing import SCRIPT
from tests.ranks import ENVIRONMENT

_STEPS, _HITS = 200, 4
_HOW = ["SIGKILL", "SIGSTOP", "SIGSEGV", "once"]


def run(folder: Path, name: str, num_ranks: int, places: list[str]) -> tuple[str, str, list[float]]:
    """One training; its weights' digest, what it said, and the seconds without a step after each failure."""
    words = [
        "launch",
        "--max_restarts",
        "20",
        "--num_processes",
        str(num_ranks),
        "--zero",
        "zero.yaml",
        "train.py",
        name,
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_zero.cli.main", *words, *places],
        cwd=folder,
        env=ENVIRONMENT | {"STEPS": str(_STEPS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said, gaps, failed_s = [], list[float](), None
    for line in process.stdout:
        said.append(line)
        if "more, from the checkpoint" in line:
            failed_s = time.monotonic()
        elif "'loss'" in line and failed_s is not None:
            gaps.append(time.monotonic() - failed_s)
            failed_s = None
    process.wait()
    found = re.search("weights (.*)", "".join(said))
    return (found[1] if found else "none"), "".join(said), gaps


def main(num_runs: int, num_ranks: int) -> int:
    """Run all; returns the number of runs that did not end as the undisturbed one."""
    with tempfile.TemporaryDirectory() as place:
        folder, num_bad = Path(place), 0
        (folder / "train.py").write_text(SCRIPT)
        (folder / "zero.yaml").write_text("stage: 2\ntimeout_s: 10\n")
        undisturbed, said, _ = run(folder, "undisturbed", num_ranks, [])
        assert undisturbed != "none", said
        for seed in range(num_runs):
            draw = random.Random(seed)
            places = [
                f"{draw.randrange(5, _STEPS)}:{draw.randrange(num_ranks)}:{draw.choice(_HOW)}" for _ in range(_HITS)
            ]
            found, said, gaps = run(folder, f"run{seed}", num_ranks, places)
            again = [int(steps) for steps in re.findall(r": (\d+) steps are done again", said)]
            is_right = found == undisturbed
            num_bad += not is_right
            print(
                f"{seed}: {'same bits' if is_right else 'OTHER BITS: ' + said[-3000:]}; {' '.join(places)}; survived "
                f"{len(again)}, steps done again {again}, seconds to the next step {[round(gap, 1) for gap in gaps]}",
                flush=True,
            )
        print(f"{num_runs} runs on {num_ranks} ranks, {num_bad} bad")
        return num_bad


if __name__ == "__main__":
    runs, ranks, *_ = [*map(int, sys.argv[1:]), *(50, 3)[len(sys.argv) - 1 :]]
    sys.exit(main(runs, ranks) > 0)
