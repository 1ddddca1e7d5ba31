"""The order of a loader's samples: recorded in a checkpoint, and resumed, even in the middle of an epoch.

[Note: an epoch is drawn once] A sampler draws the order of a whole epoch from a generator when the epoch begins. So a
checkpoint has the generator's state of that moment beside the present one: whoever continues the epoch draws the same order
again, and the next epoch finds the generator as the first draw has left it. How far an epoch has come decides which state is
restored (`Progress`). accelerate itself saves neither: it repeats the order of its first epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler, SkipBatchSampler
from torch import Tensor
from torch.utils.data import BatchSampler

from hf_zero.changes import Changes

_ATTRIBUTE = "_zero_epoch"
_changes = Changes()


class Progress(Enum):
    """How far a loader's epoch had come when a state was saved."""

    BETWEEN = "between epochs"  # none has begun, or the last one was iterated to its end
    UNDER_WAY = "under way"
    AT_LAST_BATCH = "at the last batch"  # whose step was done: loops go on with the next epoch
    BROKEN_OFF = "broken off"  # nobody iterates any more


@dataclass(eq=False)
class Epoch:
    """The epoch of a prepared loader, kept as an attribute of it, and of the rest that it is continued with.

    Attributes:
        loader: the prepared one.
        begun: what its order was drawn from; None before the first epoch.
        source: what is iterated, the loader or a rest; None if nothing is.
        is_complete: whether it has come to its end.
        resumed: what `order_of` recorded, from loading it until the next epoch begins.
        continued: what the order of a rest was drawn from, until that is iterated.
    """

    loader: Any
    begun: dict[str, str] | None = None
    source: Any = None
    is_complete: bool = False
    resumed: Mapping[str, Any] | None = None
    continued: dict[str, str] | None = None

    @property
    def progress(self) -> Progress:
        """How far it has come."""
        if self.begun is None or self.is_complete:
            return Progress.BETWEEN
        if self.source is None:
            return Progress.BROKEN_OFF
        return Progress.AT_LAST_BATCH if self.source.end_of_dataloader else Progress.UNDER_WAY

    def batches(self, source: Any, found: Iterator[Any]) -> Iterator[Any]:
        """The batches that accelerate finds for `source`, the loader or a rest of it."""
        is_rest, is_resumed = source is not self.loader, self.resumed is not None
        self.begun = (self.continued if is_rest else None) or _drawn_from(self.loader)
        self.resumed = self.continued = None
        self.source, self.is_complete = source, False
        try:
            yield from found
            self.is_complete = True
            if is_rest and is_resumed:
                self.loader.iteration = max(self.loader.iteration, source.iteration)
        finally:
            self.source = None


def watch(loader: Any) -> Any:
    """Let a loader that accelerate has prepared remember what the order of each epoch is drawn from; returns it."""
    if isinstance(loader, DataLoaderShard | DataLoaderDispatcher) and _epoch_of(loader) is None:
        setattr(loader, _ATTRIBUTE, Epoch(loader))
    if not _changes:
        _changes.keep()
        for each in (DataLoaderShard, DataLoaderDispatcher):
            _changes.wrap(each, "__iter__", _iterate)
    return loader


def _iterate(original: Any, loader: Any) -> Iterator[Any]:
    epoch = _epoch_of(loader)
    batches: Iterator[Any] = original(loader)
    return batches if epoch is None else epoch.batches(loader, batches)


def _epoch_of(loader: Any) -> Epoch | None:
    epoch: Epoch | None = vars(loader).get(_ATTRIBUTE)
    return epoch


def _shuffling(loader: Any) -> tuple[Any, torch.Generator | None]:
    """A loader's sampler, if it is known, and the generator that shuffles alike on all ranks."""
    found = getattr(loader, "batch_sampler", None)
    found = loader.sampler if found is None or isinstance(getattr(loader, "sampler", None), BatchSampler) else found
    while found is not None and not hasattr(found, "sampler") and hasattr(found, "batch_sampler"):
        found = found.batch_sampler  # a rank's share of the batches
    sampler = getattr(found, "sampler", None)
    candidates = (getattr(loader, "synchronized_generator", None), getattr(sampler, "generator", None))
    return sampler, next((each for each in candidates if isinstance(each, torch.Generator)), None)


