"""`hf-zero doctor` tells what is there, what is missing, and what to do."""

from __future__ import annotations

import pytest

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


def test_a_problem_is_an_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["no-such-package>=1"])
    assert main(["doctor", "--num-processes", "0"]) == 1
    assert "1 problem to mend first" in capsys.readouterr().out
