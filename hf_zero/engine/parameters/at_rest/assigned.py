"""Tensors that have been assigned to parameters at rest, `p.data = master`, and would have changed with them.

[Note: assigned] In torch the parameter is that tensor from then on: a step on the one moves the other. Here its values are
copied, and steps leave it as it is. Who puts masters in for a step, and takes what the step has made of them from `p.data`,
gives the same tensor again the next time, and would begin anew from its first values. So a parameter knows what it was given,
and whether it changed meanwhile; the same tensor, unchanged, is an error then. So it is on all ranks: steps and edits are
counted, not values. Aliases of the parameter (`p.data`, kept) are no copies: those that are assigned show it again.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import Tensor

from hf_zero.engine.parameters.at_rest.root import Root
from hf_zero.errors import UsageError

ASSIGNED = "_zero_assigned"  # attribute of a parameter


class _Given(NamedTuple):
    """What a parameter was given.

    Attributes:
        tensor: plain, or a value at rest.
        version: its own, then.
        param_version: the parameter's, then; None: it has been given another since, and had changed before.
    """

    tensor: weakref.ref[Tensor]
    version: int
    param_version: int | None

    def is_behind(self, param: Tensor) -> bool:
        """Whether the parameter has changed since, while it was this tensor in torch, and this has not."""
        tensor = self.tensor()
        return tensor is not None and tensor._version == self.version and self.param_version != param._version


def assign(param: Tensor, value: Tensor, is_alias: bool) -> None:
    """Copy a value, in place of which torch would let the parameter be it.

    Args:
        param: at rest.
        value: of its shape.
        is_alias: the value is an alias of the parameter.

    Raises:
        UsageError: torch would assign what steps have made of the value.
    """
    behind = [given for given in vars(param).get(ASSIGNED, ()) if given.is_behind(param)]
    if any(given.tensor() is value for given in behind):
        raise UsageError(
            "`.data = ` of a partitioned parameter copies the tensor, so steps and edits since it was assigned have not "
            "changed it: write them into it (`master.copy_(p.data)`) before it is assigned again, or keep the masters in "
            "hf_zero (`compute_dtype`)"
        )
    param.copy_(value)
    kept = [given._replace(param_version=None) for given in behind]
    # Not of parameters: `module.to` cannot swap tensors to which there are weak references.
    is_value = type(value) is Tensor or (isinstance(value, Root) and value.param is None and not is_alias)
    if is_value and not value.is_inference():
        kept.append(_Given(weakref.ref(value), value._version, param._version))
    setattr(param, ASSIGNED, kept)
