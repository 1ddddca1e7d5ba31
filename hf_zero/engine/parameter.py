"""One parameter's life: its rows at rest, its whole tensor while modules compute, its gradient. Sole writer of its storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.layout import RowLayout


@dataclass(eq=False)
class ZeroParameter:
    """A parameter as the engine knows it.

    Attributes:
        name: its first qualified name in the model; `aliases` are the others of a tied parameter.
        param: what the module, the optimizer and the user hold at rest: a `DTensor` over this rank's rows (a plain
            tensor in stage 0 and at world size 1).
        locations: the modules and attribute names that hold it.
        layout: how it is cut; one rank where it stays whole.
        rank: this rank.
        compute_dtype: dtype of the whole tensor that modules see.
    """

    name: str
    param: nn.Parameter
    locations: list[tuple[nn.Module, str]]
    layout: RowLayout
    rank: int
    compute_dtype: torch.dtype
    aliases: list[str] = field(default_factory=list)
    whole_grad: Tensor | None = None  # stages 0 and 1: this rank's sum of micro-batches, not reduced yet
    _owns_whole_grad: bool = False
    _grad_seen: tuple[Tensor, bool] | None = None  # `param.grad` as last shown, and whether it was other than zero
    _shows_whole: bool = False
    version: int = 0  # of `param`, when the engine last knew it
    _seen: list[tuple[object, Tensor]] = field(default_factory=list)

    @cached_property
    def is_sharded(self) -> bool:
        """Whether each rank holds only its rows."""
        return self.layout.num_ranks > 1

    @property
    def local(self) -> Tensor:
        """This rank's rows, in the dtype at rest, without autograd."""
        return torch_compat.local_of(self.param)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's rows."""
        return self.layout.local_shape(self.rank)

    @cached_property
    def local_numel(self) -> int:
        """The number of elements of this rank's rows."""
        return self.layout.local_numel(self.rank)

    @property
    def whole_nbytes(self) -> int:
        """Bytes of a padded whole tensor in the compute dtype."""
        return self.layout.padded_numel * self.compute_dtype.itemsize

    @property
    def is_whole_elsewhere(self) -> bool:
        """Whether modules see a whole tensor that is not the engine's: inside `GatheredParameters`."""
        if not self._seen:
            for module, name in self.locations:
                if module._parameters.get(name) is not self.param:
                    return True
        return False

    def move_into(self, storage: torch.UntypedStorage, offset_bytes: int) -> None:
        """Let the rows at rest live inside a whole buffer, so that the optimizer writes where the gather reads."""
        start, stop = self.layout.local_span_in_chunk(self.rank)
        itemsize = self.param.dtype.itemsize
        alias = torch_compat.storage_alias(storage, offset_bytes + start * itemsize, (stop - start) * itemsize)
        rows = torch_compat.tensor_on(alias, 0, self.local_shape, self.param.dtype)
        rows.copy_(self.local)
        torch_compat.set_local(self.param, rows)

    def push(self, owner: object, whole: Tensor) -> None:
        """Let the modules see `whole` under the parameter's name, until `pop(owner)`."""
        self._seen.append((owner, whole))
        self._install(whole)

    def pop(self, owner: object) -> None:
        """Let the modules see what they saw before `push(owner, ...)`: an outer call's whole tensor, or the rows."""
        seen = self._seen
        if seen and seen[-1][0] is owner:
            seen.pop()
            self._install(seen[-1][1] if seen else self.param)
        elif seen:
            self._seen = [entry for entry in seen if entry[0] is not owner]

    def _install(self, tensor: Tensor) -> None:
        if self._is_in_rnn:
            put(self.locations, tensor)
        else:
            for module, attribute in self.locations:
                module._parameters[attribute] = tensor  # type: ignore[assignment]

    @cached_property
    def _is_in_rnn(self) -> bool:
        return any(isinstance(module, nn.RNNBase) for module, _ in self.locations)

    def add_grad(self, flat: Tensor) -> None:
        """Add reduced gradients of this rank's rows to `param.grad`.

        Args:
            flat: [elements of this rank], reduce dtype; kept, if it becomes the gradient.
        """
        param = self.param
        rows = flat if flat.ndim == len(self.local_shape) else flat.view(self.local_shape)
        if param.grad is not None:
            torch_compat.local_of(param.grad).add_(rows)
        else:
            param.grad = self._as_gradient(as_dtype(rows, param.dtype))

    def _as_gradient(self, rows: Tensor) -> Tensor:
        param = self.param
        return torch_compat.wrap_like(rows, param) if isinstance(param, DTensor) else rows

    def add_whole_grad(self, grad: Tensor, dtype: torch.dtype) -> None:
        """Add this rank's own whole gradient of one micro-batch (stages 0 and 1 under `no_sync`).

        Args:
            grad: the whole shape, as autograd made it; never written to.
            dtype: in which the sum is kept.
        """
        self.drop_stale_whole_grad()
        if self.whole_grad is None:
            self.whole_grad = as_dtype(grad, dtype).contiguous()
            self._owns_whole_grad = False  # autograd may have handed the same memory to somebody else
        elif self._owns_whole_grad:
            self.whole_grad.add_(grad)
        else:
            self.whole_grad = self.whole_grad + grad.to(dtype)
            self._owns_whole_grad = True

    def show_whole_grad(self) -> None:
        """Let `param.grad` be this rank's own unreduced rows, until they are reduced.

        So `zero_grad()` in between can be noticed: see `drop_stale_whole_grad`.
        """
        if self.whole_grad is None:
            return
        if self.param.grad is None or (self._grad_seen is not None and self.param.grad is self._grad_seen[0]):
            rows = self.layout.rows_of(self.whole_grad, self.rank).to(self.param.dtype)
            self.param.grad = self._as_gradient(rows)
            self._shows_whole = True
        grad = self.param.grad
        self._grad_seen = (grad, bool(torch_compat.local_of(grad).any()))

    def drop_stale_whole_grad(self) -> None:
        """Forget accumulated whole gradients if the user has zeroed `param.grad` since they were accumulated."""
        if self.whole_grad is None or self._grad_seen is None:
            return
        seen, was_other_than_zero = self._grad_seen
        now = self.param.grad
        # Not by the version counter, which foreach and fused optimizers leave alone.
        was_zeroed = now is seen and was_other_than_zero and not torch_compat.local_of(seen).any()
        if now is not seen or was_zeroed:
            self.clear_whole_grad()

    def drop_unshown_whole_grad(self) -> None:
        """Forget what a backward that broke off has added, which `zero_grad()` cannot be seen to clear."""
        if self._grad_seen is None:
            self.whole_grad = None

    def take_whole_grad(self) -> Tensor | None:
        """The accumulated whole gradient, if any, and forget it."""
        if self.whole_grad is None:
            return None
        self.drop_stale_whole_grad()
        grad = self.whole_grad
        self.clear_whole_grad()
        return grad

    def clear_whole_grad(self) -> None:
        """Forget whole gradients, and what `param.grad` shows of them."""
        self.whole_grad = None
        if self._shows_whole and self._grad_seen is not None and self.param.grad is self._grad_seen[0]:
            self.param.grad = None
        self._grad_seen, self._shows_whole = None, False


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, which costs a microsecond where there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def put(locations: list[tuple[nn.Module, str]], tensor: Tensor) -> None:
    """Let modules hold `tensor` as a parameter, without the checks and copies of an ordinary assignment."""
    for module, attribute in locations:
        module._parameters[attribute] = tensor  # type: ignore[assignment]
        if isinstance(module, nn.RNNBase):  # keeps a list of its own
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def cut(param: nn.Parameter, layout: RowLayout, rank: int, dtype: torch.dtype, mesh: DeviceMesh) -> nn.Parameter:
    """A parameter that holds this rank's rows of `param` in memory of its own; attributes come along.

    Args:
        param: the whole parameter; not changed.
        layout: how to cut it.
        rank: whose rows to keep.
        dtype: dtype at rest.
        mesh: the ranks.
    """
    rows = layout.rows_of(param.detach(), rank)
    local = rows.to(dtype) if rows.dtype != dtype else rows.clone()
    return wrap(local, layout, mesh, param)


def wrap(local: Tensor, layout: RowLayout, mesh: DeviceMesh, like: nn.Parameter) -> nn.Parameter:
    """A parameter over the rows `local`, with the attributes and `requires_grad` of `like`."""
    new = nn.Parameter(torch_compat.wrap_local(local, layout, mesh), requires_grad=like.requires_grad)
    for key, value in vars(like).items():
        setattr(new, key, value)
    return new
