"""ZeRO for custom loops on accelerate: `ZeroPlugin`, `ZeroAccelerator`."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.comm.groups.process_groups import default_group
from hf_zero.config.launched import tell_where_script_differs
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.engine import engine_of, live_engines
from hf_zero.engine.parameters.replaced import current
from hf_zero.engine.units.grouping import find_parameters
from hf_zero.errors import ConfigError, PartitionError, UsageError
from hf_zero.integrations.accelerate.checkpoint import load_state, offer_optimizers, save_state, world_of_accelerator
from hf_zero.integrations.accelerate.data_order import continue_epoch, watch
from hf_zero.integrations.accelerate.ddp_options import with_ddp_options
from hf_zero.integrations.accelerate.precision import scale_loss, with_mixed_precision
from hf_zero.integrations.accelerate.tensor_axis import (
    also_on_cpus,
    asked_for,
    gather_each_batch_once,
    num_processes,
    parallelism_of,
    ranks_of_a_batch,
    sharding_batches,
    with_axes,
)
from hf_zero.optim.optimizers import rebind_optimizer
from hf_zero.parameters import parameters_of
from hf_zero.sharding.shard_model import shard_model

_DATA_PARALLEL = ("dp_replicate", "dp_shard")  # axes of accelerate's mesh
_OTHER_PLUGINS = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin")
_UNSUPPORTED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class ZeroPlugin:
    """The configuration of a `ZeroAccelerator`.

    Args:
        config: a `ZeroConfig`, a stage, a mapping, a path; None for keywords alone, or the file that HF_ZERO_CONFIG names.
        mesh: the ranks, as for `shard_model`; by default those of accelerate's `ParallelismConfig`, or all.
        **overrides: fields of `ZeroConfig`, such as `stage=2`.

    Raises:
        ConfigError: the configuration has a mistake.
    """

    def __init__(
        self,
        config: ZeroConfig | Mapping[str, Any] | str | int | os.PathLike[str] | None = None,
        mesh: DeviceMesh | None = None,
        **overrides: Any,
    ) -> None:
        self.mesh = mesh
        self.config = ZeroConfig.load({} if config is None and overrides else config, **overrides)
        if config is not None:
            tell_where_script_differs(self.config, "ZeroPlugin")

    def __repr__(self) -> str:
        return f"ZeroPlugin({self.config})"


class ZeroAccelerator(Accelerator):  # type: ignore[misc]
    """An `Accelerator` whose `prepare` partitions models and rebinds their optimizers, in any order.

    `prepare`, `accumulate`, `backward`, `clip_grad_norm_`, `no_sync`, `unwrap_model`, `get_state_dict` and `save_model`
    work as under DDP; the last two give whole weights, called by all ranks or by one alone. `save_state` and `load_state` write
    and read checkpoints for any number of ranks and any stage. A model without trainable parameters is left alone.
    Without an accelerator device, everything runs on the CPU.

    Args:
        *args: as for `Accelerator`.
        zero_plugin: what to partition with; by default the file that HF_ZERO_CONFIG names.
        **kwargs: as for `Accelerator`. With `mixed_precision` "bf16" or "fp16", a `compute_dtype` of "auto" becomes that (in
            stage 0 autocast is used, as under DDP); a `compute_dtype` of float16 means `mixed_precision="fp16"`, where the
            loss is scaled, on CPUs too. With a `ParallelismConfig(dp_replicate_size=R, dp_shard_size=S)`, parameters are cut
            over S ranks, R times; with `tp_size=T`, T ranks share every layer; with `sp_size=N` or
            `cp_size=N`, N ranks share every sequence.

    Raises:
        ConfigError: the configuration has a mistake, or is combined with FSDP, DeepSpeed or Megatron-LM.
    """

    def __init__(self, *args: Any, zero_plugin: ZeroPlugin | None = None, **kwargs: Any) -> None:
        use_cpu_without_accelerator()
        if not torch.accelerator.is_available():
            kwargs["cpu"] = True
        for other in [name for name in _OTHER_PLUGINS if kwargs.get(name) is not None]:
            raise ConfigError(f"ZeroAccelerator cannot be combined with {other}: leave it out")
        plugin = zero_plugin or ZeroPlugin()
        is_open = kwargs.get("mixed_precision") is None and "ACCELERATE_MIXED_PRECISION" not in os.environ
        if is_open and plugin.config.compute_dtype == "float16":
            kwargs["mixed_precision"] = "fp16"  # with which accelerate scales the loss
        given = asked_for(kwargs.get("parallelism_config"))
        config = with_axes(plugin.config, given)
        size = ranks_of_a_batch(config)
        if size > 1:
            kwargs["dataloader_config"] = sharding_batches(kwargs.get("dataloader_config"))
            of_batches = (
                given if given is not None and size == config.tp_size else parallelism_of(config, num_processes())
            )
            kwargs["parallelism_config"] = of_batches
        elif kwargs.get("cpu"):
            kwargs.pop("parallelism_config", None)  # accelerate refuses it on CPUs
        with also_on_cpus():
            super().__init__(*args, **kwargs)
        if self.distributed_type in _UNSUPPORTED:
            raise ConfigError(
                f"ZeroAccelerator cannot be combined with {self.distributed_type.value}: remove its plugin"
            )
        self.zero_plugin = plugin
        self._zero_config = with_ddp_options(with_mixed_precision(config, self.mixed_precision), self.ddp_handler)
        scale_loss(self, self._zero_config)
        self._zero_mesh = self.zero_plugin.mesh or (None if size > 1 else _mesh_of(self, given))
        if size > 1:
            gather_each_batch_once(self, size)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Partition the models among `args`, rebind their optimizers to the partitioned parameters, and prepare the rest.

        Raises:
            PartitionError: an optimizer holds parameters that belong to no prepared model.
        """
        for item in args:
            if isinstance(item, nn.Module):
                self._partition(item)
        prepared = super().prepare(*args, **kwargs)
        for optimizer in (item for item in args if isinstance(item, torch.optim.Optimizer)):
            self._check(optimizer)
        offer_optimizers(self)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Partition a model, and give it accelerate's autocast and compilation."""
        self._partition(model)
        for optimizer in self._optimizers:
            self._rebind(optimizer)
        # With `evaluation_mode`, accelerate does not wrap a model in DDP, which refuses frozen models on the CPU.
        if engine_of(model) is not None:
            device_placement, evaluation_mode = False, True
        elif not any(param.requires_grad for param in parameters_of(model)):
            evaluation_mode = True
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Rebind the optimizer to the partitioned parameters of the models prepared so far."""
        self._rebind(optimizer)
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader, which then remembers what the order of each epoch is drawn from."""
        return watch(super().prepare_data_loader(data_loader, *args, **kwargs))

    def _prepare_tp(self, *args: Any) -> tuple[Any, ...]:
        return args  # accelerate would look for parameters by addresses of rows, which may be empty

    def _partition(self, model: nn.Module) -> None:
        if engine_of(model) is None and any(param.requires_grad for param in parameters_of(model)):
            is_moved_as_cut = default_group() is not None and all(p.device.type == "cpu" for p in parameters_of(model))
            if not is_moved_as_cut and not getattr(model, "is_quantized", False):  # transformers refuses to move that
                model.to(self.device)
            shard_model(model, self._zero_config, self._zero_mesh)

    def _rebind(self, optimizer: Any) -> None:
        for engine in live_engines():
            rebind_optimizer(getattr(optimizer, "optimizer", optimizer), engine)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise for an optimizer of a forgotten or foreign model, which would silently train nothing."""
        known = {id(param) for engine in live_engines() for param in _params_held_by(engine.model)}
        known |= {id(param) for model in self._models for param in parameters_of(model)}
        inner = getattr(optimizer, "optimizer", optimizer)
        strange = [param for group in inner.param_groups for param in group["params"] if id(param) not in known]
        if strange and self._models:
            raise PartitionError(
                f"prepare: the optimizer holds a parameter of shape {tuple(strange[0].shape)} that belongs to no prepared "
                "model: build it on the model's parameters, and prepare both"
            )

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip gradients by their norm over all ranks; returns it as a plain tensor.

        A list of parameters from before `prepare`, as an optimizer is made of one, stands for those that the model has now.
        """
        parameters = _as_they_are_now(parameters)
        if math.isinf(norm_type):  # torch leaves the largest of each rank's own rows
            self.unscale_gradients()
            params = [param for param in parameters if param.grad is not None]
            total = torch.nn.utils.get_total_norm([param.grad for param in params], norm_type)
            total = total.full_tensor() if isinstance(total, DTensor) else total
            torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
            return total
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each value of gradients; `parameters` as of `clip_grad_norm_`."""
        super().clip_grad_value_(_as_they_are_now(parameters), clip_value)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """No effect, as accelerate's own outside of DDP on several GPUs: ranks step together, and loaders stay as they are."""
        if any(engine_of(each) is not None for each in joinables if isinstance(each, nn.Module)):
            warnings.warn(
                "join_uneven_inputs has no effect on models that hf_zero runs: ranks step together, so leave even_batches on",
                stacklevel=3,
            )
            yield
            return
        with super().join_uneven_inputs(joinables, even_batches):
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole weights on the CPU of every rank that calls it: all of them together, or one alone."""
        inner = self.unwrap_model(model) if unwrap else model
        if engine_of(inner) is None:
            state: dict[str, Tensor] = super().get_state_dict(model, unwrap)
            return state
        return whole_state_dict(inner)

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> Any:
        """Save models, optimizers, schedulers, data order, random states and registered objects, all or nothing.

        Called by all ranks together, or by one alone, which then needs memory for all of it. Files are named as accelerate
        names them; weights are what `save_pretrained` writes.

        Args:
            output_dir: the folder; an older checkpoint of this name is replaced. Unused with automatic naming.
            safe_serialization: must be true.
            **options: `max_shard_size` of the weight files.

        Returns:
            The folder, which is there once it is whole.

        Raises:
            CheckpointError: on all ranks, if any of them failed; an older checkpoint is left as it was.
            UsageError: no folder is given, or an option is unknown.
        """
        if world_of_accelerator(self) is None:
            return super().save_state(output_dir, safe_serialization, **options)
        unknown = sorted(options.keys() - {"max_shard_size"})
        if unknown or not safe_serialization:
            raise UsageError(
                f"save_state does not know {unknown[0]!r}: only max_shard_size can be set"
                if unknown
                else "save_state writes safetensors only: leave out safe_serialization"
            )
        return save_state(self, output_dir, options.get("max_shard_size"))

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        allow_pickle: bool = False,
        **options: Any,
    ) -> None:
        """Load what `save_state` saved, on any number of ranks and under any stage; called by all ranks together.

        Args:
            input_dir: the folder; None for the newest whole checkpoint, with automatic naming.
            load_kwargs: of `torch.load`, for schedulers.
            allow_pickle: whether files of schedulers and registered objects may run code when they are read.
            **options: `map_location`, which is not needed.

        Raises:
            CheckpointError: on all ranks, before a parameter is changed, if a file is missing, damaged, or of another model.
            UsageError: no folder is given, or an option is unknown.
        """
        if world_of_accelerator(self) is None:
            super().load_state(input_dir, load_kwargs, **options)
            return
        unknown = sorted(options.keys() - {"map_location"})
        if unknown:
            raise UsageError(
                f"load_state does not know {unknown[0]!r}: weights are loaded as they were saved, or not at all"
            )
        load_state(self, input_dir, allow_pickle, load_kwargs or {})

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The rest of an epoch; after `load_state`, the rest of the epoch in which the state was saved."""
        rest = super().skip_first_batches(dataloader, num_batches)
        continue_epoch(dataloader, rest, num_batches)
        return rest


