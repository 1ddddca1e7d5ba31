"""Steps on all parameters, whole, by every rank: what an optimizer under DDP does, for those that look across parameters.

[Note: every rank] Values and gradients are gathered, each rank runs the same step on all of them, and keeps its rows of what
comes of it. States are whole on every rank, so this saves what the model needs, and nothing of the optimizer. Where the
optimizer keeps the model, the model's modules hold what is stepped on during a step: what it reads there is what it changes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from hf_zero import torch_compat
from hf_zero.engine.ranks.world import World
from hf_zero.optim.by_owners import OwnedStep, OwnerStepping
from hf_zero.optim.kinds import kept_models, wrapped_optimizers
from hf_zero.optim.owners import Owners
from hf_zero.optim.served import states_of_owners
from hf_zero.optim.stepping import Arguments, StepCall, params_of


class EveryRank(Owners):
    """Every rank steps on all parameters; their owners write checkpoints."""

    def steps_on(self, param: Tensor) -> bool:
        """All of them."""
        return True

    def collect(self, tensors: Sequence[tuple[DTensor, DTensor]], what: str) -> list[Tensor | None]:
        """The whole tensors, on every rank; as `Owners.collect`."""
        return [
            self.world.gather_parameter(torch_compat.local_of(tensor).detach(), self.world.cut_of(param), what)
            for param, tensor in tensors
        ]

    def distribute(
        self, tensors: Sequence[tuple[DTensor, Tensor | None]], what: str, of_gradients: bool = False
    ) -> None:
        """Let every rank keep its rows; as `Owners.distribute`."""
        for param, whole in tensors:
            written = param.grad if of_gradients else param
            assert whole is not None and written is not None
            rows = torch_compat.local_of(written)
            rows.copy_(self.world.layout_of(param).rows_of(whole.detach(), self.world.shard_rank))


class EveryRankStep(OwnedStep):
    """One step under way, of which every rank computes all."""

    def _prepare(self, stepping: OwnerStepping) -> None:
        # Of the optimizer's models, and what they hold between steps.
        self._places: list[tuple[dict[str, Any], str, Any]] = []
        self._handle: Any = None
        super()._prepare(stepping)

    def _take(self) -> None:
        super()._take()
        each = (self._call.optimizer, *wrapped_optimizers(self._call.optimizer))
        held = [part._parameters for one in each for model in kept_models(one) for part in model.modules()]
        self._places = [(own, name, p) for own in held for name, p in own.items() if id(p) in self._plain]
        for own, name, param in self._places:
            own[name] = self._plain[id(param)]
        if self._places:  # a step that raises does not come back here
            self._handle = register_module_forward_pre_hook(lambda *_: self.leave_models())

    def _give(self) -> None:
        self.leave_models()
        super()._give()

    def leave_models(self) -> None:
        """Let modules hold what they held before."""
        for own, name, param in self._places:
            own[name] = param
        self._places = []
        if self._handle is not None:
            self._handle.remove()


class EveryRankStepping(OwnerStepping):
    """Steps on whole parameters, all of them on every rank; see [Note: every rank]."""

    owners_class = EveryRank
    step_class = EveryRankStep

    def abandon(self) -> None:
        """See `Stepping.abandon`."""
        if self._under_way is not None:
            self._under_way.leave_models()
        super().abandon()

    def begin(self, call: StepCall) -> Arguments:
        """See `Stepping.begin`."""
        self._fill_in(call.optimizer, call.worlds)
        return super().begin(call)

    def _fill_in(self, optimizer: torch.optim.Optimizer, worlds: Mapping[int, World]) -> None:
        """Let every rank have the states that owners have read from a checkpoint."""
        params = params_of(optimizer)
        known = zlib.crc32(str([number for number, param in enumerate(params) if param in optimizer.state]).encode())
        for world in dict.fromkeys(worlds.values()):
            found = world.everyone.combine([known], "states of an optimizer")
            if found.lowest == found.highest:
                continue
            for number, state in states_of_owners(optimizer, self.owned_now(optimizer)).items():
                to_device = partial(_on_device_of, params[number])
                known_states = optimizer.state.setdefault(params[number], {})
                known_states.update(pytree.tree_map_only(Tensor, to_device, state))


def _on_device_of(param: Tensor, value: Tensor) -> Tensor:
    return value.to(param.device) if value.ndim else value  # torch counts steps on the host
