"""What the backward under way reaches: calls of modules, and the parameters that are to get a gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_zero import torch_compat
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.units.reading import connected
from hf_zero.engine.units.storage.residency import LiveCall


def reaches(node: Any) -> bool | None:
    """Whether the running backward reaches a node; None: it is one of `torch.autograd.grad`, which asks for its leaf."""
    try:
        return torch_compat.will_run(node)
    except RuntimeError:
        return None


def comes_to(call: LiveCall) -> bool:
    """Whether the running backward reaches a call of a module."""
    node = call.node()
    return node is not None and bool(reaches(node))


def is_wanted(p: ZeroParameter, anchor_node: Any) -> bool:
    """Whether `p` is to get a gradient: `backward(inputs=...)` names those that do.

    Args:
        p: the parameter.
        anchor_node: of a leaf of every graph of its engine, which any backward without `inputs` reaches.
    """
    (leaf,) = connected([p])
    return bool(reaches(anchor_node)) or (leaf is not None and bool(reaches(torch_compat.gradient_node(leaf))))


def is_asked(p: ZeroParameter) -> bool:
    """Whether the running backward is one of `torch.autograd.grad` for `p`."""
    (leaf,) = connected([p])
    return leaf is not None and reaches(torch_compat.gradient_node(leaf)) is None


def handed_out(p: ZeroParameter, gradient: Tensor) -> Tensor:
    """What `torch.autograd.grad` gives: this rank's own whole gradient, as under DDP."""
    p.computed.refuse_part(f"torch.autograd.grad of {p.name!r}")
    return gradient.to(p.param.device)
