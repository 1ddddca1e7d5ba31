"""Where the program waits in torch's own calls that exchange something."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from hf_zero.comm.groups import torch_groups
from hf_zero.comm.groups.process_groups import default_group

_TORCH = Path(str(dist.distributed_c10d.__file__))
_OF_ALL = (
    *("barrier", "monitored_barrier", "all_reduce", "all_reduce_coalesced"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_coalesced"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
)
_OF_SOURCE = ("broadcast", "scatter")  # end when their source has come
_OF_TWO = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


@dataclass(frozen=True)
class TorchWaits:
    """A call of torch's in which the program is.

    Attributes:
        name: of the function.
        group: the name of the group whose ranks exchange something.
        number: how many exchanges this process has begun in it, with this one.
        source: rank in the program of the one that gives what the others wait for; None: there is no such one.
    """

    name: str
    group: str
    number: int
    source: int | None = None

    def needs(self, rank: int) -> bool:
        """Whether it ends only when this rank of the group has come."""
        return self.name in _OF_ALL or (self.name in _OF_SOURCE and rank == self.source)

    def receives_from(self, rank: int) -> bool:
        """Whether it ends only when this rank has sent a message."""
        return self.name == "recv" and rank == self.source

    @property
    def is_between_two(self) -> bool:
        """Whether it is a message of one rank to another, which may come late, while the others go on."""
        return self.name in _OF_TWO


def torch_waits() -> TorchWaits | None:
    """The call of torch's in which the program is, as other threads see it; None in groups that the program has not made."""
    frame, default = sys._current_frames().get(threading.main_thread().ident or 0), default_group()
    if frame is None or default is None or Path(frame.f_code.co_filename) != _TORCH:
        return None
    called, known = frame.f_code.co_name, dict(frame.f_locals)
    given, source, place = known.get("group"), known.get("src"), known.get("group_src")
    for name, group in torch_groups.groups_of_program().items():
        if group is given or (given is None and group is default):
            if source is None and place is not None:
                source = dist.get_global_rank(group, place)
            return TorchWaits(called, name, torch_groups.sequence_number(group), source)
    return None
