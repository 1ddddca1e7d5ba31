"""Scratch files: the same bytes through both ways, no name in the folder, and named errors."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from hf_zero.errors import OffloadError
from hf_zero.host import scratch
from hf_zero.host.scratch import ALIGNMENT, Scratch, StepMemory, Transfers, make_places

FOLDER = Path(tempfile.gettempdir())


def _move(way: str, file: Scratch, slot: StepMemory, num_bytes: int) -> None:
    for each in Transfers().start(way, [(file, 0, slot.memory(0, num_bytes))]):
        each.result()


@pytest.mark.parametrize("is_direct", [True, False])
def test_both_ways_to_a_file_see_the_same_bytes(is_direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_direct:
        monkeypatch.delattr(os, "O_DIRECT")  # as on a system, or a file system, that has none
    num_bytes = 3 * 8 * 2**20 + ALIGNMENT  # of several requests
    file, slot = Scratch(FOLDER, num_bytes), StepMemory(num_bytes)
    assert file.is_direct == is_direct
    mapped = file.tensor(0, (num_bytes // 4,), torch.float32)
    staged = slot.tensor(0, (num_bytes // 4,), torch.float32)
    for _ in range(3):
        mapped.normal_()
        _move("read", file, slot, num_bytes)
        assert torch.equal(staged, mapped)
        staged.mul_(2)
        _move("write", file, slot, num_bytes)
        assert torch.equal(staged, mapped)
        file.release(0, num_bytes)
        assert torch.equal(staged, mapped)


def test_tensors_outlive_what_made_them_and_lie_in_blocks() -> None:
    places = make_places(str(FOLDER), [((3, 5), torch.float32), ((0, 4), torch.float32), ((7,), torch.bfloat16)])
    assert [place.offset for place in places] == [0, ALIGNMENT, ALIGNMENT]
    tensors = [place.tensor for place in places]
    del places
    for value, tensor in enumerate(tensors):
        tensor.fill_(value + 1)
    assert [float(tensor.float().sum()) for tensor in tensors] == [15.0, 0.0, 21.0]


def test_no_file_is_left_by_a_killed_process(tmp_path: Path) -> None:
    code = f"import time; from pathlib import Path; from hf_zero.host.scratch import Scratch; file = Scratch(Path({str(tmp_path)!r}), 10**6); print('made', flush=True); time.sleep(60)"  # noqa: E501
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    assert list(tmp_path.iterdir()) == []  # not even while it lives
    process.kill()
    process.wait()
    assert list(tmp_path.iterdir()) == []


def test_bad_folders_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match="file/x' cannot be made"):
        make_places(str(tmp_path / "file" / "x"), [((1,), torch.float32)])
    with pytest.raises(
        OffloadError, match=r"has no room for 4,611,686,018,427,387,904 bytes .* \([\d,]+ are free now\)"
    ):
        Scratch(tmp_path, 2**62)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    monkeypatch.setattr(scratch, "_kind_of_file_system", lambda folder: "tmpfs")
    with pytest.raises(OffloadError, match="is on tmpfs, which is memory"):
        Scratch(tmp_path, 1)
    monkeypatch.undo()

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(OffloadError, match="cannot be written to: Permission denied"):
        Scratch(tmp_path, 1)


def test_file_system_of_a_folder_is_known() -> None:
    assert scratch._kind_of_file_system(Path("/dev/shm")) in ("tmpfs", "")
    assert scratch._kind_of_file_system(Path("/proc")) == "proc"


def test_disk_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    file, slot = Scratch(FOLDER, ALIGNMENT), StepMemory(ALIGNMENT)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OffloadError, match="the disk cannot write offloaded states: Input/output error"):
        _move("write", file, slot, ALIGNMENT)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OffloadError, match="the disk cannot read offloaded states: the file ends at 0"):
        _move("read", file, slot, ALIGNMENT)
