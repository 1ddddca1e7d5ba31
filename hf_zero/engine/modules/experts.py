"""Tokens go to the ranks that compute their experts, and what these make of them comes back: see [Note: experts].

[Note: routes] Each pair of a token and an expert is a row. Rows are sorted by the rank that computes the expert, and then by
the expert's place there, so that counts alone tell a rank which of its experts a row that comes is for. Experts run on single
rows with a weight of one; the router's weights are applied where a row came from, so their gradient stays there.

A rank that gets no row computes one of zeros and drops it: its graph then has what that of the others has, and takes part in
the exchanges of their backward.

Source: GShard (arXiv:2006.16668); transformers' `AllToAllEP`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.engine.parameters.experts import Routes
from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


class Dispatch:
    """Runs the experts of one module, each on the rank that computes it.

    Args:
        name: of the module; for the ledger and for errors.
        routes: which rank computes which expert.
        world: the ranks.
        before_wait: called when all of them are about to wait for each other, see [Note: one order of waits].
    """

    def __init__(self, name: str, routes: Routes, world: World, before_wait: Callable[[], None]) -> None:
        self.name, self.routes, self._over, self._before_wait = name, routes, world.experts, before_wait

    def __call__(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        """The experts' weighted sum for each token of this rank.

        Args:
            hidden: [tokens, width].
            expert_ids: [tokens, k], of all experts.
            weights: [tokens, k], of the router.
            experts: of rows [rows, width], places of experts on this rank [rows, 1] and weights [rows, 1].

        Returns:
            [tokens, width], in the dtype of `hidden`.
        """
        places = self.routes.places(expert_ids.reshape(-1))
        order = torch.argsort(places, stable=True)
        sent, came = self._counts(places)
        given, taken = sent.sum(1).tolist(), came.sum(1).tolist()
        rows = self._move(hidden[order // expert_ids.shape[-1]], given, taken)
        made = self._computed(rows, self._local(came, len(rows), hidden.device), experts).to(hidden.dtype)
        back = self._move(made, taken, given)
        by_token = torch.empty_like(back).index_copy(0, order, back).view(*expert_ids.shape, -1)
        return (by_token * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _counts(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """How many rows go to each expert of each rank, and come from each rank for each expert: [ranks, experts of one]."""
        ranks, num_experts = self._over.num_ranks, self.routes.num_experts
        counted = places.new_zeros(num_experts + 1).scatter_add_(0, places, torch.ones_like(places))
        sent = counted[:num_experts].view(ranks, -1)
        came = torch.empty_like(sent)
        came[self._over.rank] = sent[self._over.rank]
        moving = self._over.all_to_all([[each] for each in sent], [[each] for each in came], "all_to_all", self.name)
        self._before_wait()
        moving.wait()
        found = torch.cat([counted, came.view(-1)]).cpu()  # the one time that the host waits for a device
        if found[num_experts]:
            raise UsageError(
                f"ep_size: the router of {self.name!r} has chosen an expert that is none of its {num_experts}: leave ep_size "
                "out for this model"
            )
        return found[:num_experts].view(ranks, -1), found[num_experts + 1 :].view(ranks, -1)

    def _local(self, came: Tensor, num_rows: int, device: torch.device) -> Tensor:
        """For which of this rank's experts each row is that has come."""
        of_counts = torch.arange(self.routes.num_local, device=device).repeat(self._over.num_ranks)
        return of_counts.repeat_interleave(came.reshape(-1).to(device), output_size=num_rows)

    def _move(self, rows: Tensor, sent: list[int], came: list[int]) -> Tensor:
        moved = _Move.apply(rows, self, sent, came)  # type: ignore[no-untyped-call, unused-ignore]
        assert isinstance(moved, Tensor)
        return moved

    @staticmethod
    def _computed(rows: Tensor, local: Tensor, experts: Experts) -> Tensor:
        """What experts make of rows; see [Note: routes]."""
        if len(rows):
            return experts(rows, local.unsqueeze(-1), rows.new_ones(len(rows), 1))
        zeros = rows.sum(0, keepdim=True)
        return experts(zeros, local.new_zeros(1, 1), rows.new_ones(1, 1))[:0]

    def exchange(self, rows: Tensor, sent: Sequence[int], came: Sequence[int]) -> Tensor:
        """Send each rank its rows, in its order, and get those of each.

        Args:
            rows: [sum of sent, width].
            sent: rows by rank.
            came: rows by rank.

        Returns:
            [sum of came, width].
        """
        rows = rows.contiguous()
        found = rows.new_empty(sum(came), rows.shape[-1])
        outgoing, incoming = torch.split(rows, list(sent)), torch.split(found, list(came))
        incoming[self._over.rank].copy_(outgoing[self._over.rank])
        flat = [[[each.view(-1)] for each in parts] for parts in (outgoing, incoming)]
        moving = self._over.all_to_all(flat[0], flat[1], "all_to_all", self.name)
        self._before_wait()
        moving.wait()
        return found


class _Move(torch.autograd.Function):
    """See `Dispatch.exchange`; its backward sends gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: Dispatch, sent: list[int], came: list[int]) -> Tensor:
        ctx.dispatch, ctx.sent, ctx.came = dispatch, sent, came
        return dispatch.exchange(rows, sent, came)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return ctx.dispatch.exchange(gradients[0], ctx.came, ctx.sent), None, None, None
