"""Tensor parallelism beside ZeRO: how modules see what is gathered, where transformers shares a layer among ranks.

[Note: tensor axis] transformers cuts weights of a layer over the tensor axis, whose ranks see the same batch, and computes with
`DTensor`s over that axis. What a rank holds of a weight is cut by rows once more, over the other ranks. So a gather makes this
rank's part of the weight, and modules see it as the `DTensor` that transformers made. That tensor is made once a call, with the
gather: a recomputation in backward must meet the same one, or autograd would save other tensors than in forward.

Some weights are whole on every rank of the tensor axis, but compute with a part of the activations (the norms of single heads):
their gradients are added up over the axis. transformers does so in a hook on the parameter, which a gathered one cannot have.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils import _pytree as pytree

from hf_zero import torch_compat
from hf_zero.comm.collectives import Collectives
from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError
from hf_zero.layout import row_major

_GRADIENTS_EVERY = 100  # steps
_GRADIENT_TOLERANCE = 1e-2  # of a norm: far above rounding, far below what another batch or mask does
_PLACEMENTS, _SUMS = "_zero_tensor_placements", "_zero_sums_over_tensor_axis"


def remember_placement(holder: nn.Module, name: str, param: DTensor) -> None:
    """Let the parameter `name` of `holder`, which is a `DTensor` over the tensor axis, be seen as one when it is gathered."""
    vars(holder).setdefault(_PLACEMENTS, {})[name] = param.placements[-1]


def sum_gradients_over_tensor_axis(module: nn.Module) -> None:
    """Let the gradients of a module's own parameters, each of a part of the activations, be added up over the tensor axis."""
    vars(module)[_SUMS] = True


@dataclass(frozen=True)
class Seen:
    """How modules see one parameter.

    Attributes:
        placement: over the tensor axis; None for a plain tensor.
        mesh: the tensor axis.
        shape: of the whole.
        sums_over: add gradients up over these ranks; None: they are whole as they come.
    """

    placement: Placement | None
    mesh: DeviceMesh | None
    shape: tuple[int, ...]
    sums_over: Collectives | None

    @classmethod
    def by(cls, holders: Sequence[tuple[nn.Module, str]], param: Tensor, world: World) -> Seen | None:
        """How these modules see `param`; None: as it is gathered."""
        if world.tensor.num_ranks == 1:
            return None
        placements = [vars(module).get(_PLACEMENTS, {}).get(name) for module, name in holders]
        placement = next((each for each in placements if each is not None), None)
        sums = any(vars(module).get(_SUMS) for module, _ in holders)
        if placement is None and not sums:
            return None
        return cls(placement, world.tensor_mesh, tuple(param.shape), world.tensor if sums else None)

    def of(self, part: Tensor) -> Tensor:
        """What modules see of the gathered `part` of this rank, in the graph."""
        if self.sums_over is not None:
            part = _SumGradient.apply(part, self.sums_over)  # type: ignore[no-untyped-call]
        return part if self.placement is None else self._distributed(part, self.placement)

    def whole_of(self, part: Tensor) -> Tensor:
        """The whole over the tensor axis, for a computation that all its ranks do alike."""
        return part if self.placement is None else self._distributed(part, self.placement).full_tensor()

    def _distributed(self, part: Tensor, placement: Placement) -> DTensor:
        shape, stride = torch.Size(self.shape), row_major(self.shape)
        return DTensor.from_local(part, self.mesh, [placement], run_check=False, shape=shape, stride=stride)


class _SumGradient(torch.autograd.Function):
    """The same tensor; its gradient is the sum of those of the ranks of an axis."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, over: Collectives) -> Tensor:
        ctx.over = over
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.over.all_reduce([total.view(-1)], "gradients of parts of activations").wait()
        return total, None


class SameInputs:
    """Looks at the first inputs of a model: the ranks that share its layers must see the same batch.

    Ranks with batches of their own would train on without an error, on activations that are sums of several batches'.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_checked = world.tensor.num_ranks == 1

    def check(self, args: Any, kwargs: Any) -> None:
        """Compare the tensors of a forward's arguments, once; called by all ranks together.

        Raises:
            UsageError: on all ranks, if some that share layers have others.
        """
        if self._is_checked:
            return
        self._is_checked = True
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if type(each) is Tensor]
        found = self._world.everyone.agree([checksum(tensors)], "the inputs of the model")
        size, ranks = self._world.tensor.num_ranks, self._world.everyone.ranks
        for first in range(0, len(ranks), size):
            if len({value for (value,) in found[first : first + size]}) > 1:
                raise UsageError(
                    f"ranks {list(ranks[first : first + size])} share every layer of the model (tp_size), but its inputs "
                    "differ between them: they must see the same batch, as from a loader that the Trainer or accelerate "
                    "has prepared; in a loop of your own, choose batches by engine.world.data.rank"
                )


class SameGradients:
    """Looks at gradients of parameters that every rank of the tensor axis has whole: they must be the same there.

    Where they are not, the ranks' parameters drift apart without an error: the model's plan is incomplete, or the ranks
    see other batches, or draw other random numbers.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._last = -1

    def check(self, num_steps: int, parameters: Sequence[tuple[str, Tensor]]) -> None:
        """Compare the gradients of now and then a step, the first two among them; called by all ranks together.

        Args:
            num_steps: optimizer steps so far.
            parameters: of the model, by name, with their reduced gradients.

        Raises:
            UsageError: on all ranks, if some that share layers have others.
        """
        is_due = num_steps != self._last and (num_steps < 2 or num_steps % _GRADIENTS_EVERY == 0)
        if self._world.tensor.num_ranks == 1 or not is_due:
            return
        self._last = num_steps
        whole = [(name, param) for name, param in parameters if self._world.cut_of(param).tensor is None]
        norms = [-1.0 if p.grad is None else float(torch_compat.local_of(p.grad).double().norm()) for _, p in whole]
        rows = self._world.tensor.agree_on_floats(norms, "gradients of what is whole on the tensor axis")
        bad = -1
        for index, values in enumerate(zip(*rows, strict=True)):
            if not max(values) - min(values) <= _GRADIENT_TOLERANCE * max(map(abs, values)):
                bad = index
                break
        found = self._world.everyone.agree([bad], "gradients of what is whole on the tensor axis")
        first = max(index for (index,) in found)
        if first >= 0:
            raise UsageError(
                f"the gradients of {whole[first][0]!r} differ between ranks that share its layer (tp_size), so these would "
                "drift apart: the ranks must see the same batches and draw the same random numbers (dropout), and the "
                "model's own plan for tensor parallelism must be complete, which it is not for every model of transformers"
            )


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number that tells apart other values, of tensors on any device."""
    found = 0
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        found = zlib.crc32(values.numpy().tobytes(), found)
    return found


def is_over_tensor_axis(param: Tensor, world: World) -> bool:
    """Whether this is a `DTensor` as transformers' tensor parallelism makes it: over the tensor axis, and not cut further."""
    return isinstance(param, DTensor) and param.device_mesh == world.tensor_mesh
