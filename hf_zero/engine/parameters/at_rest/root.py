"""What is at rest: tensors of which a rank may hold a part, and views of them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from hf_zero.engine.ranks.world import World
from hf_zero.layout import Cut


class AtRest:
    """A tensor of which this rank may hold only a part, or a view of one."""

    @property
    @abstractmethod
    def root(self) -> Root:
        """What holds the memory."""

    @abstractmethod
    def of(self, whole: Tensor) -> Tensor:
        """What this shows of the whole of its root: a view."""

    @abstractmethod
    def taken(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func`, an operator that takes views, gives of it."""

    @abstractmethod
    def alias(self) -> Tensor:
        """Itself, outside the graph."""

    @abstractmethod
    def describe(self) -> str:
        """For errors."""


class Root(AtRest):
    """A tensor of which every rank holds its elements."""

    rows: Tensor
    place: torch.UntypedStorage  # tells where the whole would be, see `addresses`

    @property
    @abstractmethod
    def held(self) -> tuple[World, Cut]:
        """The ranks, and what this one has of it."""

    @property
    @abstractmethod
    def shown(self) -> Tensor | None:
        """The plain whole that stands for it just now, within `GatheredParameters`."""

    @abstractmethod
    def like(self, rows: Tensor) -> Tensor:
        """A tensor of which this rank holds `rows`, cut as this one is."""

    @property
    @abstractmethod
    def param(self) -> Tensor | None:
        """The parameter that this is, or is an alias of."""

    @abstractmethod
    def before_edit(self, mark: int = 0) -> None:
        """The rows are about to be changed by hand, on every rank; `mark` is that of the call, see `lineage.mark_of`."""

    @abstractmethod
    def after_edit(self) -> None:
        """What changes the rows by hand has been begun, on the current stream of a device."""

    @abstractmethod
    def whole_at_hand(self) -> Tensor | None:
        """The whole, if this rank has it for modules to compute with, so that it need not ask the others."""

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds a part of it only."""
        _, cut = self.held
        return cut.rows.num_ranks > 1 or cut.tensor is not None

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's elements of a whole tensor, contiguous."""
        return self.held[1].of(whole).contiguous() if self.is_cut else whole
