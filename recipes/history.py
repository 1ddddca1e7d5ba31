"""The loss and the memory of a run by its steps: a callback for the Trainer, `log` for a loop of your own."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import TrainerCallback


class History(TrainerCallback):
    """Remembers what is logged; `finish` prints it in three lines and draws it.

    Args:
        plot: draw `history.png` at the end, with matplotlib.
    """

    def __init__(self, plot: bool = False) -> None:
        if plot and importlib.util.find_spec("matplotlib") is None:  # said before the run, not after it
            raise SystemExit("--plot draws with matplotlib: pip install matplotlib")
        self._plot = plot
        self._before_mib = memory_mib()
        self._started_s = time.monotonic()
        self._ended_s = self._started_s
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.memory_mib: list[float] = []  # of this rank, more than before the model was made

    def log(self, step: int, loss: float) -> None:
        """Remember the loss of a step, and what this rank holds now."""
        self.steps.append(step)
        self.losses.append(loss)
        self.memory_mib.append(memory_mib() - self._before_mib)
        self._ended_s = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """What the Trainer calls."""
        if logs and "loss" in logs:
            self.log(state.global_step, float(logs["loss"]))

    def finish(self, folder: str) -> None:
        """Print the run in three lines, and draw it, on rank 0."""
        if (dist.is_initialized() and dist.get_rank() > 0) or not self.steps:
            return
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        seconds = self._ended_s - self._started_s
        print(f"\ntrained: {self.steps[-1]} steps in {seconds:.0f} s, world size {num_ranks}, in {folder}")
        print(f"loss: {self.losses[0]:.4f} -> {self.losses[-1]:.4f}")
        print(f"memory: at most {max(self.memory_mib):.0f} MiB a rank more than before the model", flush=True)
        if self._plot:
            print(f"plot: {self.draw(Path(folder))}", flush=True)

    def draw(self, folder: Path) -> Path:
        """Loss and memory by step, as `history.png` in a folder."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, (loss, memory) = pyplot.subplots(2, sharex=True, figsize=(7, 5))
        loss.plot(self.steps, self.losses)
        loss.set_ylabel("loss")
        memory.plot(self.steps, self.memory_mib)
        memory.set(xlabel="step", ylabel="MiB a rank", ylim=(0, None))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "history.png"
        figure.savefig(path, dpi=120, bbox_inches="tight")
        pyplot.close(figure)
        return path


def memory_mib() -> float:
    """What this rank holds: the most so far on an accelerator; else its own memory now, and its part of shared memory."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated() / 2**20
    now = psutil.Process().memory_full_info()
    return getattr(now, "pss", now.uss) / 2**20
