"""The engines that `hf-zero bench step` trains with, each as its users would set it up."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero
from hf_zero.comm.exchange import Exchange
from hf_zero.comm.ledger import Ledger

_LEARNING_RATE = 1e-4
_EXCHANGES = ("host", "pairwise", "native", "none", "disk")
_ZERO, _DEEPSPEED = (tuple(f"{name}{stage}" for stage in (1, 2, 3)) for name in ("zero", "deepspeed"))
_SHARING = {"tp": (*_ZERO, "fsdp2"), "sp": (*_ZERO, *_DEEPSPEED), "cp": _ZERO}  # who can, by what ranks share
_PACKAGES = {"fairscale": "fairscale", "deepspeed": "deepspeed"}  # by the first word of an engine's name


@dataclass
class Training:
    """A model under one engine, ready to train.

    Attributes:
        model: what is called with a batch.
        backward: takes the loss.
        step: updates the parameters with AdamW and drops the gradients.
        ledger: what counts the exchanges; None if the engine has none.
        context: what the forward runs in.
        no_sync: what forward and backward of a micro-batch run in that is not the last of its step.
        between: done after such a micro-batch.
        num_alike: ranks next to each other that see the same batch, of which each has some layers' parts, or a slice.
    """

    model: Callable[..., Any]
    backward: Callable[[Tensor], object]
    step: Callable[[], None]
    ledger: Ledger | None = None
    context: Callable[[], contextlib.AbstractContextManager[object]] = field(default=contextlib.nullcontext)
    no_sync: Callable[[], contextlib.AbstractContextManager[object]] = field(default=contextlib.nullcontext)
    between: Callable[[], object] = field(default=lambda: None)
    num_alike: int = 1


@dataclass(frozen=True)
class Setup:
    """What every engine is given.

    Attributes:
        make_model: builds the model, the same on every rank, on the CPU, in fp32.
        device: where it trains.
        dtype: to compute in; parameters and optimizer states are fp32 in any case.
        batch_size: sequences per rank.
        offload: what rests elsewhere under hf_zero, as its configuration says it.
        accumulation: micro-batches a step.
    """

    make_model: Callable[[], nn.Module]
    device: torch.device
    dtype: torch.dtype
    batch_size: int
    offload: object = "none"
    accumulation: int = 1

    @property
    def is_mixed(self) -> bool:
        """Whether the compute dtype differs from the parameters' dtype."""
        return self.dtype != torch.float32

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Mixed precision for engines that have none of their own."""
        return torch.autocast(self.device.type, self.dtype) if self.is_mixed else contextlib.nullcontext()


def missing_package(engine: str) -> str | None:
    """The pip line that adds what `engine` needs; None if nothing is missing."""
    for word, package in _PACKAGES.items():
        if engine.startswith(word) and importlib.util.find_spec(word) is None:
            return f"pip install {package}"
    return None


def known(engine: str) -> bool:
    """Whether there is such an engine; zero0 to zero3 may name their exchange, as in zero3:pairwise, "none" or "disk".

    zero1:tp2 to zero3:tp2, and fsdp2:tp2, share layers between two ranks; zero1:sp2, zero1:cp2, and deepspeed1:sp2, share each
    sequence; so with other numbers. zero3:pairwise:keep=64MiB
    keeps so many bytes of units whole from their forward to their backward; so with keep=none, keep=all, keep=auto.
    """
    engine, kept = _split_kept(engine)
    name, _, exchange = engine.partition(":")
    axis = _axis(exchange)[0]
    if kept is not None and (name != "zero3" or _reshards(kept) is None or axis):
        return False
    if axis:
        return name in _SHARING[axis]
    return name in ENGINES and (not exchange or (name[4:].isdigit() and exchange in _EXCHANGES))


def _split_kept(engine: str) -> tuple[str, str | None]:
    """An engine, and how much it is to keep."""
    plain, found, kept = engine.partition(":keep=")
    return plain, kept if found else None


def _reshards(kept: str) -> bool | int | str | None:
    """The value of `reshard_after_forward` that keeps so much; None for what is no size."""
    words: dict[str, bool | str] = {"none": True, "all": False, "auto": "auto"}
    if kept in words:
        return words[kept]
    with contextlib.suppress(hf_zero.ConfigError):
        return hf_zero.ZeroConfig(reshard_after_forward=kept).reshard_after_forward  # type: ignore[arg-type]
    return None


def _axis(exchange: str) -> tuple[str, int]:
    """Of "sp2": how ranks share a batch, and how many do; "" for an exchange."""
    name, size = exchange[:2], exchange[2:]
    return (name, int(size)) if name in _SHARING and size.isdigit() and int(size) > 1 else ("", 1)


def num_alike(engine: str) -> int:
    """Ranks next to each other that see the same batch under `engine`."""
    return _axis(engine.partition(":")[2])[1]


def build(engine: str, setup: Setup) -> Training:
    """Set up `engine`; called by all ranks together."""
    engine, kept = _split_kept(engine)
    name, _, exchange = engine.partition(":")
    axis, size = _axis(exchange)
    if axis == "tp":
        return _tensor_parallel(name, size, setup)
    if axis and name.startswith("deepspeed"):
        return _ulysses(int(name[-1]), size, setup)
    if axis:
        return _hf_zero(int(name[4:]), "pairwise", setup, axes={f"{axis}_size": size})
    if name.startswith("zero") and name[4:].isdigit():
        return _hf_zero(int(name[4:]), exchange or "auto", setup, "auto" if kept is None else kept)
    return ENGINES[name](setup)


def _trained(params: Iterator[nn.Parameter]) -> list[nn.Parameter]:
    return [param for param in params if param.requires_grad]


def _adamw(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_trained(params), lr=_LEARNING_RATE, fused=True)


def _training(
    model: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    setup: Setup,
    clear: Callable[[], object] | None = None,
    sync: Callable[[], object] | None = None,
) -> Training:
    def step() -> None:
        optimizer.step()
        (clear or optimizer.zero_grad)()
        if sync is not None:
            sync()

    def backward(loss: Tensor) -> None:
        torch.autograd.backward(loss / setup.accumulation if setup.accumulation > 1 else loss)

    no_sync = getattr(model, "no_sync", contextlib.nullcontext)
    return Training(model, backward, step, context=setup.autocast, no_sync=no_sync)


def _local(setup: Setup) -> Training:
    """Nothing is exchanged; the ranks only wait for each other at every step, as the others do."""
    model = setup.make_model().to(setup.device)
    return _training(model, _adamw(model.parameters()), setup, sync=dist.barrier)


def _ddp(setup: Setup) -> Training:
    model = nn.parallel.DistributedDataParallel(setup.make_model().to(setup.device))
    return _training(model, _adamw(model.parameters()), setup)


def _hf_zero(
    stage: int, exchange: str, setup: Setup, kept: str = "auto", axes: dict[str, int] | None = None
) -> Training:
    """Set up hf_zero.

    With the exchange "none", every rank goes its own way: what is left is the cost of the engine itself. With "disk", ranks
    exchange pairwise, and all that can be offloaded is on a disk, in the folder for temporary files. `kept` says how much stays
    whole from a forward to its backward, see `known`. `axes` are sizes of the configuration.
    """
    config: dict[str, Any] = {"stage": stage, "compute_dtype": str(setup.dtype).removeprefix("torch.")}
    config["offload"] = setup.offload
    config["reshard_after_forward"] = _reshards(kept)
    config["collectives"] = "pairwise" if exchange in ("none", "disk") else exchange
    config |= axes or {}
    if exchange == "disk":
        parameters = "disk" if stage == 3 else "none"
        config["offload"] = {"optimizer": "disk", "parameters": parameters, "path": tempfile.gettempdir()}
    with hf_zero.Init(config):
        model = setup.make_model()
    model = model.to(setup.device)
    engine = hf_zero.shard_model(model)
    if exchange == "none":
        for kind in ("gather", "reduce_scatter"):
            setattr(engine.world.shards, kind, lambda *_: Exchange("nothing", 0.0))
    training = _training(model, _adamw(model.parameters()), setup)
    training.ledger, training.context, training.no_sync = engine.world.ledger, contextlib.nullcontext, engine.no_sync
    training.num_alike = math.prod((axes or {}).values())
    return training


def _tensor_parallel(name: str, size: int, setup: Setup) -> Training:
    """Tensor parallelism of transformers with hf_zero, or with FSDP2 as transformers combines them, of a saved model."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folders)
        made = setup.make_model()
        if dist.get_rank() == 0:
            made.save_pretrained(folders[0])  # type: ignore[operator]
        is_checkpointed = made.is_gradient_checkpointing
        del made
        dist.barrier()
        options: dict[str, Any] = {}
        if name == "fsdp2":
            shards = dist.get_world_size() // size
            options["distributed_config"] = DistributedConfig(tp_size=size, fsdp_size=shards)
        else:
            dtype = str(setup.dtype).removeprefix("torch.")
            config = {"stage": int(name[4:]), "compute_dtype": dtype, "tp_size": size, "collectives": "pairwise"}
            stack.enter_context(hf_zero.Init(config))
        model = AutoModelForCausalLM.from_pretrained(folders[0], **options).train()
        dist.barrier()
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    engine = None if name == "fsdp2" else hf_zero.shard_model(model)
    training = _training(model, _adamw(model.parameters()), setup)
    training.num_alike = size
    if engine is not None:
        training.ledger, training.context = engine.world.ledger, contextlib.nullcontext
    return training


