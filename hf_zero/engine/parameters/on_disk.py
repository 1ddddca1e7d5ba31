"""Rows of parameters that live on a disk at rest, and what these ranks can offload at all."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from hf_zero.engine.parameters.on_host import check_host, offload_to_host
from hf_zero.engine.parameters.quantised import is_quantised
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.ranks.world import World
from hf_zero.errors import ConfigError, OffloadError
from hf_zero.host.scratch import make_places

logger = logging.getLogger(__name__)


def check_offload(world: World) -> None:
    """Raise for what these ranks cannot offload, and say what needs no offloading.

    Raises:
        ConfigError: on all ranks.
    """
    offload = world.config.offload
    if world.device.type != "cpu":
        if "disk" in (offload.optimizer, offload.parameters):
            raise ConfigError(
                f"offload: a disk works on CPU ranks only until now, but this model is on {world.device}: use host, or none"
            )
        if offload.goes_to_host:
            check_host(world)
        return
    if offload.parameters == "disk" and not world.partitions:
        raise ConfigError(
            "offload.parameters is disk, but there is one rank, which computes with the parameters where they lie: use none, "
            "or more ranks"
        )
    if offload.parameters == "disk" and world.shards.name == "host":
        raise ConfigError(
            "offload.parameters is disk, but ranks share parameters in memory (HF_ZERO_COLLECTIVES=host): use pairwise"
        )
    for what in ("optimizer", "parameters"):
        if getattr(offload, what) == "host" and world.rank == 0:
            _say_once(
                f"offload.{what}: these ranks compute on the CPU, so all is in host memory already: nothing changes"
            )


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)


def offload_parameters(parameters: Sequence[ZeroParameter], world: World) -> None:
    """Move rows at rest to the disk, or make rooms for those in host memory; called by all ranks together.

    Raises:
        OffloadError: a rank has no room for them; on all ranks.
    """
    offload = world.config.offload
    offload_to_host(parameters, world)
    if offload.parameters != "disk":
        return
    with world.together("offloading parameters", OffloadError):
        moved = [p for p in parameters if p.is_sharded and p.on_disk is None and not is_quantised(p.param)]
        if moved:
            assert offload.path is not None
            places = make_places(offload.path, [(p.local_shape, p.param.dtype) for p in moved])
            for p, place in zip(moved, places, strict=True):
                p.move_to(place)
