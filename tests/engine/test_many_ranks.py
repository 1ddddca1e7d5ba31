"""What a step asks of the host must not grow with the number of ranks: counted on one of thousands that are not there.

Torch's "fake" process group stands for the others. What ranks agree upon, each is told by peers that say the same as it does.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

import hf_zero
from hf_zero.comm.agreements import Agreements
from hf_zero.comm.exchange import Work
from hf_zero.comm.groups import process_groups, select
from hf_zero.plan.models import config_of
from tests.ranks import ENVIRONMENT

_STEPS = 3


class _Done:
    """An exchange that is over."""

    def wait(self, *limit: Any) -> bool:
        return True


# However much of a unit is padding, it is gathered as often.
_ALIKE: dict[int, dict[str, Any]] = {1: {}, 2: {}, 3: {"reshard_after_forward": False}}
_DONE: Any = _Done()


class _SamePeers:
    """Peers that send what they are sent."""

    def __init__(self) -> None:
        self._rooms: dict[int, list[Tensor]] = defaultdict(list)
        self.sent: list[int] = []

    def send(self, of: Agreements, description: str, tensor: Tensor, peer: int, tag: int, group: Any = None) -> Work:
        self.sent.append(tensor.nbytes)
        self._rooms[tag].pop(0).copy_(tensor)
        return Work(_DONE, of.ranks[peer])

    def receive(self, of: Agreements, description: str, room: Tensor, peer: int, tag: int, group: Any = None) -> Work:
        self._rooms[tag].append(room)
        return Work(_DONE, of.ranks[peer])


def _count(num_ranks: int, stage: int) -> dict[str, Any]:
    """Calls of Python's functions in a step's forward, backward and update, and the messages of agreements in it."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # makes torch know the group

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=dist.HashStore())
    new_group, peers = process_groups._new_group, _SamePeers()
    found: dict[str, Any] = {}
    with (
        mock.patch.object(Agreements, "_send", lambda self, *args: peers.send(self, *args)),
        mock.patch.object(Agreements, "_receive", lambda self, *args: peers.receive(self, *args)),
        mock.patch.object(process_groups, "_new_group", lambda ranks, timeout, backend=None: new_group(ranks, timeout)),
        mock.patch.object(select, "device_number", lambda device: 0),
    ):
        model = AutoModelForCausalLM.from_config(config_of("llama-thin-16"))
        hf_zero.shard_model(model, {"stage": stage, "collectives": "native"} | _ALIKE[stage])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tokens = torch.arange(4)[None]
        for _ in range(_STEPS):
            peers.sent.clear()
            loss: list[Tensor] = []
            found["forward"] = _calls(lambda: loss.append(model(input_ids=tokens, labels=tokens, use_cache=False).loss))
            found["backward"] = _calls(lambda: loss.pop().backward())
            found["update"] = _calls(optimizer.step)
            optimizer.zero_grad()
    return found | {"messages": peers.sent}


def _calls(work: Callable[[], object]) -> int:
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def _counted(jobs: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """In processes of their own, whose default group is not the pool's."""
    command = [sys.executable, "-m", "tests.engine.test_many_ranks"]
    running = [
        subprocess.Popen([*command, *map(str, job)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) for job in jobs
    ]
    told = [process.communicate(timeout=240)[0] for process in running]
    return [json.loads(text.splitlines()[-1]) for text in told]


@pytest.mark.parametrize(
    ("stage", "num_ranks"),
    [(3, 1024), *(pytest.param(*job, marks=pytest.mark.slow) for job in [(1, 1024), (2, 1024), (3, 64), (3, 10_000)])],
)
def test_a_step_costs_the_host_as_much_on_many_ranks_as_on_few(stage: int, num_ranks: int) -> None:
    few, many = _counted([(8, stage), (num_ranks, stage)])
    assert many["forward"] <= few["forward"] * 1.01 and many["update"] <= few["update"] * 1.01, (few, many)
    assert many["backward"] <= few["backward"] * 1.2, (few, many)
    assert len(many["messages"]) == math.ceil(math.log2(num_ranks))
    assert max(many["messages"]) <= 2048  # some numbers, and a bit for each parameter, three times


if __name__ == "__main__":
    print(json.dumps(_count(*map(int, sys.argv[1:]))))