def _fsdp2(reshards: bool, setup: Setup) -> Training:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = setup.make_model().to(setup.device)
    policy = MixedPrecisionPolicy(setup.dtype, torch.float32) if setup.is_mixed else MixedPrecisionPolicy()
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for block in [module for module in model.modules() if type(module).__name__ in blocks]:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshards)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshards)
    training = _training(model, _adamw(model.parameters()), setup)
    training.context = contextlib.nullcontext

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        yield
        model.set_requires_gradient_sync(True)  # type: ignore[operator]

    training.no_sync = no_sync
    return training


def _zero_redundancy_optimizer(setup: Setup) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(setup.make_model().to(setup.device))
    optimizer = ZeroRedundancyOptimizer(_trained(model.parameters()), torch.optim.AdamW, lr=_LEARNING_RATE, fused=True)
    return _training(model, optimizer, setup)


def _fairscale(shards_gradients: bool, setup: Setup) -> Training:
    fairscale = importlib.import_module("fairscale.optim.oss")
    model = setup.make_model().to(setup.device)
    optimizer = fairscale.OSS(_trained(model.parameters()), torch.optim.AdamW, lr=_LEARNING_RATE, fused=True)
    if not shards_gradients:
        return _training(nn.parallel.DistributedDataParallel(model), optimizer, setup)
    sharded = importlib.import_module("fairscale.nn.data_parallel").ShardedDataParallel(model, optimizer)
    # The optimizer's own `zero_grad` would take gradients out of the buckets that fairscale reduces.
    return _training(sharded, optimizer, setup, clear=partial(sharded.zero_grad, set_to_none=True))


