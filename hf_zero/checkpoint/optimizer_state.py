"""An optimizer's state as whole tensors by parameter name (`<parameter>.<state>`), with numbers and groups in JSON.

Torch's own form is numbered by position and holds one rank's rows; this form does not depend on ranks. Where an optimizer
steps on whole parameters, each rank writes the states of those that it owns; tensors of any shape, in lists and mappings too,
then stand in the same file, and the JSON says where they belong.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.checkpoint.files.model_plan import FilePlan, source_of
from hf_zero.checkpoint.files.pieces import identity
from hf_zero.checkpoint.files.state_values import from_json, tensors_of, to_json
from hf_zero.checkpoint.files.stored import is_stored
from hf_zero.checkpoint.files.tensor_file import Source, TensorFile, TensorInfo, layout_file, read_layout
from hf_zero.checkpoint.held_parameters import held_parameters, named_groups, states_beside
from hf_zero.checkpoint.savable import check_all_is_saved
from hf_zero.engine.parameters.partitioned_tensor import rows_like
from hf_zero.errors import CheckpointError
from hf_zero.host.scratch import Place
from hf_zero.layout import OwnerLayout, RowLayout
from hf_zero.optim.optimizers import owned_by, rooms_on_disk
from hf_zero.optim.owners import Owners
from hf_zero.optim.served import all_states


def state_files(prefix: str) -> tuple[str, str]:
    """The names of the files of tensors and of numbers."""
    return f"{prefix}.safetensors", f"{prefix}.json"


def capture(
    optimizer: torch.optim.Optimizer, model: nn.Module, prefix: str, is_alone: bool = False
) -> tuple[FilePlan, dict[str, Source], dict[str, Any]]:
    """What an optimizer's state consists of.

    Args:
        optimizer: of any class whose states have the shape of their parameters, or are numbers.
        model: names the parameters.
        prefix: of the files' names.
        is_alone: this rank saves, and the others do not come: what only they know of is asked for.

    Returns:
        The file of tensors, this rank's part of them, and what goes into JSON.

    Raises:
        CheckpointError: a state has another shape, or belongs to another partitioned model.
    """
    by_name, groups = held_parameters(optimizer, model), named_groups(optimizer, model)
    owned, found = owned_by(_inner(optimizer)), _Found()
    states: Mapping[Any, Any] = optimizer.state
    asked = is_alone and bool(owned)
    if asked:
        states, owned = all_states(_inner(optimizer), owned), {}
    beside = {} if is_alone else states_beside(optimizer, by_name)
    world = next((owners.world for owners in owned.values()), None)
    with contextlib.nullcontext() if world is None else world.together("saving optimizers", CheckpointError):
        check_all_is_saved(_inner(optimizer))
        for name in (name for group in groups for name in group):
            param = by_name[name]
            found.add(name, param, beside.get(name, states.get(param, {})), owned.get(id(param)), asked)
    if world is not None:
        found.merge(world.share(world.collect(found.owned(), "states of optimizers"), "states of optimizers"))
    options = [
        {key: to_json(value, f"{key} of group {number}") for key, value in group.items() if key != "params"}
        for number, group in enumerate(optimizer.param_groups)
    ]
    content = {
        "optimizer": type(_inner(optimizer)).__name__,
        "groups": [{"params": names, "options": o} for names, o in zip(groups, options, strict=True)],
        "numbers": found.numbers,
    }
    plan = FilePlan(
        (layout_file(state_files(prefix)[0], list(found.infos.values()), {"format": "pt"}),), _whole(found.infos)
    )
    return plan, found.sources, content


def _split(full: str, names: Collection[str]) -> tuple[str, str]:
    """A parameter's name and its state's, which may have dots of its own."""
    name, _, key = full.rpartition(".")
    while name not in names and "." in name:
        name, _, more = name.rpartition(".")
        key = f"{more}.{key}"
    return (name, key) if name in names else (full.rpartition(".")[0], full.rpartition(".")[2])


@dataclass
class _Found:
    """What the states of an optimizer consist of.

    Attributes:
        sources: this rank's part of the tensors, by their names in the file.
        infos: the tensors, by the same names.
        numbers: everything else, in JSON, by parameter and state.
        names: of the parameters whose states this rank alone has.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    infos: dict[str, TensorInfo] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def add(self, name: str, param: Tensor, state: Mapping[str, Any], owners: Owners | None, is_whole: bool) -> None:
        """The state of one parameter, of which every rank has its rows or the whole, or only the owner the whole."""
        if owners is not None and not owners.owns(param):
            return  # the owner tells

        def keep(value: Tensor, full: str) -> str:
            shape = tuple(value.shape)
            layout = RowLayout(shape, 1) if owners is None else owners.layout_of(param, shape)
            self._keep(full, value, Source(value.detach().contiguous(), layout))
            return full

        is_cut = owners is None and not is_whole and _is_cut(param)

        for key, value in state.items():
            full = f"{name}.{key}"
            if owners is not None and isinstance(value, DTensor):
                raise CheckpointError(
                    f"the state {full!r} is of an optimizer around the one that steps on whole parameters, each on one rank, "
                    "and a checkpoint cannot hold it: set optimizer_on: every_rank, or rows if it is elementwise"
                )
            if isinstance(value, Tensor) and value.ndim and value.shape == param.shape:
                if owners is None:
                    self._keep(full, value, source_of(value))
                else:
                    keep(value, full)
            else:
                self.numbers.setdefault(name, {})[key] = to_json(value, full, None if is_cut else keep)
        if owners is not None:
            self.names.append(name)

    def _keep(self, full: str, value: Tensor, source: Source) -> None:
        self.sources[full] = source
        self.infos[full] = TensorInfo(full, value.dtype, tuple(value.shape))

    def owned(self) -> tuple[dict[str, tuple[TensorInfo, RowLayout]], dict[str, dict[str, Any]]]:
        """What this rank alone has: its tensors and how they lie, and its numbers."""
        layouts = {full: source.layout for full, source in self.sources.items()}
        tensors: dict[str, tuple[TensorInfo, RowLayout]]
        tensors = {full: (self.infos[full], at) for full, at in layouts.items() if isinstance(at, OwnerLayout)}
        numbers = {name: self.numbers[name] for name in self.names if name in self.numbers}
        return tensors, numbers

    def merge(
        self, everything: list[tuple[dict[str, tuple[TensorInfo, RowLayout]], dict[str, dict[str, Any]]]]
    ) -> None:
        """Take over what every rank has said by `owned`, so that all ranks lay out the same file."""
        for tensors, numbers in everything:
            self.numbers.update(numbers)
            for full, (info, layout) in tensors.items():
                if full not in self.sources:
                    self.infos[full] = info
                    self.sources[full] = Source(torch.empty(0, dtype=info.dtype, device="cpu"), layout)


