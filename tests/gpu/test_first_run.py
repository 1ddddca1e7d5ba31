"""`hf-zero doctor --gpu`, rehearsed on the late device: its figures mean nothing there, the way to them does."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hf_zero.bench.gpu.run import PARTS
from tests.gpu.test_gpu import NEEDS_A_COMPILER, built_late_device, late_device  # noqa: F401
from tests.ranks import ENVIRONMENT

_ROOT = Path(__file__).resolve().parent.parent.parent
_EVERYWHERE = Path(__file__).parent / "late" / "everywhere"
_DROPPED = {"HF_ZERO_COLLECTIVES", "ACCELERATE_USE_CPU"}


def _page(tmp_path: Path, *options: str, order: str = "late", limit_s: float = 560) -> tuple[str, str, int]:
    """The page, what was told, and the exit code."""
    environment: Mapping[str, str] = {name: value for name, value in ENVIRONMENT.items() if name not in _DROPPED}
    page = tmp_path / "page.md"
    words = ["doctor", "--gpu", "--write", str(page), "--model", "llama-thin-8", *options]
    found = subprocess.run(
        [sys.executable, "-m", "hf_zero.cli.main", *words],
        env={**environment, "PYTHONPATH": f"{_EVERYWHERE}:{_ROOT}", "LATE_ORDER": order},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    return page.read_text() if page.exists() else "", found.stdout + found.stderr, found.returncode


@pytest.mark.slow
@NEEDS_A_COMPILER
@pytest.mark.usefixtures("built_late_device")
def test_parts_are_run_on_each_device_and_told_on_a_page(tmp_path: Path) -> None:
    page, told, code = _page(tmp_path, "--parts", "communicators,killed")
    assert code == 0, told
    assert page.startswith("# hf_zero on 2 x late device\n")
    assert "| a model's two, in stage 3 | 64 MiB |" in page
    assert "and named it: rank 0 " in page


@pytest.mark.slow
@NEEDS_A_COMPILER
@pytest.mark.usefixtures("late_device")
@pytest.mark.parametrize("num_processes", [1, 2])
def test_all_parts_are_right_or_not_here(tmp_path: Path, num_processes: int) -> None:
    options = ("--num-processes", str(num_processes), "--minutes", "40")  # of simulated devices, on two cores
    page, told, code = _page(tmp_path, *options, order="early", limit_s=2500)
    assert code == 0, told
    assert page.count("\n## ") == len(PARTS)
    assert "WRONG" not in page and "failed" not in page, page


@pytest.mark.slow
@NEEDS_A_COMPILER
@pytest.mark.usefixtures("built_late_device")
def test_more_processes_than_devices_are_refused_in_a_line(tmp_path: Path) -> None:
    _, told, code = _page(tmp_path, "--num-processes", "3")
    assert code == 1
    assert told.startswith("hf-zero: --num-processes 3, but 2 devices are here") and told.count("\n") == 1
