"""Which dtype a parameter is kept, computed and reduced in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_zero.config.zero_config import ZeroConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class GradientDtypes:
    """How a whole gradient is reduced; facts that all ranks share, also those that have no gradient.

    Attributes:
        given: dtype in which it is given to its exchange; what was added up before may be in that of the sum, see `send_sums`.
        sent: dtype in which it travels.
        summed: dtype in which it is added up.
    """

    given: torch.dtype
    sent: torch.dtype
    summed: torch.dtype

    def send_sums(self, wire: str) -> bool:
        """Whether what one rank has added up travels as it is, where reductions have a wire format."""
        return self.summed == self.given or (self.summed == self.sent and wire == "float32")


@dataclass(frozen=True)
class Precision:
    """The dtypes asked for; None stands for the parameter's own.

    Attributes:
        compute: dtype of the whole parameters that modules see.
        master: dtype of the shard that the optimizer updates.
        reduce: dtype in which gradients are summed over the ranks.
    """

    compute: torch.dtype | None
    master: torch.dtype | None
    reduce: torch.dtype | None

    @classmethod
    def from_config(cls, config: ZeroConfig) -> Precision:
        """Read the three dtypes of `config`; "auto" becomes None."""
        return cls(*(_DTYPES.get(name) for name in (config.compute_dtype, config.master_dtype, config.reduce_dtype)))

    def compute_for(self, dtype: torch.dtype, keeps_float32: bool = False) -> torch.dtype:
        """The compute dtype of a parameter that was made in `dtype`, or of one in a module that computes in float32."""
        if not dtype.is_floating_point:
            return dtype
        return torch.promote_types(dtype, torch.float32) if keeps_float32 else self.compute or dtype

    def master_for(self, dtype: torch.dtype, requires_grad: bool) -> torch.dtype:
        """The dtype at rest of a parameter that was made in `dtype`; a frozen one needs no master."""
        if not requires_grad or not dtype.is_floating_point or self.master is None:
            return dtype
        return torch.promote_types(self.master, dtype)

    def reduce_for(self, grad_dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a gradient of `grad_dtype` is summed over the ranks."""
        return grad_dtype if self.reduce is None or grad_dtype == torch.float64 else self.reduce

    def gradient_dtypes(self, grad_dtype: torch.dtype, is_as_made: bool, sends_as_given: bool) -> GradientDtypes:
        """Those of a parameter.

        Args:
            grad_dtype: of the gradient, as autograd makes it.
            is_as_made: rows are added up of what autograd made. What stays whole is all-reduced in the sum's dtype, and what
                was added up over micro-batches before is in that dtype already.
            sends_as_given: the exchange does, where the sum's dtype holds the values exactly.
        """
        summed = self.reduce_for(grad_dtype)
        is_exact = torch.promote_types(grad_dtype, summed) == summed
        given = grad_dtype if is_as_made and is_exact else summed
        return GradientDtypes(given, given if sends_as_given else summed, summed)
