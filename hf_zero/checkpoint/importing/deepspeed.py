"""What is where in the files of a DeepSpeed ZeRO checkpoint, stages 1 to 3.

[Note: DeepSpeed's files] Every rank writes `zero_pp_rank_R_mp_rank_00_optim_states.pt`: its part of flat fp32 buffers and
of their Adam states, without names. Names, shapes and order are in `param_shapes` in the files of model states.
Stages 1 and 2 have one flat buffer for each group: its parameters one after another, padded at the end to a multiple of
`2 * world_size` and cut into equal parts. Masters are stored without the padding; states may have it. Stage 3 has one flat
buffer for each sub-group; every parameter is cut into `ceil(numel / world_size)` elements per rank, the last ones padded.
What is not trained is in the model states, in the compute dtype. (deepspeed/utils/zero_to_fp32.py,
runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py, of 0.19.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_zero.checkpoint.files.manifest import check_name
from hf_zero.checkpoint.importing.state import ForeignState, Group, LazyTensor, load_pickle, options_of, step_number
from hf_zero.errors import CheckpointError

_OPTIM = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_FLAT, _FLAT_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"


class _Stage(IntEnum):
    """Stands in for DeepSpeed's enumeration; pickles hold values or names of its members."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


_ENUMS = {"deepspeed.runtime.zero.config.ZeroStageEnum": _Stage}


@dataclass(frozen=True)
class _FlatRange:
    """Where a parameter lies in the flat buffers of a group: rank and interval of each part, in the parameter's order."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class _Rank:
    """One rank's file of optimizer states."""

    path: Path
    content: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def stage(self) -> int:
        if "zero_stage" not in self.content and _FLAT in self.content:
            return 1  # written by the optimizer for bf16, which does not name its stage
        stage = self.content.get("zero_stage")
        if stage is None or int(stage) not in (1, 2, 3):
            raise CheckpointError(f"{self.path} is of ZeRO stage {stage}; stages 1, 2 and 3 can be imported")
        return int(stage)

    @property
    def num_ranks(self) -> int:
        count = self.content["partition_count"]
        counts = {int(each) for each in count} if isinstance(count, list) else {int(count)}
        if len(counts) != 1:
            raise CheckpointError(
                f"{self.path}: groups are cut over {sorted(counts)} ranks (expert parallelism), which cannot be imported"
            )
        return counts.pop()

    @property
    def masters(self) -> Sequence[Tensor]:
        masters: Sequence[Tensor] = self.content[_FLAT_3 if self.stage == 3 else _FLAT]
        return masters

    def base(self) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]], list[list[int]]]:
        """The state of each flat buffer, the options of each group, and the flat buffers of each group."""
        base = self.content["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        count = len(self.masters)
        if isinstance(base, list):  # elastic: states alone
            return base, [{}] * count, [[index] for index in range(count)]
        groups = base["param_groups"]
        return [base["state"].get(index, {}) for index in range(count)], groups, [group["params"] for group in groups]


def read_deepspeed(folder: Path, allow_pickle: bool) -> ForeignState:
    """Find everything in a DeepSpeed checkpoint; tensors stay in their files.

    Args:
        folder: `global_stepN`, or one that holds it and `latest`, as a Trainer's `checkpoint-N` does.
        allow_pickle: see `load_pickle`; DeepSpeed's own classes need neither this nor its package.

    Raises:
        CheckpointError: a file is missing, damaged, or does not fit the others.
    """
    tag, folders = _locate(folder)
    ranks = _ranks(tag, allow_pickle)
    stage, num_ranks = ranks[0].stage, ranks[0].num_ranks
    names = ["mp_rank_00_model_states.pt"]
    if stage == 3:
        names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(num_ranks)]
    models = [load_pickle(tag / name, allow_pickle, "deepspeed.", _ENUMS) for name in names]
    first = tag / names[0]
    try:
        for name, model in zip(names, models, strict=True):
            _check_model(tag / name, model, models[0], num_ranks)
        version = models[0]["ds_version"]
        state = ForeignState(f"DeepSpeed {version}", folders, int(models[0]["global_steps"]), num_ranks, stage)
        state.scheduler = models[0].get("lr_scheduler")
        _add_trained(state, ranks, models[0]["param_shapes"], first)
        _add_others(state, models, first)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{tag}: {error!r} in a layout that is not known: known is the one of DeepSpeed 0.19. Load the "
            "checkpoint with the version that wrote it, and save it with that one"
        ) from error
    state.check()
    return state


