"""Among which ranks one unit's parameters are gathered, and its gradients added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_zero.comm.collectives import Collectives, RowCollectives
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.ranks.world import World


@dataclass(frozen=True)
class UnitAxes:
    """Exchanges for one unit.

    Attributes:
        shards: among the ranks that what modules compute with is cut over.
        wired: the same, in the wire formats asked for.
        whole: among those that have different gradients of what is whole on each of them.
    """

    shards: Collectives
    wired: RowCollectives
    whole: Collectives

    @classmethod
    def of(cls, parameters: Sequence[ZeroParameter], world: World) -> UnitAxes:
        """Those of a unit's parameters, which are all of experts, or none: see [Note: experts]."""
        if any(p.computed.is_part for p in parameters):
            return cls(world.same_experts, world.same_experts, world.replicas)
        return cls(world.shards, world.wired, world.data)
