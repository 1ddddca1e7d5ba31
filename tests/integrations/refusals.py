"""What is an error on one rank is the same error on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Type and message of what a call raises; empty where it raises nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def refused(call: Callable[[], Any], kind: str, *texts: str) -> None:
    """Assert that a call raises an error of a type with all of the texts, and the same one on all ranks."""
    error = error_of(call)
    assert error[0] == kind and all(text in error[1] for text in texts), error
    assert_alike(error)


def assert_alike(value: Any) -> None:
    """All ranks have the same value."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(each == value for each in values), values
