"""Everything that decides how a training goes on, as whole tensors on one rank; and files that get damaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.export import whole_state_dict
from tests.engine.twins import whole


@dataclass
class State:
    """A model, its optimizer and its scheduler; `rest` is what else must be the same."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    rest: list[Any]


def state_of(model: nn.Module, optimizer: Any, scheduler: Any, *rest: Any) -> State:
    names = {id(param): name for name, param in model.named_parameters()}
    states = {
        f"{names[id(param)]}.{key}": whole(value).clone() if isinstance(value, Tensor) else value
        for param, state in optimizer.state.items()
        for key, value in state.items()
    }
    weights = {name: value.clone() for name, value in whole_state_dict(model).items()}
    return State(weights, states, scheduler.state_dict(), list(rest))


def assert_same_weights(left: State, right: State) -> None:
    assert left.weights.keys() == right.weights.keys()
    assert all(torch.equal(value, right.weights[name]) for name, value in left.weights.items())


def assert_same_state(left: State, right: State, *, but_rest: bool = False) -> None:
    """Bit for bit; without `rest` and the scheduler if `but_rest`."""
    assert_same_weights(left, right)
    assert left.optimizer.keys() == right.optimizer.keys()
    for name, value in left.optimizer.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(right.optimizer[name])), name
    assert but_rest or (left.scheduler, left.rest) == (right.scheduler, right.rest)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(bytes(data))


def assert_read_once(found: list[tuple[int, int, int]]) -> None:
    """By rank: bytes read, bytes of the files, bytes of their headers. Each byte is verified once and read once."""
    _, size, headers = found[0]
    read = sum(each for each, _, _ in found)
    assert 2 * size - headers <= read <= 2 * size + 5 * headers, (read, size, headers)  # headers are read by each rank