def _mesh_of(accelerator: Accelerator, given: ParallelismConfig | None) -> DeviceMesh | None:
    """The ranks that accelerate's `ParallelismConfig` asks to cut over, if it says anything of them."""
    found = given or accelerator.parallelism_config
    if found is None:
        return None
    if found.dp_shard_size > 1:
        names = _DATA_PARALLEL if found.dp_replicate_size > 1 else _DATA_PARALLEL[1:]
        mesh: DeviceMesh = found.get_device_mesh(accelerator.device.type)[names]
        return mesh
    if given is not None and given.dp_replicate_size > 1 and accelerator.zero_plugin.config.policy.shards_optimizer:
        raise ConfigError(
            f"ParallelismConfig(dp_replicate_size={given.dp_replicate_size}) leaves no ranks to shard parameters over: "
            "set dp_shard_size too, or leave it out, or use stage 0"
        )
    return None


def use_cpu_without_accelerator() -> None:
    """Tell accelerate to use the CPU if there is nothing else; otherwise each process is silently a world of its own."""
    if not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def _params_held_by(model: nn.Module | None) -> list[nn.Parameter]:
    return [] if model is None else [found.param for found in find_parameters(model)]


def _as_they_are_now(parameters: Any) -> list[Tensor]:
    """What stands for parameters, one or several, since their models were partitioned."""
    return [current(each) for each in ([parameters] if isinstance(parameters, Tensor) else parameters)]
