"""Random states of ranks that see the same batch: they must be the same, also after a checkpoint of other axes is loaded."""

from __future__ import annotations

import random

import numpy
import torch

from hf_zero.comm.together import share
from hf_zero.engine.ranks.world import World


def share_random_state(world: World) -> None:
    """Give every rank the random state of the first rank of its tensor axis; called by all ranks together.

    Their masks of dropout must be the same. A checkpoint has a state for each rank that wrote it, which may all have been
    different.
    """
    if world.tensor.num_ranks == 1:
        return
    states = [random.getstate(), numpy.random.get_state(), torch.get_rng_state()]
    if world.device.type != "cpu":
        states.append(torch.get_device_module(world.device).get_rng_state())
    found = share(world.tensor, states, "random states")
    random.setstate(found[0])
    numpy.random.set_state(found[1])
    torch.set_rng_state(found[2])
    if len(found) > 3:
        torch.get_device_module(world.device).set_rng_state(found[3])
