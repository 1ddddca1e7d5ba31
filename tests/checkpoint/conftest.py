"""The models whose checkpoints are tested in this folder."""

import pytest

from tests.models import CASES, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("faults")
    make_model(CASES["llama"]).save_pretrained(path / "llama")
    make_model(CASES["mixtral"]).save_pretrained(path / "mixtral")
    return str(path)
