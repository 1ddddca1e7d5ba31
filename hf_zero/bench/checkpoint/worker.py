"""One rank of `hf-zero bench checkpoint`: saves, loads and exports one model with one engine."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero
from hf_zero.bench.processes import Sample, measure, options, report
from hf_zero.checkpoint.commit import StagedCheckpoint, verify
from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.manifest import Manifest
from hf_zero.checkpoint.model_state import read_model, write_model
from hf_zero.checkpoint.optimizer_state import LoadedState, capture, read_state
from hf_zero.checkpoint.ranks.background import background_of, wait_for
from hf_zero.checkpoint.ranks.cooperative import read_plan

dcp: Any = torch.distributed.checkpoint
_FULL = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)


def make_model(sizes: dict[str, int]) -> nn.Module:
    """A Llama, the same on every rank."""
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **sizes))
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW that has made a step, so that its state exists."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class Engine:
    """What every engine can do with a folder: `save`, `load`, `export`, and `save_async` if it has one.

    Args:
        sizes: of the model's config.
    """

    def __init__(self, sizes: dict[str, int]) -> None:
        self.model = make_model(sizes)
        self.optimizer = make_optimizer(self.model)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return dist.get_rank() == 0

    def save(self, folder: Path) -> None:
        """Save weights and optimizer state; they are on disk when this returns."""
        if self.is_first:
            self.export(folder)
            torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
            disk.sync_file(folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        """Load what `save` saved; each rank reads everything."""
        self.model.load_state_dict(load_file(folder / "model.safetensors"))
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))

    def export(self, folder: Path) -> None:
        """Write a folder for `from_pretrained`; it is on disk when this returns."""
        if self.is_first:
            self.model.save_pretrained(folder)  # type: ignore[operator]
            disk.sync_file(folder / "model.safetensors")

    save_async: Callable[[Path], Callable[[], object]] | None = None


class HfZero(Engine):
    """Stage 3."""

    def __init__(self, sizes: dict[str, int]) -> None:
        with hf_zero.Init({"stage": 3, "async_save": True}):
            self.model = make_model(sizes)
        self.engine = hf_zero.shard_model(self.model)
        self.optimizer = make_optimizer(self.model)
        self.world = self.engine.world

    def _save(self, folder: Path, is_async: bool) -> None:
        staged = StagedCheckpoint(folder, self.world, background_of(self.world) if is_async else None)
        write_model(self.model, staged.folder, self.world)
        plan, sources, content = capture(self.optimizer, self.model, "optimizer")
        staged.write(plan, sources)
        if self.is_first:
            disk.write_file(staged.folder / "optimizer.json", json.dumps(content).encode(), syncs=False)
        staged.commit(Manifest(step=1, world_size=self.world.num_ranks, stage=3))

    def save(self, folder: Path) -> None:
        """Write a committed checkpoint with checksums."""
        self._save(folder, is_async=False)

    def save_async(self, folder: Path) -> Callable[[], object]:
        """Return as soon as training may continue."""
        self._save(folder, is_async=True)
        return lambda: wait_for(self.world)

    def load(self, folder: Path) -> None:
        """Verify all checksums, then load."""
        verify(folder, self.world)
        read_model(self.model, folder, self.world)
        plan, sources = LoadedState(read_state(folder, "optimizer"), self.optimizer, self.model).install()
        read_plan([file.name for file in plan.files], plan.pieces, sources, folder, self.world)

    def export(self, folder: Path) -> None:
        """Every rank writes its rows."""
        self.model.save_pretrained(folder)  # type: ignore[operator]


class Fsdp2(Engine):
    """`fully_shard`, saved by torch.distributed.checkpoint."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.model = make_model(sizes)
        for layer in self.model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = make_optimizer(self.model)

    def _state(self) -> dict[str, Any]:
        model, optimizer = dcp_state.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        """Write one file per rank, cut as the ranks are; synced."""
        dcp.save(self._state(), checkpoint_id=folder)

    def save_async(self, folder: Path) -> Callable[[], object]:
        """Use torch's own asynchronous save."""
        future: Any = dcp.async_save(self._state(), checkpoint_id=folder)
        return lambda: future.result()

    def load(self, folder: Path) -> None:
        """Load in place."""
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        dcp_state.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def export(self, folder: Path) -> None:
        """Gather on rank 0, which writes."""
        state = dcp_state.get_model_state_dict(self.model, options=_FULL)
        if self.is_first:
            folder.mkdir(exist_ok=True)
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
            disk.sync_file(folder / "model.safetensors")


class Fsdp2Full(Fsdp2):
    """`fully_shard`, whole state dicts on rank 0."""

    save_async = None  # type: ignore[assignment]

    def save(self, folder: Path) -> None:
        """Gather, then write on rank 0; synced."""
        model, optimizer = dcp_state.get_state_dict(self.model, self.optimizer, options=_FULL)
        if self.is_first:
            folder.mkdir(exist_ok=True)
            torch.save({"model": model, "optimizer": optimizer}, folder / "all.pt")
            disk.sync_file(folder / "all.pt")

    def load(self, folder: Path) -> None:
        """Map the whole file on every rank, and load from it."""
        saved = torch.load(folder / "all.pt", weights_only=True, mmap=True)
        dcp_state.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=dcp_state.StateDictOptions(full_state_dict=True),
        )


ENGINES: dict[str, type[Engine]] = {"plain": Engine, "hf_zero": HfZero, "fsdp2-dcp": Fsdp2, "fsdp2-full": Fsdp2Full}


def main() -> None:
    """Measure one engine; samples go to the process that started this one."""
    chosen = options()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    engine, folder = ENGINES[chosen["engine"]](chosen["sizes"]), Path(chosen["folder"])
    samples: dict[str, Sample] = {}
    gc.collect()
    for name, work in (("save", engine.save), ("load", engine.load), ("export", engine.export)):
        place = folder / ("export" if name == "export" else "save")
        samples[name] = measure(lambda work=work, place=place: work(place), dist.barrier)  # type: ignore[misc]
        gc.collect()
    for number in (1, 2) if engine.save_async is not None else ():
        waits: list[Callable[[], object]] = []
        place = folder / f"async{number}"
        samples[f"stall of save {number}"] = measure(lambda: waits.append(engine.save_async(place)), dist.barrier)  # type: ignore[misc]  # noqa: B023
        waits[0]()
        dist.barrier()
    report(samples)
    dist.barrier()
    if engine.is_first:
        shutil.rmtree(folder)
    dist.destroy_process_group()
    os._exit(0)  # what is measured is the training's memory, not tearing it down


if __name__ == "__main__":
    main()
