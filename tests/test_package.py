"""What is built installs into an empty environment, and runs from an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import hf_zero

_ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_built_installs_and_runs_from_an_empty_folder(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    python, empty = _environment(tmp_path / "environment"), tmp_path / "empty"
    empty.mkdir()
    _run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", tmp_path / "built"], _ROOT)
    (built,) = (tmp_path / "built").iterdir()
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps"]
    _run([*pip, "--no-build-isolation", built], empty)

    where = _run([python, "-c", "import hf_zero; print(hf_zero.__file__)"], empty)
    assert Path(where.strip()).is_relative_to(tmp_path)
    command = python.with_name("hf-zero")
    assert _run([command, "--version"], empty).strip() == f"hf-zero {hf_zero.__version__}"
    assert "stage 3" in _run([command, "plan", "llama-125m", "--ranks", "2"], empty)
    assert not list(empty.iterdir())


def _environment(folder: Path) -> Path:
    """The interpreter of an environment that has what this one has, but for hf_zero as it is installed for development."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "around.pth").write_text("\n".join(each for each in sys.path if "site-packages" in each))
    return folder / "bin" / "python"


def _run(command: list[str | Path], folder: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