def _is_cut(param: Tensor) -> bool:
    return isinstance(param, DTensor) and source_of(param).layout.num_ranks > 1


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _whole(infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {name: (identity(name, info.shape),) for name, info in infos.items()}


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint says about an optimizer's state, without the tensors themselves; read by one rank for all.

    Attributes:
        path: of the numbers.
        numbers: JSON.
        file: of the tensors.
    """

    path: Path
    numbers: str
    file: TensorFile


def read_state(folder: Path, prefix: str) -> SavedState:
    """Read what a checkpoint says about an optimizer's state.

    Args:
        folder: of the checkpoint.
        prefix: of the files' names.

    Raises:
        CheckpointError: the state is missing, or its file of tensors is damaged.
    """
    tensors, numbers = (folder / name for name in state_files(prefix))
    for path in (tensors, numbers):
        if not is_stored(path):
            raise CheckpointError(
                f"{path} is missing, so the optimizer cannot go on: take an older checkpoint, or start anew from the "
                "weights alone"
            )
    try:
        text = numbers.read_text()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{numbers} is damaged: {error!r}") from error
    return SavedState(numbers, text, read_layout(tensors))


class LoadedState:
    """The state of one optimizer in a checkpoint: checked first, then read.

    Args:
        saved: what `read_state` has read.
        optimizer: of the class that was saved; holds the same parameters in the same groups.
        model: names the parameters.

    Raises:
        CheckpointError: the state belongs to another optimizer; nothing has been changed.
    """

    def __init__(self, saved: SavedState, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self._optimizer, self._model = optimizer, model
        self._folder, self.file, path = saved.path.parent, saved.file, saved.path
        try:
            self._content = json.loads(saved.numbers)
            self._check(path)
        except CheckpointError:
            raise
        except Exception as error:  # of any kind: it must not surface while the state is being installed
            raise CheckpointError(f"{path} is damaged: {error!r}") from error

    def _check(self, path: Path) -> None:
        kind = type(_inner(self._optimizer)).__name__
        if self._content["optimizer"] != kind:
            raise CheckpointError(
                f"{path} is the state of {self._content['optimizer']}, but this is {kind}: resume with the same one, or start "
                "anew from the weights alone"
            )
        saved, ours = (
            [group["params"] for group in self._content["groups"]],
            named_groups(self._optimizer, self._model),
        )
        for number in range(max(len(saved), len(ours))):
            left, right = (groups[number] if number < len(groups) else [] for groups in (saved, ours))
            if left != right:
                other = sorted(set(left) ^ set(right)) or ["their order"]
                raise CheckpointError(
                    f"{path}: group {number} holds other parameters than this optimizer's: {other[0]}. Make the groups, and "
                    "freeze parameters, as in the run that saved it"
                )
        known: dict[str, Tensor] = {tensor.name: torch.empty(0, device="cpu") for tensor in self.file.tensors}
        for values in (*(group["options"] for group in self._content["groups"]), *self._content["numbers"].values()):
            for value in values.values():
                from_json(value, torch.device("cpu"), known, type(_inner(self._optimizer)))
        self._elsewhere = set(tensors_of(self._content["numbers"]))
        owned, by_name = owned_by(_inner(self._optimizer)), held_parameters(self._optimizer, self._model)
        for name, values in self._content["numbers"].items():
            if name not in by_name or (
                tensors_of(values) and id(by_name[name]) not in owned and _is_cut(by_name[name])
            ):
                raise CheckpointError(
                    f"{path}: the state of {name!r} was made on the whole parameter, but this optimizer steps on rows: resume "
                    "with optimizer_on: whole"
                )
        shapes = {name: tuple(param.shape) for name, param in by_name.items()}
        for tensor in self.file.tensors:
            name, _ = _split(tensor.name, shapes)
            if tensor.name not in self._elsewhere and shapes.get(name) != tensor.shape:
                raise CheckpointError(
                    f"{self._folder / self.file.name}: {tensor.name!r} has shape {tensor.shape}, its parameter "
                    f"{shapes.get(name, 'is not in this model')}"
                )

    def install(self) -> tuple[FilePlan, dict[str, Source]]:
        """Give the optimizer its numbers and empty states; the caller reads this rank's part into what is returned."""
        by_name = held_parameters(self._optimizer, self._model)
        optimizer = _inner(self._optimizer)
        owned = owned_by(optimizer)
        infos = {tensor.name: tensor for tensor in self.file.tensors}
        # Before anything changes: there may be no room.
        places = rooms_on_disk(optimizer, self._offloadable(infos, by_name))
        optimizer.state.clear()
        sources: dict[str, Source] = {}
        for group, saved in zip(optimizer.param_groups, self._content["groups"], strict=True):
            for key, value in saved["options"].items():
                group[key] = from_json(value, torch.device("cpu"), {}, type(optimizer))
            on_device = bool(group.get("fused") or group.get("capturable"))  # as saved
            for name in saved["params"]:
                param, numbers = by_name[name], self._content["numbers"].get(name, {})
                owners = owned.get(id(param))
                made: dict[str, Tensor] = {}
                for full in tensors_of(numbers):
                    made[full] = self._room(infos[full], param, owners, sources)
                if owners is None or owners.owns(param):
                    self._install_numbers(optimizer, param, numbers, on_device, made)
        for full in sorted(infos.keys() - self._elsewhere):
            name, key = _split(full, by_name)
            param = by_name[name]
            owners = owned.get(id(param))
            rows = self._room(infos[full], param, owners, sources, places.get(id(param), {}).get(key))
            if owners is None:
                optimizer.state[param][key] = rows_like(rows, param) if isinstance(param, DTensor) else rows
            elif owners.owns(param):
                optimizer.state[param][key] = rows
        return FilePlan((self.file,), _whole(infos)), sources

    def _offloadable(
        self, infos: Mapping[str, TensorInfo], by_name: Mapping[str, Tensor]
    ) -> dict[int, dict[str, torch.dtype]]:
        """The tensors of the file that have their parameter's shape: names and dtypes by id(parameter)."""
        found: dict[int, dict[str, torch.dtype]] = {}
        for full in sorted(infos.keys() - self._elsewhere):
            name, key = _split(full, by_name)
            found.setdefault(id(by_name[name]), {})[key] = infos[full].dtype
        return found

    @staticmethod
    def _room(
        info: TensorInfo, param: Tensor, owners: Owners | None, sources: dict[str, Source], place: Place | None = None
    ) -> Tensor:
        """Memory for this rank's part of a tensor in the file; `place`: on a disk."""
        if place is not None or (owners is None and info.shape == tuple(param.shape)):
            rows = torch.empty_like(torch_compat.local_of(param), dtype=info.dtype) if place is None else place.tensor
            sources[info.name] = replace(source_of(param), rows=rows)
            return rows
        if owners is None:
            layout, rows = RowLayout(info.shape, 1), torch.empty(info.shape, dtype=info.dtype, device=param.device)
        else:
            layout = owners.layout_of(param, info.shape)
            rows = torch.empty(info.shape if owners.owns(param) else 0, dtype=info.dtype, device=param.device)
        sources[info.name] = Source(rows, layout)
        return rows

    @staticmethod
    def _install_numbers(
        optimizer: Any, param: Tensor, numbers: Mapping[str, Any], on_device: bool, tensors: Mapping[str, Tensor]
    ) -> None:
        for key, value in numbers.items():
            is_counter = key == "step" and not on_device  # torch then keeps it on the CPU
            device = torch.device("cpu") if is_counter else param.device
            made = from_json(value, device, tensors, type(optimizer))
            is_moment = isinstance(made, Tensor) and not made.ndim and not is_counter and key != "step"
            if is_moment and isinstance(param, DTensor) and not param.ndim:
                made = rows_like(made, param)  # of a scalar parameter
            optimizer.state[param][key] = made
