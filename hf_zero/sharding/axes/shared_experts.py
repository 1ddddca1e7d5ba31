"""Experts divided over the ranks of the tensor axis, by transformers' plan for them: `ep_size` beside `tp_size`.

[Note: shared experts] These ranks see the same tokens, so none travel. Each has some experts, which is a cut of their weights
on the first dim as any other cut of the tensor axis. It runs them on the rows that the router has chosen them for, and outputs
are added up over the ranks, as are the gradients of tokens and of the router's weights.

A rank whose experts are chosen for nothing computes one row and drops it: its graph then has what that of the others has, and
takes part in their sums. transformers' own `AllReduceEP` sends all rows through the experts of each rank, and hangs there.

With a larger `ep_size`, the experts of one place of the axis are divided once more, over ranks that see other batches, and the
rows that are for them travel there: see [Note: experts].
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from hf_zero.engine.parameters.experts import so_many_experts
from hf_zero.parameters import parameters_of


class _Routed(Protocol):
    """What runs experts that ranks with other batches divide."""

    def dispatched(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor: ...


class SharedExperts:
    """The forward of a module of experts, of which each rank of the tensor axis has some; see [Note: shared experts].

    Args:
        module: whose. Weak: the module holds this.
        style: transformers' own, which lets the module see parts of weights.
        mesh: the tensor axis.

    Attributes:
        routed: what runs this place's experts, if more ranks divide them.
    """

    def __init__(self, module: nn.Module, style: Any, mesh: Any) -> None:
        self._module, self._style, self._mesh = weakref.ref(module), style, mesh
        self.routed: _Routed | None = None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The experts' weighted sum for each token; or as ever, where the weights of all are here.

        Args:
            hidden_states: [tokens, width].
            top_k_index: [tokens, k], of all experts.
            top_k_weights: [tokens, k].
        """
        module = self._module()
        assert module is not None
        params = list(parameters_of(module))
        if not any(isinstance(param, DTensor) for param in params):  # inside `GatheredParameters`
            with so_many_experts(module, params[0].shape[0]):
                return cast(Tensor, type(module).forward(module, hidden_states, top_k_index, top_k_weights))
        hidden, weights = (self._adds_gradients(each) for each in (hidden_states, top_k_weights))
        with self._style.context_around_forward(module, self._mesh):
            own = self._of_own_experts(module, hidden, top_k_index, weights)
        return self._added_up(own).to(hidden_states.dtype)

    def _of_own_experts(self, module: nn.Module, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """The part of the sum that is of this rank's experts."""
        count, top_k = cast(int, module.num_experts), expert_ids.shape[-1]
        chosen = expert_ids.reshape(-1)
        routes = (chosen // count == self._mesh.get_local_rank()).nonzero().squeeze(-1)
        num_routes = len(routes)
        used = routes if num_routes else routes.new_zeros(1)
        rows, local, scale = hidden[used // top_k], chosen[used] % count, weights.reshape(-1)[used]
        given = (rows, local.unsqueeze(-1), scale.unsqueeze(-1))
        made = (
            cast(Tensor, type(module).forward(module, *given))
            if self.routed is None
            else self.routed.dispatched(*given)
        )
        by_route = made.new_zeros(len(chosen), made.shape[-1]).index_copy(0, routes, made[:num_routes])
        return by_route.view(len(hidden), top_k, -1).sum(1)

    def _adds_gradients(self, shared: Tensor) -> Tensor:
        """The same values, whose gradient is the sum of those of the ranks."""
        same = DTensor.from_local(shared, self._mesh, [Replicate()], run_check=False)
        return same.to_local(grad_placements=[Partial()])

    def _added_up(self, part: Tensor) -> Tensor:
        """The sum over the ranks, each of which has its whole gradient."""
        parts = DTensor.from_local(part, self._mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self._module()))
        return self if module is None else SharedExperts(module, self._style, self._mesh)


@contextmanager
def with_experts_of_our_own() -> Iterator[None]:
    """Within: transformers gives modules of experts a `SharedExperts`."""
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

    def install(style: Any, module: nn.Module, ep_mesh: Any, **_: Any) -> Any:
        module.forward = SharedExperts(module, style, ep_mesh)
        return module

    original = EpDispatchExpertsParallel.install_forward
    EpDispatchExpertsParallel.install_forward = install
    try:
        yield
    finally:
        EpDispatchExpertsParallel.install_forward = original
