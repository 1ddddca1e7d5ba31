"""The order of a loader's samples: recorded in a checkpoint, and resumed, even in the middle of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import RandomSampler

logger = logging.getLogger(__name__)


def order_of(loader: Any) -> dict[str, Any]:
    """What decides the order of a loader's samples: its epoch, and how they are shuffled in it."""
    order: dict[str, Any] = {"epoch": getattr(loader, "iteration", 0)}
    sampler, generator = _shuffling(loader)
    if isinstance(sampler, SeedableRandomSampler):
        order["seed"] = sampler.initial_seed
    elif generator is not None:
        order["generator"] = bytes(generator.get_state().tolist()).hex()
    return order


def _shuffling(loader: Any) -> tuple[Any, torch.Generator | None]:
    """A loader's sampler, if it is known, and the generator that shuffles alike on all ranks."""
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    candidates = (getattr(loader, "synchronized_generator", None), getattr(sampler, "generator", None))
    return sampler, next((each for each in candidates if isinstance(each, torch.Generator)), None)


def restore_order(loader: Any, order: Mapping[str, Any], number: int, is_first: bool) -> None:
    """Give a prepared loader the order that `order_of` has recorded.

    Args:
        loader: `number` among the prepared ones.
        order: of the loader that was saved.
        number: for the warning.
        is_first: whether this rank gives the warning that batches of an epoch that has begun cannot be skipped.
    """
    sampler, generator = _shuffling(loader)
    loader.iteration = order["epoch"]
    if isinstance(sampler, SeedableRandomSampler) and "seed" in order:
        sampler.initial_seed = order["seed"]
        sampler.set_epoch(order["epoch"])
        return
    if generator is not None and "generator" in order:
        generator.set_state(torch.tensor(list(bytes.fromhex(order["generator"])), dtype=torch.uint8, device="cpu"))
    if is_first and (generator is not None or isinstance(sampler, RandomSampler)):
        logger.warning(
            "loader %d shuffles in an order that cannot be repeated in the middle of an epoch: train with "
            "DataLoaderConfiguration(use_seedable_sampler=True) to skip batches of an epoch that has begun",
            number,
        )


def continue_epoch(loader: Any, rest: Any) -> None:
    """Let `rest`, the remaining batches of the epoch in which a state was saved, continue as if there had been no stop.

    Args:
        loader: prepared, its state loaded.
        rest: what `skip_first_batches` returned.
    """
    if rest.base_dataloader.generator is None:
        # Starting an epoch draws a seed for worker processes. This epoch drew it before the random states were saved.
        rest.base_dataloader.generator = torch.Generator().manual_seed(torch.initial_seed())
    end, next_epoch = rest.end, loader.iteration + 1

    def end_epoch() -> None:
        end()
        loader.iteration = max(loader.iteration, next_epoch)

    rest.end = end_epoch
