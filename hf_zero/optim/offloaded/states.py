"""States of an optimizer, and masters, that live on a disk: where each of them lies, and who makes room for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.config.offload import Offload
from hf_zero.engine.parameters.partitioned_tensor import rows_like
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.ranks.world import World
from hf_zero.errors import OffloadError, UsageError
from hf_zero.host.scratch import Place, make_places
from hf_zero.optim.stepping import find_record
from hf_zero.optim.trial import states_of_step

_MASTER = ""  # among the names of states: a parameter's own rows


class OffloadedStates:
    """The states of one optimizer that are on a disk.

    Args:
        offload: what is to be there.
    """

    def __init__(self, offload: Offload) -> None:
        self.offload = offload
        self._places: dict[int, dict[str, Place]] = {}  # by id(parameter) and name of the state
        self._kept: dict[int, Tensor] = {}  # so that ids stay theirs

    def of(self, key: int) -> Mapping[str, Place]:
        """The places of a parameter's states, in the order of the file, by its id."""
        return self._places.get(key, {})

    def release(self, param: Tensor, start: int, stop: int) -> None:
        """Let go of elements of a parameter's own rows that were read or written, if these are on a disk."""
        if (place := self._record(param).on_disk) is not None:
            place.release(start, stop)

    def make_room(
        self, optimizer: Any, world: World, known: Mapping[int, Mapping[str, torch.dtype]] | None = None
    ) -> None:
        """Make room for the states of all parameters that have none yet; called by all ranks together.

        Args:
            optimizer: whose states they are.
            world: its ranks.
            known: names and dtypes of states by id(parameter); by default those that a step on a tiny parameter makes.

        Raises:
            OffloadError: a rank has no room for its states; on all ranks, and nothing has changed.
        """
        wanted = {id(param): (group, param) for group, param in self._chosen(optimizer)}
        is_new = {key for key in wanted if key not in self._places}
        more = {key: self._unplaced(optimizer, param) for key, (_, param) in wanted.items() if key not in is_new}
        if not is_new and not any(more.values()):
            return
        rooms = [
            (param, name, dtype)
            for key, (group, param) in wanted.items()
            for name, dtype in (
                self._first_states(optimizer, group, param, known) if key in is_new else more[key]
            ).items()
        ]
        with world.together("making room for offloaded states", OffloadError):
            assert self.offload.path is not None
            self._check_contiguous(param for param, _, _ in rooms)
            # Masters are written through their mapping, states past it: no page may hold some of both.
            masters = [room for room in rooms if room[1] == _MASTER]
            states = [room for room in rooms if room[1] != _MASTER]
            places = [make_places(self.offload.path, map(_form, each)) if each else [] for each in (masters, states)]
        for key in is_new:
            self._places[key], self._kept[key] = {}, wanted[key][1]
        for (param, _, _), place in zip(masters, places[0], strict=True):
            self._record(param).move_to(place)
        for (param, name, _), place in zip(states, places[1], strict=True):
            self._places[id(param)][name] = place

    def _check_contiguous(self, params: Iterable[Tensor]) -> None:
        for param in params:
            if not torch_compat.local_of(param).is_contiguous():
                raise UsageError(
                    f"{self._record(param).name!r} is not contiguous, so it cannot be stepped on in pieces: make it contiguous "
                    "(torch.contiguous_format), or use offload.optimizer: none"
                )

    def _first_states(
        self,
        optimizer: Any,
        group: dict[str, Any],
        param: Tensor,
        known: Mapping[int, Mapping[str, torch.dtype]] | None,
    ) -> dict[str, torch.dtype]:
        """What of a parameter will be on the disk: names and dtypes."""
        there = {**self._master_of(param), **self._unplaced(optimizer, param)}
        return {**there, **(states_of_step(optimizer, group, param) if known is None else known.get(id(param), {}))}

    def _chosen(self, optimizer: Any) -> list[tuple[dict[str, Any], Tensor]]:
        """What `ratio` of the optimizer's trained parameters is offloaded, with their groups."""
        trained = [(group, p) for group in optimizer.param_groups for p in group["params"] if self._may(p)]
        sizes = [self._record(p).layout.numel for _, p in trained]
        before = itertools.accumulate(sizes, initial=0)
        limit = self.offload.ratio * sum(sizes)
        return [entry for entry, start in zip(trained, before, strict=False) if start < limit]

    def _may(self, param: Tensor) -> bool:
        return param.requires_grad and param.ndim > 0 and find_record(param) is not None

    def _record(self, param: Tensor) -> ZeroParameter:
        known = find_record(param)
        assert known is not None
        return known

    def _master_of(self, param: Tensor) -> dict[str, torch.dtype]:
        known = self._record(param)
        return {_MASTER: param.dtype} if known.has_master and known.on_disk is None else {}

    def _unplaced(self, optimizer: Any, param: Tensor) -> dict[str, torch.dtype]:
        """The states that a parameter has, but no room on the disk: loaded, or made with the optimizer."""
        places = self._places.get(id(param), {})
        return {
            name: value.dtype
            for name, value in optimizer.state.get(param, {}).items()
            if name not in places and isinstance(value, Tensor) and value.shape == param.shape
        }

    def adopt(self, optimizer: Any) -> None:
        """Move states that were loaded, or made with the optimizer, to their places."""
        for key, places in self._places.items():
            param = self._kept[key]
            state = optimizer.state.get(param, {})
            for name, place in places.items():
                if isinstance(state.get(name), Tensor) and not _lies_at(state[name], place):
                    place.tensor.copy_(torch_compat.local_of(state[name]))
                    state[name] = shown_as(place.tensor, param)
            for place in places.values():
                place.release()


def _lies_at(value: Tensor, place: Place) -> bool:
    return torch_compat.local_of(value).data_ptr() == place.tensor.data_ptr()


def shown_as(rows: Tensor, param: Tensor) -> Tensor:
    """Rows of a state in the form in which an optimizer keeps them: cut as its parameter is."""
    return rows_like(rows, param) if isinstance(param, DTensor) else rows


def _form(room: tuple[Tensor, str, torch.dtype]) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(torch_compat.local_of(room[0]).shape), room[2]
