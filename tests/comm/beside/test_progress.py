"""How far a process is in what it does together with others."""

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # a backend that does not count

from hf_zero.comm.groups import torch_groups
from tests.ranks import on_ranks


@on_ranks(2, backend=["gloo", "cpu:gloo,cuda:fake"])
def test_exchanges_of_a_group_are_counted_whatever_serves_its_devices(backend: str) -> None:
    group = dist.new_group(backend=backend)
    before = torch_groups.sequence_number(group)
    dist.all_reduce(torch.ones(1), group=group)
    assert torch_groups.sequence_number(group) > before
