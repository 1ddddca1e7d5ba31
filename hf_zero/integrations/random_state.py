"""Random states of ranks that see the same batch: they must be the same, also after a checkpoint of other axes is loaded."""

from __future__ import annotations

import random

import numpy
import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.comm.together import share
from hf_zero.engine.ranks.world import World


def share_random_state(world: World) -> None:
    """Give every rank the random state of the first that sees the same batch; called by all ranks together.

    Of ranks that share layers, masks of dropout must be the same. A checkpoint has a state for each rank that wrote it, which
    may all have been different.
    """
    for axis in (world.tensor, world.sequence):
        if axis.num_ranks > 1:
            _share(axis, world.device)


def _share(axis: Collectives, device: torch.device) -> None:
    states = [random.getstate(), numpy.random.get_state(), torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    found = share(axis, states, "random states")
    random.setstate(found[0])
    numpy.random.set_state(found[1])
    torch.set_rng_state(found[2])
    if len(found) > 3:
        torch.get_device_module(device).set_rng_state(found[3])