def _drawn_from(loader: Any) -> dict[str, str]:
    """The present states of what a loader's next order is drawn from; none where a seed and the epoch's number decide."""
    sampler, generator = _shuffling(loader)
    if isinstance(sampler, SeedableRandomSampler):
        return {}
    if generator is not None:
        return {"generator": _text(generator.get_state())}
    # Alone, and where one rank deals out batches, samplers draw from torch's own generator.
    return {"torch": _text(torch.get_rng_state())} if hasattr(sampler, "generator") else {}


def _text(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _state(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8, device="cpu")


def order_of(loader: Any) -> dict[str, Any]:
    """What decides the order of a loader's samples: its epoch, how far that has come, and how it is shuffled."""
    epoch = _epoch_of(loader)
    progress = Progress.BETWEEN if epoch is None else epoch.progress
    order: dict[str, Any] = {"epoch": getattr(loader, "iteration", 0), "progress": progress.value}
    if epoch is not None and progress is not Progress.BETWEEN:
        order["begun"] = epoch.begun
    sampler, generator = _shuffling(loader)
    if isinstance(sampler, SeedableRandomSampler):
        order["seed"] = sampler.initial_seed
    elif generator is not None:
        order["generator"] = _text(generator.get_state())
    return order


def restore_order(loader: Any, order: Mapping[str, Any]) -> None:
    """Give a prepared loader the order that `order_of` has recorded.

    An epoch that was under way is begun again. `skip_first_batches` continues it, and one that was broken off, too.
    """
    sampler, generator = _shuffling(loader)
    progress = Progress(order.get("progress", Progress.BETWEEN.value))
    loader.iteration = order["epoch"] + (progress is Progress.AT_LAST_BATCH)
    if isinstance(sampler, SeedableRandomSampler) and "seed" in order:
        sampler.initial_seed = order["seed"]
        sampler.set_epoch(loader.iteration)
    elif generator is not None:
        states = order["begun"] if progress is Progress.UNDER_WAY else order
        if "generator" in states:
            generator.set_state(_state(states["generator"]))
    epoch = _epoch_of(loader)
    if epoch is not None:
        epoch.resumed = order


def continue_epoch(loader: Any, rest: Any, num_batches: int) -> None:
    """Let `rest` continue the epoch in which a state was saved as if there had been no stop, if the loader is in it.

    Args:
        loader: prepared; its state may have been loaded.
        rest: what `skip_first_batches` returned.
        num_batches: how many it skips.
    """
    epoch = _epoch_of(loader)
    if epoch is None:
        return
    setattr(rest, _ATTRIBUTE, epoch)
    order = epoch.resumed
    if order is None or "begun" not in order or (num_batches == 0 and order["progress"] != Progress.UNDER_WAY.value):
        return  # it is a new epoch
    begun, base = order["begun"], rest.base_dataloader
    epoch.continued = begun
    rest.iteration = order["epoch"]
    rest.rng_types = None  # the ranks' states were made alike when it began
    generator = _shuffling(loader)[1]
    if generator is not None and "generator" in begun:
        generator.set_state(_state(begun["generator"]))
    is_seed_global = base.generator is None
    if is_seed_global:
        # Starting an epoch draws a seed for worker processes. This epoch drew it before the random states were saved.
        base.generator = torch.Generator().manual_seed(torch.initial_seed())
    skipping = next((each for each in (base.sampler, base.batch_sampler) if isinstance(each, SkipBatchSampler)), None)
    if skipping is None:
        return
    if isinstance(rest, DataLoaderDispatcher) and not rest.split_batches:
        skipping.skip_batches = num_batches * rest.state.num_processes  # accelerate counts one rank's only
    if generator is None and "torch" in begun:
        skipping.batch_sampler = _DrawnAgain(skipping.batch_sampler, _state(begun["torch"]), is_seed_global)


class _DrawnAgain:
    """A batch sampler whose order is drawn from an earlier state of torch's own generator, which finds no difference after it.

    Args:
        inner: the sampler.
        state: of torch's generator when the epoch began.
        is_seed_global: whether a seed for worker processes was drawn from it first.
    """

    def __init__(self, inner: Any, state: Tensor, is_seed_global: bool) -> None:
        self._inner, self._state, self._is_seed_global = inner, state, is_seed_global

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._inner)
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(self._state)
            if self._is_seed_global:
                torch.empty((), dtype=torch.int64, device="cpu").random_()
            first = list(itertools.islice(batches, 1))
        yield from first
        yield from batches

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
