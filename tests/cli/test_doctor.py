"""`hf-zero doctor` tells what is there, what is missing, and what to do."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hf_zero.cli import doctor
from hf_zero.cli.doctor import packages
from hf_zero.cli.main import main


@pytest.mark.slow
def test_this_machine_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "ok    torch " in said
    assert "2 exchange; collectives: auto takes" in said
    assert said.endswith("Ready to train.\n")


def test_missing_and_foreign_versions_are_named_with_what_to_install() -> None:
    wanted = ["no-such-package>=1", "torch<2", "pyyaml>=1", "nothing; extra == 'bench'"]
    found = {finding.what: finding for finding in packages(wanted)}
    assert found["no-such-package"].state == "bad"
    assert "pip install 'no-such-package>=1'" in found["no-such-package"].said
    assert found["torch"].state == "bad"
    assert "pip install 'torch<2'" in found["torch"].said
    assert found["pyyaml"].state == "ok"
    assert "nothing" not in found


def test_a_release_beyond_those_tested_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.TESTED, "torch", "2.9")
    monkeypatch.setitem(doctor.TESTED, "pyyaml", "6.99")
    found = {finding.what: finding for finding in packages(["torch>=2.11", "pyyaml>=6.0"])}
    assert (found["torch"].state, found["pyyaml"].state) == ("note", "ok")
    assert "newer than what was tested (2.9)" in found["torch"].said


@pytest.mark.parametrize(("version", "is_newer"), [("2.13.0+cpu", False), ("2.15.3", False), ("2.16.0.dev1", True)])
def test_the_first_two_numbers_of_a_release_are_compared(
    monkeypatch: pytest.MonkeyPatch, version: str, is_newer: bool
) -> None:
    monkeypatch.setitem(doctor.TESTED, "torch", "2.15")
    assert doctor.is_newer_than_tested("torch", version) is is_newer


def test_what_lets_two_communicators_wait_for_each_other_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main(["doctor", "--num-processes", "0"])
    assert (
        "note  CUDA_DEVICE_MAX_CONNECTIONS 1: gathers and reductions use a communicator each" in capsys.readouterr().out
    )
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    main(["doctor", "--num-processes", "0"])
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in capsys.readouterr().out


def test_a_problem_is_an_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["no-such-package>=1"])
    assert main(["doctor", "--num-processes", "0"]) == 1
    assert "1 problem to mend first" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "backend", "is_built", "expected"),
    [
        ("xpu", "xccl", True, ("ok", "xccl", "exchanges what is on xpu")),
        ("hpu", "hccl", False, ("bad", "hccl", "has hpu devices, but not hccl")),
        ("mps", None, False, ("note", "exchanges", "torch knows none between mps devices")),
        ("cuda", "nccl", True, ("ok", "nccl", "2.27.5")),
    ],
)
def test_devices_of_any_maker_are_told_with_what_they_exchange_by(
    kind: str, backend: str | None, is_built: bool, expected: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.SimpleNamespace(nccl=types.SimpleNamespace(version=lambda: (2, 27, 5)))
    properties: Callable[[object], object] = lambda device: types.SimpleNamespace(name="a device")  # noqa: E731
    module.get_device_properties, module.mem_get_info = properties, lambda device: (2**30, 3 * 2**30)
    accelerator = types.SimpleNamespace(type=kind)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    known = {} if backend is None else {kind: backend}
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", known)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: is_built and name == backend)
    *devices, exchanges = doctor._devices()
    assert [(each.what, each.said) for each in devices] == [(f"{kind}:{i}", "a device, 3 GiB") for i in (0, 1)]
    assert (exchanges.state, exchanges.what) == expected[:2] and expected[2] in exchanges.said


@pytest.mark.parametrize(
    ("asked", "expected"), [(None, ("ok", "one device: ")), (3, ("bad", "3 asked for, but 1 device is"))]
)
def test_one_device_has_nobody_to_exchange_with(
    asked: int | None, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_zero.bench.devices.count", lambda: 1)
    (finding,) = doctor._ranks(asked)
    assert (finding.state, finding.said[: len(expected[1])]) == expected
