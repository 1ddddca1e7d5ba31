"""Damaged files are named on all ranks before a parameter is touched."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_zero.checkpoint.commit import latest, verify
from hf_zero.checkpoint.files.manifest import MANIFEST, Manifest, damages, extents_of, read_manifest, record_of
from hf_zero.checkpoint.model_state import read_model
from hf_zero.checkpoint.optimizer_state import LoadedState, read_state
from hf_zero.engine.engine import engine_of
from hf_zero.errors import CheckpointError
from hf_zero.integrations.trainer.checkpoint import step_of
from hf_zero.torch_compat import local_of
from tests.checkpoint.runs import make_trainer
from tests.integrations.trainer.runs import undone
from tests.ranks import by_hand, run_ranks


@undone
def train_for_checkpoints(folder: str) -> None:
    """Checkpoints of steps 2 and 4, with an index of several files of weights, some of which are of one size."""
    trainer = make_trainer(folder, f"{folder}/run", max_steps=4)
    trainer.model.save_pretrained = functools.partial(trainer.model.save_pretrained, max_shard_size="3KB")
    trainer.train()


@pytest.fixture(scope="module")
def checkpoint(folder: str) -> Path:
    run_ranks(train_for_checkpoints, 2, folder)
    return Path(folder, "run", "checkpoint-4")


def damage_of(path: Path) -> list[str]:
    try:
        return damages(path, read_manifest(path))
    except CheckpointError as error:
        return [str(error)]


def test_each_of_250_flipped_bits_is_detected_and_its_file_named(checkpoint: Path, tmp_path: Path) -> None:
    path, rng = shutil.copytree(checkpoint, tmp_path / "copy"), random.Random(0)
    files = sorted(path.iterdir())
    sizes = [file.stat().st_size for file in files]
    by_size = rng.choices(range(len(files)), sizes, k=125)
    detected = 0
    for which in (*by_size, *(number % len(files) for number in range(125))):
        with files[which].open("r+b", buffering=0) as file:
            at, bit = rng.randrange(sizes[which]), 1 << rng.randrange(8)
            (byte,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte ^ bit]), at)
            os.utime(file.fileno(), ns=(0, 0))  # nobody has edited it
            (found,) = damage_of(path)
            detected += files[which].name in found
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert detected == 250
    assert damage_of(path) == []


def test_manifest_is_read_as_it_was_written_whatever_its_keys(tmp_path: Path) -> None:
    config = {10: 1, 2: {"b": Path("x"), "a": [1.5, None]}}
    (tmp_path / MANIFEST).write_text(Manifest(step=1, world_size=1, stage=3, config=config).to_json())
    assert read_manifest(tmp_path).config == {"10": 1, "2": {"b": "x", "a": [1.5, None]}}


def test_manifest_with_other_spaces_or_order_is_damaged(checkpoint: Path, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "copy")
    content = json.loads((path / MANIFEST).read_text())
    reordered = dict(reversed(content.items()))
    for text in (
        json.dumps(content) + "\n",
        json.dumps(content, indent=1),
        json.dumps(reordered, separators=(",", ":")),
    ):
        (path / MANIFEST).write_text(text)
        (found,) = damage_of(path)
        assert MANIFEST in found and "digest" in found


@dataclass(frozen=True)
class Damage:
    """Something that happens to a checkpoint.

    Attributes:
        what: is done, see `damage`.
        name: of the file.
        is_sealed: the manifest is made to fit, as somebody would who means harm.
    """

    what: str
    name: str
    is_sealed: bool = False


INDEX = "model.safetensors.index.json"
CONTENTS = {
    "leaves upwards": b'{"weight_map": {"x": "../x.safetensors"}}',
    "leaves to the root": b'{"weight_map": {"x": "/x.safetensors"}}',
    "leaves downwards": b'{"weight_map": {"x": "a/x.safetensors"}}',
    "list": b"[]",
    "number": b"1",
    "nothing in it": b"{}",
    "other kinds": b'{"weight_map": 1, "optimizer": "AdamW", "groups": 1, "numbers": 1}',
    "deeply nested": b"[" * 100_000,
    "header of a list": (2).to_bytes(8, "little") + b"[]",
    "header of other kinds": (7).to_bytes(8, "little") + b'{"x":1}',
    "header of a negative shape": b"",  # made below
}
_HEADER = b'{"x":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}'
CONTENTS["header of a negative shape"] = len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(4)


def damage(path: Path, damage: Damage) -> None:
    file, other, manifest = path / damage.name, path.parent / "aside", read_manifest(path)
    if damage.what == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif damage.what == "emptied":
        os.truncate(file, 0)
    elif damage.what == "deleted":
        file.unlink()
    elif damage.what == "longer":
        os.truncate(file, file.stat().st_size + 1)
    elif damage.what == "swapped":
        twin = twin_of(file)
        file.rename(other)
        twin.rename(file)
        other.rename(twin)
    elif damage.what == "of another step":
        shutil.copy(path.parent / "run" / "checkpoint-2" / damage.name, file)
    elif damage.what == "foreign":
        file.write_text("x")
    elif damage.what == "link":
        file.rename(other)
        file.symlink_to(other)
    elif damage.what == "folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(CONTENTS[damage.what])
    for each in path.iterdir():
        os.utime(each, ns=(0, 0))  # by no program's leave
    if damage.is_sealed:
        files = {each.name: record_of(each, extents_of(each)) for each in path.iterdir() if each.name != MANIFEST}
        (path / MANIFEST).write_text(replace(manifest, files=files).to_json())


def twin_of(file: Path) -> Path:
    """Another file of the same size and other content."""
    alike = [other for other in sorted(file.parent.iterdir()) if other.stat().st_size == file.stat().st_size]
    return next(other for other in alike if other.read_bytes() != file.read_bytes())


def all_damages(checkpoint: Path) -> list[Damage]:
    names = sorted(os.listdir(checkpoint))
    weights = sorted(checkpoint.glob("model*.safetensors"), key=lambda path: path.stat().st_size)
    sizes = [path.stat().st_size for path in weights]
    twin = next(path.name for path in weights if sizes.count(path.stat().st_size) > 1)
    kinds = ("cut", "emptied", "deleted", "longer", "link", "folder")
    everyday = [Damage(kinds[(number + turn) % 6], name) for number, name in enumerate(names) for turn in (0, 3)]
    found = [*everyday, *by_hand(*(Damage(what, name) for name in names for what in kinds))]
    found += [Damage("swapped", twin), Damage("foreign", "model.safetensors")]
    found += [
        Damage("of another step", name) for name in (twin, "optimizer.safetensors", "trainer_state.json", MANIFEST)
    ]
    found += [Damage(what, name) for name in (INDEX, MANIFEST, "optimizer.json") for what in CONTENTS]
    return found


def sealed_damages(checkpoint: Path) -> dict[str, list[Damage]]:
    """Those that the manifest does not tell, and that what reads a kind of files has to find itself."""
    shard = min(path.name for path in checkpoint.glob("model-*.safetensors"))
    weights = [Damage(what, INDEX, True) for what in CONTENTS]
    weights += [Damage(what, shard, True) for what in ("emptied", "deleted", "link", *CONTENTS)]
    optimizer = [Damage(what, "optimizer.json", True) for what in ("emptied", "deleted", *CONTENTS)]
    optimizer += [Damage(what, "optimizer.safetensors", True) for what in ("emptied", "deleted", *CONTENTS)]
    return {"weights": weights, "optimizer": optimizer}


@undone
def load_damaged(folder: str, damages: list[Damage], load: str) -> list[str]:
    """The error of loading after each damage; no number of the model or the optimizer may have changed."""
    trainer = make_trainer(folder, f"{folder}/loading")
    trainer.create_optimizer()
    engine = engine_of(trainer.model)
    assert engine is not None
    before = [local_of(param).clone() for param in trainer.model.parameters()]
    errors = []
    for number, each in enumerate(damages):
        path = Path(folder, f"damaged{number}")
        if dist.get_rank() == 0:
            shutil.copytree(Path(folder, "run", "checkpoint-4"), path)
            damage(path, each)
        dist.barrier()
        try:
            if load == "trainer":
                trainer.train(resume_from_checkpoint=str(path))
            elif load == "weights":
                read_model(trainer.model, path, engine.world)
            else:
                LoadedState(read_state(path, "optimizer"), trainer.optimizer, trainer.model)
            errors.append("")
        except CheckpointError as error:
            errors.append(str(error))
        assert all(torch.equal(local_of(p), b) for p, b in zip(trainer.model.parameters(), before)), each
        assert not trainer.optimizer.state
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
            Path(folder, "aside").unlink(missing_ok=True)
    return errors


@pytest.mark.parametrize("load", ["trainer", "weights", "optimizer"])
def test_damaged_checkpoint_is_refused_on_all_ranks_before_anything_changes(
    load: str, checkpoint: Path, folder: str
) -> None:
    sealed = sealed_damages(checkpoint)
    damages = {"trainer": all_damages(checkpoint) + sealed["weights"], **sealed}[load]
    left, right = run_ranks(load_damaged, 2, folder, damages, load)
    assert left == right
    for each, message in zip(damages, left, strict=True):
        is_of_another = each == Damage("of another step", MANIFEST)  # then it is the others that do not fit
        assert ("trainer_state.json" if is_of_another else each.name) in message, (each, message)


@pytest.mark.parametrize("name", ["../x", "/x", "a/b/c", "a/..", "../a", "..", "", "a\\b", "a\0b"])
def test_manifest_that_names_a_file_elsewhere_is_refused(name: str, checkpoint: Path, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "copy")
    manifest = read_manifest(path)
    record = next(iter(manifest.files.values()))
    (path / MANIFEST).write_text(replace(manifest, files={**manifest.files, name: record}).to_json())
    with pytest.raises(CheckpointError, match="leaves the folder"):
        verify(path, None)


def test_newest_whole_checkpoint_is_found_and_damaged_ones_are_listed(checkpoint: Path, tmp_path: Path) -> None:
    run = shutil.copytree(checkpoint.parent, tmp_path / "run")
    damage(run / "checkpoint-4", Damage("cut", "optimizer.safetensors"))
    (run / "checkpoint-6").mkdir()
    path, _, skipped = latest(run, step_of)
    assert path == run / "checkpoint-2"
    assert [("checkpoint-6" in text, "optimizer.safetensors" in text) for text in skipped] == [
        (True, False),
        (False, True),
    ]
