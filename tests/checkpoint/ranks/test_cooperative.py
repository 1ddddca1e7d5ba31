"""Ranks that do not share the folder send their rows to those that write; the files are the same."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.model_state import write_model
from hf_zero.checkpoint.ranks import cooperative
from hf_zero.comm.agreements import Mail
from hf_zero.comm.exchange import Exchange
from hf_zero.engine.engine import engine_of
from tests.checkpoint.files.test_windows import small_windows
from tests.checkpoint.runs import make_trainer
from tests.integrations.trainer.runs import loaded, mixtral, undone
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Sent:
    """What a rank received and did on disk while rows were sent."""

    largest_bytes: int
    received_bytes: int
    messages: int
    changes: int


BUILDS = {"llama": loaded, "mixtral": mixtral}


@undone
def save_sent(folder: str, name: str) -> Sent:
    """Write weights in both ways; in the second one, rank 1 does not see what rank 0 writes."""
    model = make_trainer(folder, f"{folder}/sending", BUILDS[name]).model
    engine = engine_of(model)
    assert engine is not None
    world = engine.world
    write_model(model, Path(folder, f"{name}_shared"), world)
    sizes, changes, receive, is_file = [0], itertools.count(), Mail.receive, Path.is_file

    def watched(mail: Mail, room: Tensor, peer: int) -> Exchange:
        sizes.append(room.nbytes)
        return receive(mail, room, peer)

    def blind(path: Path) -> bool:
        return not path.name.startswith(".hf_zero_") and is_file(path)

    with (
        small_windows(512),
        mock.patch.object(Mail, "receive", watched),
        mock.patch.object(Path, "is_file", blind if dist.get_rank() == 1 else is_file),
        mock.patch.object(disk, "on_change", lambda what, path: next(changes)),
        mock.patch.object(cooperative.logger, "info") as info,
    ):
        write_model(model, Path(folder, f"{name}_sent"), world)
    return Sent(max(sizes), sum(sizes), info.call_count, next(changes))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_files_are_the_same_where_one_rank_writes_and_come_in_windows(name: str, folder: str) -> None:
    first, second = run_ranks(save_sent, 2, folder, name)
    left, right = ({p.name: p.read_bytes() for p in Path(folder, f"{name}_{k}").iterdir()} for k in ("shared", "sent"))
    assert left == right
    assert 256 < first.largest_bytes <= 512 and first.received_bytes > sum(map(len, left.values())) // 3
    assert second.largest_bytes == 0
    assert (first.messages, second.messages, second.changes) == (1, 0, 0)