def _locate(folder: Path) -> tuple[Path, list[Path]]:
    """The folder with the ranks' files, and the folders with small files."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if any(folder.glob("*_optim_states.pt")) or any(folder.glob("*_model_states.pt")):
        beside = [folder.parent] if (folder.parent / "latest").is_file() else []
        return folder, [folder, *beside]
    latest = folder / "latest"
    if not latest.is_file():
        raise CheckpointError(f"{folder} has no file 'latest' and no *_optim_states.pt: give the folder global_stepN")
    name = latest.read_text().strip()
    check_name(folder, name)
    if not (folder / name).is_dir():
        raise CheckpointError(f"{latest} names {name!r}, but {folder / name} is missing: copy it here")
    return folder / name, [folder]


def _ranks(tag: Path, allow_pickle: bool) -> list[_Rank]:
    paths: dict[int, Path] = {}
    for path in sorted(tag.glob("*_optim_states.pt")):
        found = _OPTIM.match(path.name)
        if found is None or int(found[2]):
            raise CheckpointError(f"{path}: tensor, pipeline and expert parallel checkpoints cannot be imported")
        if int(found[1]) in paths:
            raise CheckpointError(f"{path} and {paths[int(found[1])].name} are of the same rank: remove the older one")
        paths[int(found[1])] = path
    if not paths:
        raise CheckpointError(f"{tag} has no *_optim_states.pt, where the fp32 weights are: copy all ranks' files here")
    ranks: list[_Rank] = []
    for path in (paths[rank] for rank in sorted(paths)):
        loaded = load_pickle(path, allow_pickle, "deepspeed.", _ENUMS)
        try:
            rank = _Rank(path, loaded["optimizer_state_dict"], loaded.get("ds_config") or {})
            facts = (rank.stage, rank.num_ranks, len(rank.masters))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is not a file of DeepSpeed's ZeRO optimizer: {error!r} is not in it"
            ) from error
        for what, ours, theirs in zip(
            ("stage", "number of ranks", "number of groups"), facts, _facts(ranks), strict=False
        ):
            if ours != theirs:
                raise CheckpointError(
                    f"{path} has {what} {ours}, but {ranks[0].path.name} {theirs}: another checkpoint's"
                )
        ranks.append(rank)
    missing = [number for number in range(ranks[0].num_ranks) if number not in paths]
    if missing:
        name = ranks[0].path.name.replace(f"rank_{min(paths)}_", f"rank_{missing[0]}_", 1)
        raise CheckpointError(
            f"{tag / name} is missing: {ranks[0].num_ranks} ranks wrote this checkpoint, and {len(missing)} of their files "
            "are not here. Copy them from the machines that they ran on"
        )
    if len(paths) > ranks[0].num_ranks:
        raise CheckpointError(
            f"{paths[max(paths)]} is of more than the {ranks[0].num_ranks} ranks that wrote {ranks[0].path.name}: remove "
            "the files of the older checkpoint"
        )
    return ranks


def _facts(ranks: Sequence[_Rank]) -> tuple[int, ...]:
    return (ranks[0].stage, ranks[0].num_ranks, len(ranks[0].masters)) if ranks else ()


def _check_model(path: Path, model: Mapping[str, Any], first: Mapping[str, Any], num_ranks: int) -> None:
    if int(model.get("mp_world_size") or 1) != 1:
        raise CheckpointError(f"{path}: it was trained with tensor parallelism, which cannot be imported")
    for key, expected in (("dp_world_size", num_ranks), ("global_steps", first["global_steps"])):
        if model[key] != expected:
            raise CheckpointError(f"{path} has {key} {model[key]}, the other files {expected}: another checkpoint's")
    if model["param_shapes"] is None:
        raise CheckpointError(
            f"{path} says nothing of its parameters: it was saved without ZeRO, or without an optimizer"
        )


def _add_trained(state: ForeignState, ranks: Sequence[_Rank], shapes: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Masters, Adam states, steps and groups."""
    bases = [rank.base() for rank in ranks]
    if len(shapes) != len(ranks[0].masters):
        raise CheckpointError(f"{path} names {len(shapes)} groups, {ranks[0].path} holds {len(ranks[0].masters)}")
    by_buffer: list[list[str]] = []
    for index, names in enumerate(shapes):
        slots = _slots(names, index, ranks)
        by_buffer.append([slot.name for slot in slots])
        flats = [rank.masters[index] for rank in ranks]
        state.weights.update({slot.name: _widened(_lazy(slot, flats)) for slot in slots})
        saved = [base[0][index] for base in bases]
        for key in saved[0]:
            values: list[Any] = [rank_state.get(key) for rank_state in saved]
            if isinstance(values[0], Tensor) and values[0].ndim:
                for slot in slots:
                    _check_parts(slot, key, values, ranks)
                    state.states.setdefault(slot.name, {})[key] = _lazy(slot, values)
        _add_step(state, by_buffer[-1], [dict(_group_of(index, base), **base[0][index]) for base in bases], ranks)
    state.groups = []
    for number, (group, buffers) in enumerate(zip(bases[0][1], bases[0][2], strict=True)):
        params = [name for index in buffers for name in by_buffer[index]]
        if (ranks[0].config.get("zero_optimization") or {}).get("round_robin_gradients") and state.stage < 3:
            params = _before_round_robin(params, len(ranks))
        state.groups.append(Group(params, options_of(group, f"group {number} of {ranks[0].path.name}")))


