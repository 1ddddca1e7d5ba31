"""The first run on GPUs: what it refuses, and what becomes of a part that fails."""

import pytest

from hf_zero.bench import devices
from hf_zero.bench.gpu import run as first_run
from hf_zero.bench.gpu.page import Section
from hf_zero.bench.processes import BenchError
from hf_zero.cli.main import main
from hf_zero.errors import UsageError


def test_a_machine_without_a_gpu_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    if devices.count():
        pytest.skip("there is one")
    assert main(["doctor", "--gpu"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("hf-zero: no GPU is to be seen here") and said.count("\n") == 1


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count", lambda: 2)
    monkeypatch.setattr(devices, "kind", lambda: "cpu")
    monkeypatch.setattr(devices, "memory_of", lambda device: (2**34, 2**34))
    monkeypatch.setattr(devices, "name_of", lambda device: "a | card")


@pytest.mark.usefixtures("two_devices")
def test_two_processes_on_one_device_are_refused() -> None:
    with pytest.raises(UsageError, match="--num-processes 3, but 2 devices are here: two processes cannot"):
        first_run.planned(3, None, 10, ["parity"])


@pytest.mark.usefixtures("two_devices")
def test_the_model_fits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_run.planned(None, None, 10, ["parity"]).model == "llama-125m"
    monkeypatch.setattr(devices, "memory_of", lambda device: (0, 80 * 2**30))
    assert first_run.planned(None, None, 10, ["parity"]).model == "llama-1b"


@pytest.mark.usefixtures("two_devices")
def test_launchers_and_unknown_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no part 'speed': choose from parity"):
        first_run.planned(None, None, 10, ["speed"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="without a launcher"):
        first_run.planned(None, None, 10, ["parity"])


@pytest.mark.usefixtures("two_devices")
def test_a_part_that_fails_is_told_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(part: str, plan: object, limit_s: float) -> Section:
        if part == "parity":
            raise BenchError("worker with {}: rank 1 ended with 1:\nTraceback\nValueError: | and 1\n")
        return Section("right", "the same bits")

    monkeypatch.setattr(first_run, "_on_ranks", run)
    kept: list[int] = []
    plan = first_run.planned(None, "llama-10m", 10, ["parity", "resume"])
    page = first_run.run(plan, so_far=lambda page: kept.append(len(page.parts)))
    assert kept == [1, 2]
    assert [section.verdict for _, _, section in page.parts] == ["failed", "right"]
    assert not page.is_right
    text = page.text()
    assert "rank 1 ended with 1: ValueError: / and 1 " in text  # in the table
    assert "```\nTraceback\nValueError: | and 1\n```" in text
    assert "## Resume from a checkpoint" in text


@pytest.mark.usefixtures("two_devices")
def test_parts_for_which_no_time_is_left_are_told() -> None:
    page = first_run.run(first_run.planned(None, "llama-10m", 0, ["parity"]))
    assert "not run: the 0 minutes were over" in page.text()
