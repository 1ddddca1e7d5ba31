"""Cases of the GPU's on a rank of the late device: `python -m tests.gpu.late.run NAME[,NAME...] ORDER[,ORDER...] [FOLDER]`.

A name is that of a case, or of a mistake that has to be seen. ORDER says which of the orders that CUDA permits is taken, "late"
or "early": see streams.h. Of several, all names are run in the first, and then in the next, but for mistakes that were seen.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import os
import sys
import time
import traceback
from typing import Any

import accelerate.state
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.gpu.late.device import register


def make_up_for_torch() -> None:
    """Torch refuses `tensor.data = ` across the CPU and such a device, not across the CPU and a GPU."""

    def put_on(tensor: Tensor, device: torch.device) -> None:
        if tensor.device != device:
            new = tensor.detach().to(device)
            is_parameter = isinstance(tensor, nn.Parameter)
            torch.utils.swap_tensors(tensor, nn.Parameter(new, tensor.requires_grad) if is_parameter else new)

    torch.__future__.set_swap_module_params_on_conversion(True)  # for `module.to`
    importlib.import_module("hf_zero.sharding.axes.cutting").put_on = put_on  # type: ignore[attr-defined]


def tell_accelerate(device: torch.device) -> None:
    """Accelerate knows no such device, and this one is that of the process."""
    make = accelerate.state.PartialState.__init__

    def make_on_device(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.device = device

    accelerate.state.PartialState.__init__ = make_on_device


def main(names: str, orders: str, *folder: str) -> None:
    """Run cases on this rank, and say of each that it is right, or of a mistake whether it is seen."""
    os.environ.pop("ACCELERATE_USE_CPU", None)
    built = register()
    device = torch.device("sim", int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)
    # Half of the programs bind their group to the device, off which torch then splits others. (Not for meshes of several
    # axes, which are made by `split_group`.)
    is_bound = orders.startswith("early") and "tensor_axis" not in names
    dist.init_process_group("cpu:gloo,sim:late", device_id=device if is_bound else None)
    make_up_for_torch()
    tell_accelerate(device)
    from hf_zero.optim.offloaded import to_host
    from tests.gpu import cases, mistakes

    to_host._CHUNK_BYTES = 1  # tiny models, too, are stepped on unit by unit

    were_seen = set[str]()
    for order, name in itertools.product(orders.split(","), names.split(",")):
        if name in were_seen:
            continue
        built.run_early(order == "early")
        began = time.monotonic()
        if name in mistakes.MISTAKES:
            mistake = mistakes.MISTAKES[name]
            is_due = order in mistake.seen_in
            found = ("seen" if mistakes.is_seen(mistake, device, built) else "NOT SEEN") if is_due else ""
            were_seen |= {name} if found == "seen" else set()
        else:
            found = f"right. {cases.CASES[name](device, *(folder if name in cases.NEED_A_FOLDER else ()))}"
        built.synchronize()  # what nobody has waited for: the groups of a model that is gone are closed
        print(f"{name}, {order}: {found} ({time.monotonic() - began:.1f} s)", flush=True)
    dist.barrier()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(os.environ.get("STACKS_AFTER_S", "280")))  # of a rank that hangs
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # torch does not take such a device down in order
