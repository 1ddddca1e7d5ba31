"""What holds for every test: no network, one thread, hypothesis without deadlines, no rank left behind."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported, which reads them once; the ranks inherit them
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# Not measured anew in every test, with another result on a busy machine; tests of the other exchanges ask for them.
os.environ.setdefault("HF_ZERO_COLLECTIVES", "pairwise")

import hypothesis
import pytest
import torch

from tests.ranks import close_pool

torch.set_num_threads(1)
hypothesis.settings.register_profile("hf_zero", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("hf_zero")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks, after Ctrl-C too."""
    close_pool()
