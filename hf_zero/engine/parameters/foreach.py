"""Torch's operations on lists of tensors, for lists that hold partitioned parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def copy_each(targets: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
    """`torch._foreach_copy_`, which torch has not for `DTensor`s."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


def mixes(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether lists hold both kinds of tensors (a model's parameters and buffers), but at each place tensors of one kind."""
    if not func._schema.name.startswith("aten::_foreach_"):
        return False
    lists = [[isinstance(t, DTensor) for t in arg] for arg in args if _is_list_of_tensors(arg)]
    return all(each == lists[0] for each in lists) and any(lists[0]) and not all(lists[0])


def apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on the tensors of each kind by themselves; what it gives in their old order."""
    kinds = [isinstance(t, DTensor) for t in args[0]]
    results: list[Any] = [None] * len(kinds)
    for kind in (True, False):
        places = [place for place, each in enumerate(kinds) if each is kind]
        chosen = [[a[p] for p in places] if isinstance(a, list) and len(a) == len(kinds) else a for a in args]
        found = func(*chosen, **kwargs)
        for place, value in zip(places, found or [], strict=found is not None):
            results[place] = value
    return None if results[0] is None else results


def _is_list_of_tensors(arg: Any) -> bool:
    return isinstance(arg, list | tuple) and len(arg) > 0 and isinstance(arg[0], Tensor)
