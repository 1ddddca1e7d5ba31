"""What holds for every test: no network, one thread, hypothesis without deadlines, no rank left behind."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported, which reads them once; the ranks inherit them
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
# Alike on every machine, whether its processes can share memory or not; tests of the other exchanges ask for them.
os.environ.setdefault("HF_ZERO_COLLECTIVES", "pairwise")

import hypothesis
import pytest
import torch

from tests.by_hand import SLOW_CASES
from tests.ranks import close_pool

torch.set_num_threads(1)
hypothesis.settings.register_profile("hf_zero", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("hf_zero")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks, after Ctrl-C too."""
    close_pool()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that are run by hand; each of them must be there, if its file is."""
    found = {item.nodeid.removeprefix("tests/"): item for item in items}
    for case in SLOW_CASES & found.keys():
        found[case].add_marker(pytest.mark.slow)
    if not any("::" in word for word in config.args):
        files = {name.partition("::")[0] for name in found}
        lost = {case for case in SLOW_CASES - found.keys() if case.partition("::")[0] in files}
        assert not lost, f"tests/by_hand.py names what is not there: {sorted(lost)}"
