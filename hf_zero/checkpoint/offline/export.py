"""Exports a checkpoint folder in one process, without ranks: the work behind `hf-zero export`."""

from __future__ import annotations

import filecmp
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.manifest import MANIFEST, TEMPLATES, check_name
from hf_zero.checkpoint.files.model_plan import plan_model
from hf_zero.checkpoint.files.stored import stored
from hf_zero.checkpoint.files.tensor_file import TensorFile, TensorInfo, layout_file, read_layout
from hf_zero.checkpoint.offline.inspection import INDEX, Located, check, located_weights, read_index
from hf_zero.errors import CheckpointError, UsageError

logger = logging.getLogger(__name__)
Item = TypeVar("Item")

CHUNK_BYTES = 4 * 2**20  # of a tensor, read, converted, written or compared at once
CONFIG = "config.json"

# What `from_pretrained` does not need from the source: weights in any format (they are written anew, or not at all),
# pickles, and training state.
_WEIGHTS_OR_PICKLE = re.compile(
    r".*(\.safetensors(\.\d+-of-\d+)?|\.(bin|pt|pth|pkl|ckpt|h5|msgpack|gguf|onnx|distcp)|\.index\.json)", re.IGNORECASE
)
_STATE = re.compile(r"(optimizer|scheduler|scaler|sampler|rng_state|random_states|data_order|trainer_state).*")

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many bytes are done, and how many there are."""


@dataclass(frozen=True)
class _Layout:
    """The files of weights to be written, and the text of their index if there are several."""

    files: tuple[TensorFile, ...]
    index: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for file in self.files for tensor in file.tensors)


@dataclass(frozen=True)
class Exported:
    """What an export has written.

    Attributes:
        folder: where.
        was_verified: whether the source had a manifest to be compared with.
        sizes: bytes of each file.
        overflown: names of tensors with finite values that became infinite in the requested dtype.
    """

    folder: Path
    was_verified: bool
    sizes: Mapping[str, int]
    overflown: tuple[str, ...]


@dataclass
class _Job:
    """One export while it runs."""

    folder: Path
    staged: Path
    weights: Mapping[str, Located]
    layout: _Layout
    dtype: torch.dtype | None
    progress: Progress
    overflown: dict[str, None] = field(default_factory=dict)


def export(
    folder: Path,
    out: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    progress: Progress = lambda *_: None,
) -> Exported:
    """Write what `from_pretrained` needs of a checkpoint, as `model.to(dtype).save_pretrained(out)` would.

    Memory use does not depend on the size of a tensor: data passes through in pieces of `CHUNK_BYTES`. What was written is
    read again and compared with the source before `out` gets its name, so `out` is either absent or correct.

    Args:
        folder: a checkpoint, which is verified first, or any folder that `save_pretrained` wrote.
        out: must not exist, or be empty.
        dtype: of floating-point tensors; their own by default.
        max_shard_bytes: limit of one weight file, exceeded only by a tensor that is larger.
        progress: called for every chunk.

    Raises:
        UsageError: `out` is not empty or lies in `folder`, or `dtype` was given for quantised weights.
        CheckpointError: the source is damaged, or what was written differs from it.
    """
    _check_target(folder, out)
    has_manifest = (folder / MANIFEST).exists()
    if has_manifest:
        progress("verifying", 0, 0)
        problems = check(folder).problems
        if problems:
            more = f" (and {len(problems) - 1} problems more)" if len(problems) > 1 else ""
            raise CheckpointError(f"{problems[0]}{more}; nothing was exported: take an older checkpoint")
    weights = located_weights(folder)
    if dtype is not None:
        _check_castable(folder, weights)
    layout = _lay_out(folder, weights, dtype, max_shard_bytes)
    staged = out.absolute().parent / f".{out.absolute().name}.staged"
    job = _Job(folder, staged, weights, layout, dtype, progress)
    try:
        _write(job)
        _compare(job)
        disk.rename(staged, out)
        disk.sync_folder(staged.parent)
    except BaseException:
        if staged.exists():
            disk.remove_tree(staged)
        raise
    sizes = {path.name: path.stat().st_size for path in sorted(out.iterdir()) if path.is_file()}
    return Exported(out, has_manifest, sizes, tuple(job.overflown))


def _check_target(folder: Path, out: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} exists and is not a folder: name another one")
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} exists and is not empty: name another folder, or remove it first")
    if out.resolve().is_relative_to(folder.resolve()):
        raise UsageError(f"{out} lies in {folder}, which an export leaves as it is: name a folder outside")


def _check_castable(folder: Path, weights: Mapping[str, Located]) -> None:
    small = [name for name, at in weights.items() if at.info.dtype.is_floating_point and at.info.dtype.itemsize == 1]
    if small or "quantization_config" in _read_config(folder):
        raise UsageError(
            f"{folder} holds quantised weights{f', like {small[0]!r}' if small else ''}, which mean nothing without "
            "their scales in another dtype: export without a dtype"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object")
    return config


# ---- which files -----------------------------------------------------------------------------------------------------


def _lay_out(folder: Path, weights: Mapping[str, Located], dtype: torch.dtype | None, limit: int) -> _Layout:
    """Divide the weights as `save_pretrained` does: in the order of the model's state dict, which the files do not keep."""
    wanted = [
        at.info if dtype is None or not at.info.dtype.is_floating_point else replace(at.info, dtype=dtype)
        for at in weights.values()
    ]
    if sum(info.nbytes for info in wanted) > limit:
        try:
            layout = _as_its_model(folder, wanted, limit)
        except Exception as error:  # whatever a model's class raises for this config
            reason = " ".join(str(error).split())
            logger.warning("tensors are divided in the order of their files, not of the model: %s", reason)
        else:
            return layout
    return _in_given_order(folder, wanted, limit)


