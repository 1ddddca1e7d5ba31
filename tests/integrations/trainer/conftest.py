"""The models that the tests of this folder load."""

import pytest

from tests.models import CASES, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trainer")
    for name in ("llama", "t5", "mixtral"):
        make_model(CASES[name]).save_pretrained(path / name)
    return str(path)
