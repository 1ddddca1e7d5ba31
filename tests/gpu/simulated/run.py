"""A case of the GPU's on a rank of the simulated device: `python -m tests.gpu.simulated.run NAME [FOLDER]`."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

import accelerate.state
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.gpu.simulated.device import register
from tests.gpu.simulated.exchanges import Exchanges


def _make_up_for_torch() -> None:
    """Torch refuses `tensor.data = ` across the CPU and such a device, not across the CPU and a GPU."""

    def move_to(model: nn.Module, device: torch.device) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device != device and not tensor.is_meta and not isinstance(tensor, DTensor):
                new = tensor.detach().to(device)
                is_parameter = isinstance(tensor, nn.Parameter)
                torch.utils.swap_tensors(tensor, nn.Parameter(new, tensor.requires_grad) if is_parameter else new)

    torch.__future__.set_swap_module_params_on_conversion(True)  # for `module.to`
    importlib.import_module("hf_zero.sharding.late").move_to = move_to  # type: ignore[attr-defined]


def _tell_accelerate(device: torch.device) -> None:
    make = accelerate.state.PartialState.__init__

    def make_on_device(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.device = device

    accelerate.state.PartialState.__init__ = make_on_device


def main() -> None:
    """Run the case that the command line names."""
    os.environ.pop("ACCELERATE_USE_CPU", None)
    built = register()
    device = torch.device("sim", 0)
    dist.init_process_group("cpu:gloo,sim:fake")
    Exchanges(built.host_of)
    _make_up_for_torch()
    _tell_accelerate(device)
    from tests.gpu import cases

    found = cases.CASES_OF_TWO[sys.argv[1]](device, *sys.argv[2:])
    print(f"{sys.argv[1]}: right. {found}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # torch does not take such a device down in order
