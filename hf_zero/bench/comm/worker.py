"""One rank of `hf-zero bench comm`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hf_zero.bench import devices
from hf_zero.bench.comm.measure import measure
from hf_zero.bench.processes import options, report
from hf_zero.comm.groups.select import all_collectives, make_collectives
from hf_zero.comm.ledger import Ledger

_TIMEOUT_S = 120.0


def measure_all(given: dict[str, Any]) -> dict[str, Any]:
    """Join the group that the environment describes, and measure; see `hf_zero.bench.comm.run.run`."""
    device = devices.join()
    ranks, timings = range(dist.get_world_size()), {}
    for collectives in all_collectives(ranks, device, _TIMEOUT_S):
        found = [measure(collectives, size, given["repeats"]) for size in given["sizes"]]
        timings[collectives.name] = [[each.num_bytes, each.gather, each.reduce_scatter] for each in found]
    chosen = make_collectives("auto", ranks, device, _TIMEOUT_S, Ledger())
    is_first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return {"ranks": len(ranks), "chosen": chosen.name, "reason": chosen.reason, "timings": timings} if is_first else {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    report(measure_all(options()))