def _deepspeed(stage: int, setup: Setup) -> Training:
    model = setup.make_model()
    engine = _deepspeed_engine(stage, model, setup, {"train_micro_batch_size_per_gpu": setup.batch_size})
    return Training(engine, engine.backward, engine.step, between=engine.step)


def _deepspeed_engine(stage: int, model: nn.Module, setup: Setup, batches: dict[str, int], **more: Any) -> Any:
    config = {
        **batches,
        "gradient_accumulation_steps": setup.accumulation,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": setup.is_mixed},
    }
    optimizer = _adamw(model.parameters())
    return importlib.import_module("deepspeed").initialize(model=model, optimizer=optimizer, config=config, **more)[0]


def _ulysses(stage: int, size: int, setup: Setup) -> Training:
    """Sequences shared by DeepSpeed's Ulysses, as its users do it: labels shifted before slicing, and a weighted loss."""
    ulysses = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").UlyssesSPAttentionHF
    importlib.import_module("deepspeed").init_distributed(dist_backend=dist.get_backend())
    model: Any = setup.make_model()
    attention = model.config._attn_implementation
    groups = ulysses.register_with_transformers(model, attention, size, setup.batch_size)
    batches = {
        "train_micro_batch_size_per_gpu": setup.batch_size,
        "train_batch_size": setup.batch_size * dist.get_world_size() // size,
    }
    engine = _deepspeed_engine(stage, model, setup, batches, mpu=groups)
    group, rank = groups.get_sequence_parallel_group(), groups.get_sequence_parallel_rank()

    def forward(input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        ids, positions, shifted = (
            each.chunk(size, dim=1)[rank].contiguous() for each in (input_ids, positions, shifted)
        )
        loss = engine(input_ids=ids, position_ids=positions, shift_labels=shifted, labels=shifted).loss
        num_tokens = (shifted != -100).sum()
        whole = torch.stack([loss.detach() * num_tokens, num_tokens.to(loss.dtype)])
        dist.all_reduce(whole, group=group)
        own = loss * num_tokens / whole[1] * size  # of gradients, DeepSpeed takes the mean over all ranks
        return SimpleNamespace(loss=whole[0] / whole[1] + own - own.detach())

    return Training(forward, engine.backward, engine.step, num_alike=size)


ENGINES: dict[str, Callable[[Setup], Training]] = {
    "local": _local,
    "ddp": _ddp,
    **{f"zero{stage}": partial(_hf_zero, stage, "auto") for stage in range(4)},
    "fsdp2": partial(_fsdp2, True),
    "fsdp2-noreshard": partial(_fsdp2, False),
    "zero-redundancy-optimizer": _zero_redundancy_optimizer,
    "fairscale-oss": partial(_fairscale, False),
    "fairscale-sdp": partial(_fairscale, True),
    **{f"deepspeed{stage}": partial(_deepspeed, stage) for stage in (1, 2, 3)},
}
