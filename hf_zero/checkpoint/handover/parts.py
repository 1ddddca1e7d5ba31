"""What is gathered together, and what is handed over of it, under which names."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from hf_zero.changes import Changes
from hf_zero.checkpoint.files.model_plan import FilePlan, NotMovedError, plan_model, plan_one_file, saves_given_state
from hf_zero.checkpoint.files.pieces import Piece
from hf_zero.checkpoint.files.tensor_file import TensorInfo
from hf_zero.checkpoint.handover.contents import Weight, base_of, weights_of
from hf_zero.checkpoint.handover.merging import as_number, is_packed, merged, number_of, parameters_merged, state_of
from hf_zero.checkpoint.handover.unchanged import fingerprints
from hf_zero.checkpoint.ranks.one_writer import saving_alone
from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError
from hf_zero.layout import row_major
from hf_zero.parameters import parameters_of

Names = Literal["saved", "model"]
Whole = Callable[[], Tensor]


@dataclass(eq=False)
class Part:
    """Tensors that are gathered together, since what is handed over is made of all of them.

    Attributes:
        as_numbers: whether quantised weights become numbers.
        dtype: of floating-point numbers that are handed over; None: their own.
        sources: the tensors, each once.
        layers: outermost layers of adapters, which are merged before anything is handed over.
        weights: what tensors are handed over of, by name.
        handed: those, with the pieces of weights that each consists of.
    """

    as_numbers: bool
    dtype: torch.dtype | None
    sources: list[Tensor] = field(default_factory=list)
    layers: list[nn.Module] = field(default_factory=list)
    weights: dict[str, Weight] = field(default_factory=dict)
    handed: list[tuple[TensorInfo, tuple[Piece, ...]]] = field(default_factory=list)

    def wanted(self) -> list[tuple[Tensor, torch.dtype | None]]:
        """The sources, each with the dtype to gather it in: their own (None) where they are computed with."""
        is_plain = not self.layers
        return [
            (source, self.dtype if is_plain and source.is_floating_point() and not is_packed(source) else None)
            for source in self.sources
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of the sources as they are gathered."""
        return sum(source.numel() * (dtype or source.dtype).itemsize for source, dtype in self.wanted())

    def fingerprint(self) -> list[int | None]:
        """What tells whether anything of this has changed on this rank; see `fingerprints`."""
        return [*fingerprints(self.sources), *(state_of(layer) for layer in self.layers)]

    def unpack(self, wholes: Sequence[Whole]) -> Iterator[tuple[str, Tensor]]:
        """What is handed over, under its names; each in memory that nobody changes.

        Args:
            wholes: of the sources.
        """
        of = {id(source): whole for source, whole in zip(self.sources, wholes, strict=True)}
        values = self._merged(of) if self.layers else self._plain(of)
        for info, pieces in self.handed:
            value = _assembled(info, pieces, values)
            yield info.name, value.to(info.dtype) if info.dtype.is_floating_point else value

    def _merged(self, of: dict[int, Whole]) -> dict[str, Tensor]:
        """The weights after adapters have been merged into them."""
        own = {id(param): of[id(param)]() for param in parameters_merged(self.layers)}
        others = {id(w.value): of[id(w.value)]() for w in self.weights.values() if id(w.value) not in own}
        found: dict[str, Tensor] = {}
        with merged(self.layers, own, self.as_numbers) as stand_ins:
            for name, weight in self.weights.items():
                value = weight.value  # of a tied weight, in a module beside the layers, still the parameter itself
                found[name] = others[id(value)] if id(value) in others else stand_ins.get(id(value), value).data
        return found

    def _plain(self, of: dict[int, Whole]) -> dict[str, Tensor]:
        """The weights as they are; tied ones share memory."""
        made: dict[int, Tensor] = {}
        for weight in self.weights.values():
            param = weight.value
            if id(param) not in made:
                whole = of[id(param)]()
                made[id(param)] = as_number(param, whole) if self.as_numbers and is_packed(param) else whole
        return {name: made[id(weight.value)] for name, weight in self.weights.items()}


def parts_of(model: nn.Module, names: Names, dtype: torch.dtype | None, world: World | None) -> list[Part]:
    """Everything that is handed over of a model; called by all ranks together.

    Args:
        model: partitioned or not, with adapters or without.
        names: as `save_pretrained` would write the model without adapters, whose weights are then numbers; or those of its
            own modules, each tied tensor under its first one, with quantised bytes as they are and no buffers.
        dtype: of floating-point tensors; their own by default.
        world: the ranks, if there are several.

    Raises:
        UsageError: there are adapters that cannot be merged, or saving would compute with weights.
    """
    _check_adapters(model)
    saved = names == "saved"
    weights = {weight.name: weight for weight in weights_of(model, buffers=saved)}
    if not saved:
        first: dict[int, str] = {}
        for name, weight in weights.items():
            first.setdefault(id(weight.value), name)
        weights = {name: weights[name] for name in first.values()}
    infos = [TensorInfo(name, *_kind(weight.value, saved)) for name, weight in weights.items()]
    plan = plan_one_file("", infos) if not saved else None
    pieces, found = (plan.pieces, infos) if plan is not None else _as_saved(model, weights, infos, world)
    grouped = _Grouping(weights, saved, dtype)
    for info in found:
        is_number = saved or not is_packed(weights[info.name].value)
        is_cast = dtype is not None and is_number and info.dtype.is_floating_point
        grouped.add(replace(info, dtype=dtype) if is_cast else info, pieces[info.name])  # type: ignore[arg-type]
    return grouped.parts()


