"""Optimizers of which a checkpoint would miss something."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from hf_zero.errors import CheckpointError
from hf_zero.optim.kinds import wrapped_optimizers


def check_all_is_saved(optimizer: Any) -> None:
    """Raise for what would be missing in the checkpoint, although the optimizer's `state_dict` has it."""
    kind = type(optimizer).__name__
    for key, values in optimizer.state.items():
        if not isinstance(key, Tensor):
            raise CheckpointError(
                f"{kind} keeps a state under {key!r}, which is no parameter, so it would not be saved: keep it in "
                "param_groups, or in the state of a parameter"
            )
        if (
            isinstance(values, dict)
            and (other := next((k for k in values if not isinstance(k, str)), None)) is not None
        ):
            raise CheckpointError(
                f"{kind} names a state of a parameter {other!r}, which is no text: name it {str(other)!r}"
            )
    for inner in wrapped_optimizers(optimizer):
        if inner.state and inner.state is not optimizer.state:
            raise CheckpointError(
                f"the state of the {type(inner).__name__} inside {kind} would not be saved: let both have one state "
                f"(`self.state = inner.state`), or train with {type(inner).__name__} itself"
            )
    bare = object.__new__(type(optimizer))
    vars(bare).update(vars(optimizer))
    if "state" in vars(optimizer):
        bare.state = {}
        more: list[Any] = []
        with contextlib.suppress(Exception):  # of a method that expects its states
            more = [key for key in bare.state_dict() if key not in ("state", "param_groups")]
        if more:
            raise CheckpointError(
                f"state_dict() of {kind} has {more[0]!r} beside its states and groups, which would not be saved: keep it in "
                "param_groups"
            )
