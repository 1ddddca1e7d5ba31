"""Expert parallelism for models of transformers: their experts' forwards send tokens to the ranks that compute them.

Experts are found by the mark of transformers' own `use_experts_implementation`, which all models with a plan for expert
parallelism have: weights are of all experts, [experts, ...], and a forward is given tokens, their experts and their weights.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.engine.engine import live_engines
from hf_zero.engine.modules.experts import Dispatch
from hf_zero.engine.parameters.experts import Routes, mark_experts, so_many_experts
from hf_zero.engine.ranks.world import World
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.parameters import parameters_of
from hf_zero.sharding.axes.shared_experts import SharedExperts

_MARK_OF_TRANSFORMERS = "_is_expert_parallel"


def share_experts(model: nn.Module, world: World) -> None:
    """Let each rank compute some experts of a model, if there is an expert axis; a second call changes nothing.

    Called before weights are cut; and, for those that the tensor axis divides first, once it has.

    Raises:
        PartitionError: the model has no experts that transformers marks, or an adapter changes their weights.
        ConfigError: their number does not divide.
    """
    for name, module in check_experts(model, world).items():
        known = vars(module).get("forward")
        shared = known if isinstance(known, SharedExperts) else None
        if shared is None and world.tensor.num_ranks > 1:
            continue
        routed = known if shared is None else shared.routed
        if not isinstance(routed, RoutedForward) or not routed.is_of(module, world):
            routes = Routes(int(module.num_experts), world.experts.num_ranks, world.num_shards)  # type: ignore[arg-type]
            routed = RoutedForward(module, name, routes, world)
            mark_experts(module)
            if shared is None:
                vars(module)["forward"] = routed
            else:
                shared.routed = routed


def check_experts(model: nn.Module, world: World) -> dict[str, nn.Module]:
    """The experts of a model, by name, if there is an expert axis; see `share_experts` for what it raises."""
    if world.experts.num_ranks == 1:
        return {}
    return find_experts(model, world.config.ep_size, world.num_shards, world.tensor.num_ranks)


def find_experts(model: nn.Module, ranks: int, shards: int, places: int = 1) -> dict[str, nn.Module]:
    """The experts of a model, by name, if several ranks divide them; see `share_experts` for what it raises.

    Args:
        model: with values, or on the meta device.
        ranks: that compute all experts together (`ep_size`).
        shards: that parameters are cut over.
        places: of the tensor axis, which divide experts first.
    """
    if ranks == 1:
        return {}
    found = {name: module for name, module in model.named_modules() if _MARK_OF_TRANSFORMERS in vars(module)}
    if not found:
        raise PartitionError(
            f"ep_size is {ranks}, but {type(model).__name__} has no experts as transformers 5.23 marks them "
            "(`use_experts_implementation`): leave ep_size out"
        )
    for name, module in found.items():
        _check(name, module, ranks, shards, places)
    for name, module in model.named_modules():
        base = vars(module).get("_modules", {}).get("base_layer")
        if base is not None and any(base is each for each in found.values()):
            raise PartitionError(
                f"ep_size: {name!r} is an adapter on the weights of experts, which each rank would need all of: leave the "
                "experts out of the adapter, or leave ep_size out"
            )
    return found


def _check(name: str, module: nn.Module, ranks: int, shards: int, places: int) -> None:
    count = getattr(module, "num_experts", None)
    if isinstance(count, int) and isinstance(vars(module).get("forward"), SharedExperts):
        count *= places  # it knows of those of one place
    shapes = {key: tuple(param.shape) for key, param in module.named_parameters()}
    if not isinstance(count, int) or any(not shape or shape[0] != count for shape in shapes.values()):
        raise PartitionError(
            f"ep_size is {ranks}, but the weights of {name!r} are not of {count} experts each: {shapes}; leave ep_size out"
        )
    if not all(param.is_floating_point() for param in parameters_of(module)):
        raise PartitionError(f"ep_size is {ranks}, but {name!r} is quantised: leave ep_size out")
    shards *= places
    if count % shards:
        fitting = [each for each in range(ranks, count + 1, ranks) if count % each == 0]
        instead = f"{' or '.join(map(str, fitting))} of them" if fitting else "another ep_size and other ranks"
        raise ConfigError(
            f"ep_size is {ranks}, but {name!r} has {count} experts, which the {shards} ranks that shard parameters do not "
            f"divide: use {instead} (`replicate: R` shards parameters over 1/R of the ranks)"
        )


class RoutedForward:
    """The forward of a module of experts, of which each rank computes some.

    Args:
        module: whose. Weak: the module holds this.
        name: of the module.
        routes: which rank computes which expert.
        world: the ranks.
    """

    def __init__(self, module: nn.Module, name: str, routes: Routes, world: World) -> None:
        self._module, self._world = weakref.ref(module), world
        self._dispatch = Dispatch(name, routes, world, self._before_wait)

    def is_of(self, module: nn.Module, world: World) -> bool:
        """Whether this was made for a module and these ranks."""
        return self._module() is module and self._world is world

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        """Run the experts on this rank's tokens, wherever they are; or as ever, where the weights of all are here."""
        module = self._module()
        assert module is not None
        forward = type(module).forward
        routes = self._dispatch.routes
        if next(parameters_of(module)).shape[0] == routes.num_experts:
            return forward(module, hidden_states, top_k_index, top_k_weights)
        return self.dispatched(hidden_states, top_k_index, top_k_weights)

    def dispatched(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts on this rank's tokens, wherever they are."""
        module = self._module()
        assert module is not None
        forward = type(module).forward
        with so_many_experts(module, self._dispatch.routes.num_local):
            return self._dispatch(hidden_states, top_k_index, top_k_weights, lambda *given: forward(module, *given))

    def _before_wait(self) -> None:
        module = self._module()
        for engine in live_engines():
            if module is not None and engine.world is self._world:
                engine.gathering.tell_of_wait()

    def __deepcopy__(self, memo: dict[int, Any]) -> RoutedForward:
        module = memo.get(id(self._module()))
        return (
            self if module is None else RoutedForward(module, self._dispatch.name, self._dispatch.routes, self._world)
        )
