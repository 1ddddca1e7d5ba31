"""What torch exchanges inside a module, by `torch.utils.swap_tensors`, that is partitioned already.

- `nn.Module._apply` (`to_empty`, `to(dtype)`, functions of a user's own) gives a parameter other memory so. That is an edit,
  which passes no operator: the engine is told here, see [Note: an edit is seen].
- `nn.utils.parametrize` exchanges a parameter with itself where a parametrization has no `right_inverse`, and marks it so that
  its next backward raises. Nothing is exchanged then.
- Users exchange parameters of models. They are an engine's, so their values are exchanged.
- Where it has a `right_inverse`, and where a parametrization is removed, `nn.utils.parametrize` exchanges the parameter with
  what was computed of it, which may be whole and plain. Objects of two types cannot be exchanged, so their values are.

`hf_zero.undo()` puts the original back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_zero import torch_compat
from hf_zero.changes import Changes
from hf_zero.engine.parameters.at_rest.known.lineage import are_known_to_be_equal
from hf_zero.engine.parameters.partitioned_tensor import PartitionedTensor
from hf_zero.errors import UsageError

_changes = Changes()


def install() -> None:
    """Wrap torch's function; a second call changes nothing."""
    if not _changes:
        _changes.keep()
        _changes.wrap(torch.utils, "swap_tensors", _swap)


def _swap(original: Callable[[Tensor, Tensor], None], t1: Tensor, t2: Tensor) -> None:
    if t1 is t2:
        return
    if isinstance(t2, PartitionedTensor) and not isinstance(t1, PartitionedTensor):
        t1, t2 = t2, t1
    # `module.to` what it is already exchanges the parameter with an alias. Not by addresses: ranks without rows must agree.
    if isinstance(t1, PartitionedTensor) and torch_compat.local_of(t1) is torch_compat.local_of(t2):
        if t1.dtype == t2.dtype and t1.shape == t2.shape and t1.requires_grad == t2.requires_grad:
            return  # torch would refuse where something that was computed of the parameter is alive
    elif isinstance(t1, PartitionedTensor):
        if not isinstance(t2, PartitionedTensor) and (t2.shape, t2.dtype) == (t1.shape, t1.dtype):
            _swap_values(t1, t2)
            return
        if isinstance(t2, PartitionedTensor) and _is_a_models(t1) and _is_a_models(t2):
            _exchange(t1, t2)
            return
        if isinstance(t2, PartitionedTensor) and t1.dtype == t2.dtype and are_known_to_be_equal(t1, t2):
            return  # `.to("cpu:0")` has copied it; what is known of its values stays known of the parameter
        t1.before_edit()
    try:
        original(t1, t2)
    except RuntimeError as error:
        if not isinstance(t1, PartitionedTensor) or "use_count" not in str(error):
            raise
        raise UsageError(
            f"{t1.describe()} cannot become {t2.dtype} on {t2.device} while something that was computed of it is alive (a loss "
            "with a term over parameters, a view): drop that first (`del loss`)"
        ) from error
    if isinstance(t1, PartitionedTensor):
        t1.after_edit()


def _is_a_models(tensor: PartitionedTensor) -> bool:
    return tensor.held[0].serving.number_of(tensor) is not None


@torch.no_grad()
def _exchange(one: PartitionedTensor, other: PartitionedTensor) -> None:
    """Exchange values and gradients of two parameters of models, which stay themselves."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        raise UsageError(
            f"swap_tensors of {one.describe()} and {other.describe()}, which differ in shape or dtype: exchange the modules' "
            "attributes (`a.weight, b.weight = b.weight, a.weight`)"
        )
    before = one.detach().clone()
    one.copy_(other)
    other.copy_(before)
    one.grad, other.grad = other.grad, one.grad
    flags = one.requires_grad, other.requires_grad
    other.requires_grad_(flags[0])
    one.requires_grad_(flags[1])


@torch.no_grad()
def _swap_values(partitioned: PartitionedTensor, whole: Tensor) -> None:
    before, grad = partitioned.full_tensor(), partitioned.grad
    whole_grad = None if grad is None else grad.full_tensor()
    partitioned.copy_(whole)
    whole.copy_(before)
    if whole.is_leaf:
        partitioned.grad, whole.grad = whole.grad, whole_grad
