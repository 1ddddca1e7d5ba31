"""Resuming in the middle of an epoch, as scripts with `--checkpointing_steps` do it: the batches are those of no stop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

import hf_zero as zero
from tests.ranks import alone, on_ranks

NUM_ROWS, BATCH, EPOCHS, RANKS = 12, 2, 3, 2


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = torch.randn(4, generator=torch.Generator().manual_seed(number))
        return {"x": row, "y": row.sum() > 0, "number": number}


@dataclass
class Script:
    """The loop of the `*_no_trainer.py` scripts.

    Attributes:
        make: the accelerator.
        folder: of its checkpoints, `step_N` or `epoch_N`.
        loader: makes the loader.
        saves: at these steps; "epoch": at each epoch's end.
        limit: steps of an epoch; None: all.
        does_skip: whether it skips the batches of an epoch that had begun.
    """

    make: Callable[[], accelerate.Accelerator]
    folder: Path
    loader: Callable[[], DataLoader[Any]] = lambda: DataLoader(Rows(), batch_size=BATCH, shuffle=True)
    saves: Sequence[int] | str = ()
    limit: int | None = None
    does_skip: bool = True
    seen: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def run(self, resume: str = "") -> Script:
        """Train from the start, or from a checkpoint to the end."""
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = self.make()
        set_seed(7)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, self.loader())
        first, skipped, step = 0, None, 0
        if resume:
            accelerator.load_state(str(self.folder / resume))
            kind, number = resume.split("_")
            step = int(number) if kind == "step" else (int(number) + 1) * len(loader)
            first = step // len(loader)
            skipped = step % len(loader) if kind == "step" and self.does_skip else None
        for epoch in range(first, EPOCHS):
            rest = loader
            if skipped is not None and epoch == first:
                rest = accelerator.skip_first_batches(loader, skipped)
            for batch in itertools.islice(rest, self.limit):
                self.seen.append(batch["number"].tolist())
                loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"].long())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                self.losses.append(loss.item())
                step += 1
                if self.saves != "epoch" and step in self.saves:
                    accelerator.save_state(str(self.folder / f"step_{step}"))
            if self.saves == "epoch":
                accelerator.save_state(str(self.folder / f"epoch_{epoch}"))
        return self


def ddp() -> accelerate.Accelerator:
    return accelerate.Accelerator(cpu=True)


def with_zero(stage: int, **loading: Any) -> Callable[[], accelerate.Accelerator]:
    plugin = zero.ZeroPlugin(stage=stage, collectives="pairwise")
    config = DataLoaderConfiguration(**loading)
    return lambda: zero.ZeroAccelerator(zero_plugin=plugin, dataloader_config=config)


@on_ranks(RANKS, stage=[0, 3])
def test_batches_are_those_of_ddp_resumed(stage: int, tmp_path: Path) -> None:
    """In the first epoch. accelerate itself repeats its first order in every other."""
    make, folder = with_zero(stage), tmp_path / str(stage)
    wanted = Script(ddp, folder / "ddp", saves=(1,)).run()
    wanted_rest = Script(ddp, folder / "ddp").run("step_1")
    found = Script(make, folder / "ours", saves=(1, 2, 3, 7)).run()
    found_rest = Script(make, folder / "ours").run("step_1")
    assert found.seen == wanted.seen
    in_epoch = NUM_ROWS // BATCH // RANKS
    for rest, straight in ((wanted_rest, wanted), (found_rest, found)):
        assert rest.seen[: in_epoch - 1] == straight.seen[1:in_epoch]
        assert rest.losses[: in_epoch - 1] == straight.losses[1:in_epoch]
    assert found_rest.losses[: in_epoch - 1] == pytest.approx(wanted_rest.losses[: in_epoch - 1], rel=1e-5)
    for step in (2, 3, 7):
        rest = Script(make, folder / "ours").run(f"step_{step}")
        assert (rest.seen, rest.losses) == (found.seen[step:], found.losses[step:]), step


def weighted() -> DataLoader[Any]:
    sampler = WeightedRandomSampler(list(range(1, NUM_ROWS + 1)), NUM_ROWS)
    return DataLoader(Rows(), batch_size=BATCH, sampler=sampler)


def of_own_generator() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Rows(), batch_size=BATCH, shuffle=True, generator=generator)


def of_a_batch_sampler() -> DataLoader[Any]:
    return DataLoader(Rows(), batch_sampler=BatchSampler(RandomSampler(Rows()), BATCH, drop_last=False))


LOADERS = [Script.loader, weighted, of_own_generator, of_a_batch_sampler]
LOADINGS: list[dict[str, Any]] = [{}, {"dispatch_batches": True}, {"use_seedable_sampler": True}]


def resumes_as_without_a_stop(make: Callable[[], accelerate.Accelerator], folder: Path, loader: Any) -> None:
    straight = Script(make, folder, loader, saves=(1, 6)).run()
    for step in (1, 6, 7):
        rest = Script(make, folder, loader, saves=(7,)).run(f"step_{step}")
        assert (rest.seen, rest.losses) == (straight.seen[step:], straight.losses[step:]), step


@on_ranks(RANKS, loader=LOADERS[:2], loading=LOADINGS)
def test_every_sampler_draws_its_order_again(loader: Any, loading: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / f"{LOADERS.index(loader)}{LOADINGS.index(loading)}"
    resumes_as_without_a_stop(with_zero(2, **loading), folder, loader)


@alone(loader=LOADERS)
def test_every_sampler_draws_its_order_again_in_one_process(loader: Any, tmp_path: Path) -> None:
    resumes_as_without_a_stop(with_zero(2), tmp_path / f"{LOADERS.index(loader)}", loader)


@on_ranks(RANKS, loading=[{}, {"use_seedable_sampler": True}])
def test_epochs_that_are_broken_off_are_saved_between_their_orders(loading: dict[str, Any], tmp_path: Path) -> None:
    make, folder = with_zero(3, **loading), tmp_path / str(len(loading))
    straight = Script(make, folder, saves="epoch", limit=2).run()
    rest = Script(make, folder, saves="epoch", limit=2).run("epoch_0")
    assert (rest.seen, rest.losses) == (straight.seen[2:], straight.losses[2:])


@on_ranks(RANKS)
def test_script_that_skips_nothing_begins_the_epoch_again(tmp_path: Path) -> None:
    straight = Script(with_zero(3), tmp_path, saves=(4,)).run()
    rest = Script(with_zero(3), tmp_path, does_skip=False).run("step_4")
    assert rest.seen == straight.seen[3:]