def _as_its_model(folder: Path, wanted: Iterable[TensorInfo], limit: int) -> _Layout:
    """Ask `save_pretrained` of the model's class, on a model built without memory."""
    from transformers.utils import logging as hf_logging

    expected = {info.name: (info.dtype, info.shape) for info in wanted}
    was_shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # nothing is written yet
    try:
        model = _build(folder)
        with tempfile.TemporaryDirectory() as scratch:
            plan = plan_model(model, Path(scratch))
            kinds = {
                piece.source: expected[name][0]
                for name, pieces in plan.pieces.items()
                for piece in pieces
                if name in expected
            }
            _set_dtypes(model, kinds)
            plan = plan_model(model, Path(scratch), max_shard_size=limit)
            index = Path(scratch) / INDEX
            text = index.read_text() if index.exists() else None
    finally:
        if was_shown:
            hf_logging.enable_progress_bar()
    found = {tensor.name: (tensor.dtype, tensor.shape) for file in plan.files for tensor in file.tensors}
    if found != expected:
        other = next(name for name in sorted(found.keys() | expected.keys()) if found.get(name) != expected.get(name))
        raise CheckpointError(f"{other!r} is not what {type(model).__name__} would save")
    return _Layout(plan.files, text)


def _build(folder: Path) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    name = (config.architectures or ["none"])[0]
    kind = getattr(transformers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise CheckpointError(f"transformers has no model class {name!r}")
    with torch.device("meta"):
        model = kind(config)
    assert isinstance(model, nn.Module)
    return model


def _set_dtypes(model: nn.Module, kinds: Mapping[str, torch.dtype]) -> None:
    for values in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, value in values:
            if name in kinds:
                value.data = value.data.to(kinds[name])


def _in_given_order(folder: Path, wanted: Iterable[TensorInfo], limit: int) -> _Layout:
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name = {info.name: info for info in wanted}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda info: info.nbytes,
        get_storage_id=lambda info: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    files = [
        layout_file(file, [by_name[name] for name in names], {"format": "pt"})
        for file, names in split.filename_to_tensors.items()
    ]
    if not split.is_sharded:
        return _Layout(tuple(files), None)
    known = (read_index(folder) or {}).get("metadata") or {}
    metadata = {key: known[key] for key in ("total_parameters",) if key in known}
    index = {"metadata": {**metadata, **split.metadata}, "weight_map": split.tensor_to_filename}
    return _Layout(tuple(files), json.dumps(index, indent=2, sort_keys=True) + "\n")


def _small_files(folder: Path) -> list[str]:
    """Configuration, tokenizer, code and text, by their paths in the folder."""
    check_name(folder, TEMPLATES)
    found = []
    for path in sorted([*folder.iterdir(), *(folder / TEMPLATES).glob("*.jinja")]):
        name = path.name
        if name.startswith(".") or name in (MANIFEST, "training_args.bin") or path.is_dir():
            continue
        if not _WEIGHTS_OR_PICKLE.fullmatch(name) and not _STATE.fullmatch(name):
            check_name(path.parent, name)
            found.append(str(path.relative_to(folder)))
    return found


# ---- writing and comparing -------------------------------------------------------------------------------------------


def _write(job: _Job) -> None:
    staged, files = job.staged, job.layout.files
    staged.parent.mkdir(parents=True, exist_ok=True)
    if staged.exists():
        disk.remove_tree(staged)  # left by an interrupted export
    disk.make_folder(staged)
    for file in files:  # all of them reserve their space before the first row is written
        disk.write_file(staged / file.name, file.header, file.nbytes)
    done, total = 0, job.layout.nbytes
    for file in files:
        path = staged / file.name
        with disk.rows_file(path) as fd:
            for tensor in file.tensors:
                offset = tensor.offset
                for data in _chunks(job, tensor):
                    disk.write_at(fd, path, data, offset)
                    offset += len(data)
                    done += len(data)
                    job.progress("writing", done, total)
    if job.layout.index is not None:
        disk.write_file(staged / INDEX, job.layout.index.encode())
    for name in _small_files(job.folder):
        _copy(job, name)
    disk.sync_folder(staged)


def _copy(job: _Job, name: str) -> None:
    source, target = job.folder / name, job.staged / name
    if name == CONFIG and job.dtype is not None:
        config = _read_config(job.folder)
        config.pop("torch_dtype", None)  # as older versions called it
        config["dtype"] = str(job.dtype).removeprefix("torch.")
        disk.write_file(target, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
        return
    if not target.parent.exists():
        disk.make_folder(target.parent)
    shutil.copyfile(source, target)
    disk.sync_file(target)
    if target.parent != job.staged:
        disk.sync_folder(target.parent)


def _chunks(job: _Job, tensor: TensorInfo) -> Iterator[memoryview]:
    """The bytes of a tensor of the source, as they should be in the export."""
    path, source = job.weights[tensor.name].path, job.weights[tensor.name].info
    step = max(CHUNK_BYTES // max(source.dtype.itemsize, tensor.dtype.itemsize), 1)
    numel = math.prod(source.shape)
    with stored(path) as file:
        for start in range(0, numel, step):
            data = bytearray(min(step, numel - start) * source.dtype.itemsize)
            file.read_into(data, source.offset + start * source.dtype.itemsize)
            if source.dtype == tensor.dtype:
                yield memoryview(data)
                continue
            values = torch.frombuffer(data, dtype=source.dtype)
            cast = values.to(tensor.dtype)
            if bool((cast.isinf() & values.isfinite()).any()):
                job.overflown[tensor.name] = None
            yield memoryview(cast.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _compare(job: _Job) -> None:
    """Read what was written, and raise if it differs from the source."""
    done, total = 0, job.layout.nbytes
    for expected in job.layout.files:
        path = job.staged / expected.name
        if read_layout(path) != expected:
            raise CheckpointError(f"{path}: its header reads otherwise than it was written; export again")
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):  # to read what reached the disk, not what is still in memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for tensor in expected.tensors:
                file.seek(tensor.offset)
                for data in _chunks(job, tensor):
                    if file.read(len(data)) != data:
                        raise CheckpointError(
                            f"{path}: {tensor.name!r} reads otherwise than it was written: the disk or the source "
                            "changed meanwhile; export again"
                        )
                    done += len(data)
                    job.progress("comparing", done, total)
    for name in _small_files(job.folder):
        is_edited = name == CONFIG and job.dtype is not None
        if not is_edited and not filecmp.cmp(job.folder / name, job.staged / name, shallow=False):
            raise CheckpointError(f"{job.staged / name} differs from {job.folder / name}; export again")