def _kind(value: Tensor, as_numbers: bool) -> tuple[torch.dtype, tuple[int, ...]]:
    return number_of(value) if as_numbers and is_packed(value) else (value.dtype, tuple(value.shape))


def _check_adapters(model: nn.Module) -> None:
    configs = getattr(model, "peft_config", {})
    if isinstance(configs, dict) and any(getattr(each, "is_prompt_learning", False) for each in configs.values()):
        raise UsageError(
            "prompts that PEFT learns are no weights of the base model, so they cannot be merged into it for an engine; hand "
            "over the base model (model.get_base_model()), and the prompts by save_pretrained"
        )


def _as_saved(
    model: nn.Module, weights: dict[str, Weight], infos: list[TensorInfo], world: World | None
) -> tuple[dict[str, tuple[Piece, ...]], list[TensorInfo]]:
    """What `save_pretrained` of the base model without adapters would write."""
    base = base_of(model)
    if not saves_given_state(base):
        first: dict[int, TensorInfo] = {}
        for info in infos:
            first.setdefault(id(weights[info.name].value), info)
        kept = list(first.values())
        return dict(plan_one_file("", kept).pieces), kept
    with Changes() as changes, tempfile.TemporaryDirectory() as scratch:
        changes.replace(base, "get_parameter_or_buffer", lambda name: weights[name].value)
        for name, value in (("_hf_peft_config_loaded", False), ("hf_quantizer", None)):
            if getattr(base, name, value):
                changes.replace(base, name, value)
        config = getattr(base, "config", None)
        if config is not None:
            changes.replace(config, "dtype", getattr(config, "dtype", None))  # saving sets it

        def plan_saving() -> FilePlan:
            try:
                with saving_alone():
                    return plan_model(base, Path(scratch), infos=infos)
            except NotMovedError as error:
                raise UsageError(
                    f"whole_parameters: saving this model computes with its weights ({error}); ask for the names of its "
                    'modules, names="model"'
                ) from error

        what = "the names of weights that are handed over"
        # Libraries save on rank 0 only.
        plan = plan_saving() if world is None else world.from_first(plan_saving, what, UsageError)
    found = [info for file in plan.files for info in file.tensors]
    order = {name: number for number, name in enumerate(weights)}
    found.sort(key=lambda info: min(order[piece.source] for piece in plan.pieces[info.name]))
    return dict(plan.pieces), found


class _Grouping:
    """Puts together what cannot be handed over apart: what shares a tensor, or a layer of adapters."""

    def __init__(self, weights: dict[str, Weight], as_numbers: bool, dtype: torch.dtype | None) -> None:
        self._weights, self._as_numbers, self._dtype = weights, as_numbers, dtype
        self._part_of: dict[int, Part] = {}  # by the id of a tensor
        self._layers: dict[int, list[nn.Module]] = {}  # around a tensor, under any of its names
        for weight in weights.values():
            if weight.layer is not None:
                self._layers.setdefault(id(weight.value), []).append(weight.layer)

    def add(self, info: TensorInfo, pieces: tuple[Piece, ...]) -> None:
        """One more tensor to hand over."""
        weights = {piece.source: self._weights[piece.source] for piece in pieces}
        sources: dict[int, Tensor] = {id(weight.value): weight.value for weight in weights.values()}
        layers: dict[int, nn.Module] = {}
        waiting = list(sources.values())
        while waiting:  # a layer has other tensors, around which there may be other layers
            for layer in self._layers.get(id(waiting.pop()), []):
                if id(layer) not in layers:
                    layers[id(layer)] = layer
                    new = [param for param in parameters_of(layer) if id(param) not in sources]
                    sources.update((id(param), param) for param in new)
                    waiting += new
        part = Part(self._as_numbers, self._dtype)
        for old in {id(p): p for key in sources if (p := self._part_of.get(key)) is not None}.values():
            self._move(old, part)
        known, around = {id(source) for source in part.sources}, {id(layer) for layer in part.layers}
        part.sources += [source for key, source in sources.items() if key not in known]
        part.layers += [layer for key, layer in layers.items() if key not in around]
        part.weights |= weights
        part.handed.append((info, pieces))
        for source in part.sources:
            self._part_of[id(source)] = part

    @staticmethod
    def _move(old: Part, new: Part) -> None:
        known = {id(source) for source in new.sources}
        new.sources += [source for source in old.sources if id(source) not in known]
        around = {id(layer) for layer in new.layers}
        new.layers += [layer for layer in old.layers if id(layer) not in around]
        new.weights |= old.weights
        new.handed += old.handed

    def parts(self) -> list[Part]:
        """What has been put together, in the order of its first tensors."""
        return list({id(part): part for part in self._part_of.values()}.values())


def _assembled(info: TensorInfo, pieces: tuple[Piece, ...], values: dict[str, Tensor]) -> Tensor:
    """A tensor made of pieces of others."""
    first = pieces[0]
    if len(pieces) == 1 and first.target_strides == first.source_strides == row_major(info.shape):
        value = values[first.source]
        if first.source_offset == 0 and value.numel() == first.numel:
            return value.reshape(info.shape)
    some = values[first.source]
    target = torch.empty(info.shape, dtype=some.dtype, device=some.device)
    for piece in pieces:
        source = values[piece.source].reshape(-1).as_strided(piece.shape, piece.source_strides, piece.source_offset)
        target.view(-1).as_strided(piece.shape, piece.target_strides, piece.target_offset).copy_(source)
    return target
