"""One rank of `hf-zero bench load`: loads a model with one engine, and makes one training step."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from hf_zero.bench.load.file_reads import ReadCount
from hf_zero.bench.load.run import Loading
from hf_zero.bench.processes import measure, options, private_bytes, report

_NUM_TOKENS = 16


class Engine:
    """Plain `from_pretrained` on every rank; what it needs is imported before it is timed.

    Args:
        folder: a checkpoint.
        dtype: of the weights.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder = folder
        self.dtype = dtype

    def load(self, **options: Any) -> Any:
        """The model."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype, **options)

    def step(self, model: Any, batch: torch.Tensor) -> float:
        """Train on `batch`, and free the gradients; its loss."""
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())


class Transformers(Engine):
    """The sharding of transformers itself, by the model's own plan for `fully_shard`."""

    def load(self, **options: Any) -> Any:
        """The model, with only this rank's rows."""
        return super().load(distributed_config={"fsdp_size": dist.get_world_size()}, **options)


class Fsdp2(Engine):
    """accelerate's FSDP2 with its own way of loading: the first rank reads the file, and sends each rank its rows."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__(folder, dtype)
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="transformer_based_wrap"
        )
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # transformers asks for it
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)

    def load(self, **options: Any) -> Any:
        """The model, with only this rank's rows; its optimizer comes with it, as accelerate wants."""
        model = super().load(**options)
        model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        return model

    def step(self, model: Any, batch: torch.Tensor) -> float:
        """Train on `batch` with the optimizer that was prepared."""
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class DeepSpeed(Engine):
    """Stage 3: `deepspeed.zero.Init`, which transformers enters when it finds a configuration."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__(folder, dtype)
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed  # type: ignore[import-not-found]
        from transformers.integrations import HfDeepSpeedConfig

        deepspeed.init_distributed("gloo")
        self.config = {
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": dtype is torch.bfloat16},
        }
        self.initialize = deepspeed.initialize
        self.kept = HfDeepSpeedConfig(self.config)  # transformers holds only a weak reference to it

    def step(self, model: Any, batch: torch.Tensor) -> float:
        """Train on `batch` with DeepSpeed's engine."""
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        engine, *_ = self.initialize(model=model, optimizer=optimizer, config=self.config)
        loss = engine(input_ids=batch, labels=batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())


class HfZero(Engine):
    """Stage 3 without masters, like the others, except that DeepSpeed keeps some under bfloat16."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__(folder, dtype)
        import hf_zero

        config = {"stage": 3, "master_dtype": "auto"}
        self.init = partial(hf_zero.Init, config)
        self.shard_model = partial(hf_zero.shard_model, config=config)

    def load(self, **options: Any) -> Any:
        """The model, with only this rank's rows."""
        with self.init():
            return super().load(**options)

    def step(self, model: Any, batch: torch.Tensor) -> float:
        """Train on `batch` with gathered units."""
        self.shard_model(model)
        return super().step(model, batch)


ENGINES: dict[str, type[Engine]] = {
    "plain": Engine,
    "transformers": Transformers,
    "fsdp2": Fsdp2,
    "deepspeed": DeepSpeed,
    "hf_zero": HfZero,
}


def warm_up(folder: Path) -> int:
    """Import what any load of this model imports; returns the size of its vocabulary."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(config)
    return int(config.get_text_config().vocab_size)


def load_and_step(engine: Engine, batch: torch.Tensor) -> Loading:
    """Load and train, and measure both; all ranks train on the same batch."""
    held = partial(private_bytes, dist.get_world_size())
    models: list[Any] = []
    gc.collect()
    before = held()
    with ReadCount() as reads:
        sample = measure(lambda: models.append(engine.load()), dist.barrier, held)
    start = time.perf_counter()
    loss = engine.step(models[0], batch)
    dist.barrier()
    ready_seconds = sample.seconds + time.perf_counter() - start
    gc.collect()
    dist.barrier()
    step_bytes = held() - before
    _trim()
    used_bytes = held() - before
    return Loading(sample.seconds, ready_seconds, sample.extra_bytes, step_bytes, used_bytes, reads.num_bytes, loss)


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def main() -> None:
    """Measure one engine; the findings go to the process that started this one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is measured is the host's memory
    chosen = options()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    folder = Path(chosen["folder"])
    num_words = warm_up(folder)
    engine = ENGINES[chosen["engine"]](folder, getattr(torch, chosen["dtype"]))
    batch = torch.arange(_NUM_TOKENS).remainder(num_words)[None]
    report(vars(load_and_step(engine, batch)))
    dist.barrier()
    os._exit(0)  # what is measured is the load, not tearing it down


if __name__ == "__main__":
    main()
