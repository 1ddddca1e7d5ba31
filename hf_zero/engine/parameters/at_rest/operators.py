"""What torch says of its operators, as far as the rule for tensors at rest asks: see `partitioned_tensor`."""

from __future__ import annotations

import functools
from enum import Enum, auto
from typing import Any

import torch

# Elementwise, though torch does not tag them so.
_ELEMENTWISE = frozenset(
    (
        "_to_copy",
        "copy_",
        "fill_",
        "zero_",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "_pin_memory",
        "is_pinned",
        "lift_fresh",
    )
)
_FACTORIES = frozenset(("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"))
_DRAWS_UNREAD = frozenset(
    ("normal_", "uniform_", "exponential_", "cauchy_", "geometric_", "log_normal_", "random_", "bernoulli_")
)
# Of the same memory, though autograd is not told.
_VIEWS_UNSAID = ("unsafe_split", "unsafe_split_with_sizes", "_unsafe_view")
# Exchanges of torch that give each rank something else, or one rank alone.
_DIFFER_BY_RANK = ("reduce_", "_reduce_scatter_base_", "scatter_", "alltoall_", "gather_", "recv_")
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


class Kind(Enum):
    """How an operator is run."""

    ALIAS = auto()
    VIEW = auto()
    FACTORY = auto()  # reads no values
    ROWS = auto()  # element by element: on rows, where its operands are cut alike
    LISTS = auto()  # the same, place by place of lists
    NORM = auto()
    UNSCALE = auto()  # of `GradScaler`
    DRAW = auto()  # of random numbers, into a tensor or of its shape, without reading it
    EXCHANGE = auto()  # of `torch.distributed`, as `dist.all_reduce` calls it: on the whole
    SHAPE = auto()  # changes what memory a tensor shows
    WHOLE = auto()  # all else


@functools.cache
def kind_of(func: Any) -> Kind:
    """How `func` is run on tensors at rest."""
    name = base_name(func)
    if func.namespace == "c10d":
        return Kind.EXCHANGE
    if func is torch.ops.aten.detach.default or func is torch.ops.aten.alias.default:
        return Kind.ALIAS
    if torch.Tag.inplace_view in func.tags or name in ("set_", "resize_", "resize_as_"):
        return Kind.SHAPE
    if func.is_view or name in _VIEWS_UNSAID:
        return Kind.VIEW
    if name in _FACTORIES:
        return Kind.FACTORY
    if torch.Tag.nondeterministic_seeded in func.tags:
        return Kind.DRAW if (name in _DRAWS_UNREAD and func._overloadname != "Tensor") or is_like(name) else Kind.WHOLE
    if name in ("_foreach_norm", "linalg_vector_norm") and func._overloadname in ("Scalar", "default"):
        return Kind.NORM
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return Kind.UNSCALE
    if name in _FUSED or (name.startswith("_foreach_") and _is_elementwise_of_one(name.removeprefix("_foreach_"))):
        return Kind.LISTS
    is_elementwise = torch.Tag.pointwise in func.tags or name in _ELEMENTWISE
    return Kind.ROWS if is_elementwise and "out" not in func._overloadname else Kind.WHOLE


def _is_elementwise_of_one(name: str) -> bool:
    """Whether the operator of one tensor works element by element, of which `_foreach_{name}` is that of lists."""
    single: Any = getattr(torch.ops.aten, name, None)
    if single is None or name == "max":  # of two tensors it does; lists have that of one only
        return False
    return name in _ELEMENTWISE or any(
        torch.Tag.pointwise in getattr(single, overload).tags for overload in single.overloads()
    )


@functools.cache
def writes_of(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments that `func` writes to."""
    if kind_of(func) is Kind.EXCHANGE:  # whose schema does not tell
        writes = base_name(func).endswith("_") and "barrier" not in base_name(func)
        return ((0, func._schema.arguments[0].name),) if writes else ()
    is_norm = "batch_norm" in base_name(func)  # whose schema does not tell that it updates its statistics
    return tuple(
        (i, a.name)
        for i, a in enumerate(func._schema.arguments)
        if (a.alias_info is not None and a.alias_info.is_write) or (is_norm and a.name.startswith("running_"))
    )


@functools.cache
def base_name(func: Any) -> str:
    """The operator's name without namespace and overload."""
    return str(func._schema.name).split("::")[-1]


def differs_by_rank(func: Any) -> bool:
    """Whether what an exchange writes is not the same on all ranks."""
    return base_name(func).startswith(_DIFFER_BY_RANK)


def is_like(name: str) -> bool:
    """Whether an operator of this name makes a tensor of another's shape, of which it reads nothing."""
    return name.rpartition("_")[2] == "like"