def _group_of(index: int, base: Any) -> Mapping[str, Any]:
    _, groups, buffers = base
    found: Mapping[str, Any] = next(group for group, own in zip(groups, buffers, strict=True) if index in own)
    return found


def _add_step(
    state: ForeignState, names: Sequence[str], values: Sequence[Mapping[str, Any]], ranks: Sequence[_Rank]
) -> None:
    """The count of steps, which is in the state or, with some of DeepSpeed's own optimizers, in the group."""
    if "step" not in values[0]:
        return
    for value, rank in zip(values, ranks, strict=True):
        if float(value["step"]) != float(values[0]["step"]):
            raise CheckpointError(
                f"{rank.path} is of step {float(value['step']):g}, {ranks[0].path.name} of "
                f"{float(values[0]['step']):g}: they are of different checkpoints"
            )
    for name in names:
        state.numbers[name] = {"step": step_number(values[0]["step"], f"the step of {name}")}


def _before_round_robin(names: list[str], num_ranks: int) -> list[str]:
    """The order of a group before `round_robin_gradients` dealt its parameters out to the ranks."""
    dealt = [index for rank in range(num_ranks) for index in range(rank, len(names), num_ranks)]
    return [name for _, name in sorted(zip(dealt, names, strict=True))]


def _slots(shapes: Mapping[str, Any], index: int, ranks: Sequence[_Rank]) -> list[_FlatRange]:
    """Where the parameters of flat buffer `index` lie."""
    sizes, num_ranks = [rank.masters[index].numel() for rank in ranks], len(ranks)
    if ranks[0].stage == 3:
        slots, end = _slots_cut_each(shapes, num_ranks)
        wrong = [rank for rank, size in enumerate(sizes) if size != end]
        expected = end
    else:
        slots, end = _slots_cut_together(shapes, _paddings(ranks[0], index, len(shapes)), sizes[0])
        align = 2 * num_ranks
        expected, found = (-(-numel // align) * align for numel in (end, sum(sizes)))
        wrong = [] if expected == found else [num_ranks - 1]
    if wrong:
        raise CheckpointError(
            f"{ranks[wrong[0]].path}: group {index} holds {sizes[wrong[0]]} elements, which do not make up the "
            f"{expected} of its parameters: the file is of another checkpoint, or written by an unknown version"
        )
    for slot in slots:
        _check_parts(slot, "weight", [rank.masters[index] for rank in ranks], ranks)
    return slots


def _slots_cut_each(shapes: Mapping[str, Any], num_ranks: int) -> tuple[list[_FlatRange], int]:
    slots, at = [], 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        size = -(-numel // num_ranks)
        counts = [min(max(numel - rank * size, 0), size) for rank in range(num_ranks)]
        parts = tuple((rank, at, at + count) for rank, count in enumerate(counts) if count)
        slots.append(_FlatRange(name, tuple(shape), parts))
        at += size
    return slots, at


def _slots_cut_together(shapes: Mapping[str, Any], paddings: Sequence[int], size: int) -> tuple[list[_FlatRange], int]:
    slots, at = [], 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        stop = at + math.prod(shape)
        parts, start = [], at
        while start < stop:
            rank = start // size if size else 0
            end = min(stop, (rank + 1) * size) if size else stop
            parts.append((rank, start - rank * size, end - rank * size))
            start = end
        slots.append(_FlatRange(name, tuple(shape), tuple(parts)))
        at = stop + padding
    return slots, at


def _paddings(rank: _Rank, index: int, count: int) -> Sequence[int]:
    """Padding elements after each parameter, from the versions that align parameters."""
    paddings = rank.content.get("param_alignment_paddings")
    found: Sequence[int] = [0] * count if paddings is None else paddings[index]
    if len(found) != count:
        raise CheckpointError(
            f"{rank.path}: group {index} has {count} parameters and {len(found)} paddings: it is damaged"
        )
    return found


def _check_parts(slot: _FlatRange, what: str, flats: Sequence[Any], ranks: Sequence[_Rank]) -> None:
    for rank, start, stop in slot.parts:
        flat = flats[rank] if rank < len(flats) else None
        if not isinstance(flat, Tensor) or flat.ndim != 1 or flat.numel() < stop or flat.dtype != flats[0].dtype:
            path = ranks[min(rank, len(ranks) - 1)].path
            raise CheckpointError(
                f"{path}: {what!r} of {slot.name!r} should be elements {start} to {stop} of a flat tensor, which is not "
                "there: the file is of another checkpoint, its state was offloaded to files of its own, or the version "
                "is unknown"
            )


def _lazy(slot: _FlatRange, flats: Sequence[Tensor]) -> LazyTensor:
    def read() -> Tensor:
        parts = [flats[rank].detach()[start:stop] for rank, start, stop in slot.parts]
        flat = parts[0] if len(parts) == 1 else torch.cat([flats[0].detach()[:0], *parts])
        return flat.reshape(slot.shape)

    return LazyTensor(slot.shape, flats[0].dtype, read)


def _add_others(state: ForeignState, models: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Frozen parameters and buffers; floating-point ones are widened to the masters' dtype."""
    first = models[0]
    aliases = first.get("shared_params") or {}
    shapes = first.get("frozen_param_shapes") or {}
    for name, shape in shapes.items():
        flats = [model["frozen_param_fragments"][name] for model in models]
        if state.stage < 3:
            _add_whole(state, name, flats[0])
            continue
        (slot,), end = _slots_cut_each({name: shape}, len(models))
        if any(flat.numel() != end for flat in flats):
            raise CheckpointError(
                f"{path}: the parts of {name!r} do not make up its shape {tuple(shape)}: copy it again"
            )
        lazy = _lazy(slot, [flat.reshape(-1) for flat in flats])
        state.weights[name] = _widened(lazy)
    buffers = set(first.get("buffer_names") or [])
    for name, value in first["module"].items():
        if name in state.weights or name in aliases or not isinstance(value, Tensor):
            continue
        if state.stage == 3 and name not in buffers and not value.numel():
            raise CheckpointError(
                f"{path}: {name!r} has no values here: it was saved without frozen parameters. Save it again with them"
            )
        _add_whole(state, name, value)


def _add_whole(state: ForeignState, name: str, value: Tensor) -> None:
    state.weights[name] = _widened(LazyTensor(tuple(value.shape), value.dtype, value.detach))


def _widened(lazy: LazyTensor) -> LazyTensor:
    if lazy.dtype not in (torch.float16, torch.bfloat16):
        return lazy
    return LazyTensor(lazy.shape, torch.float32, lambda: lazy.read().float())
