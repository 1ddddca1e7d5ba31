"""transformers' tensor parallelism for models that are then partitioned; see [Note: tensor axis].

transformers replaces the forwards of a layer's modules and cuts their weights on the meta device, before it loads them, if
it is given a `DistributedConfig`. Here it is given one; and where it would hand the model to FSDP2, it hands it to nobody.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.comm.axis import TENSOR_AXIS
from hf_zero.engine.grouping import find_parameters
from hf_zero.engine.tensor_parallel import is_over_tensor_axis, remember_placement, sum_gradients_over_tensor_axis
from hf_zero.engine.world import World
from hf_zero.errors import ConfigError, PartitionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_METHODS = ("from_pretrained", "prepare_distribute_model", "maybe_distribute_model")
_PARTIAL_STYLE = "replicated_with_grad_allreduce"


class _Pausable(Protocol):
    """What partitions models while they are loaded, unless it is paused."""

    is_paused: bool


class TensorParallelSeam:
    """Lets `from_pretrained` make models tensor-parallel; `close()` removes it again.

    Args:
        world: the ranks, with a tensor axis.
        seam: what partitions the models then; while it is paused, models are loaded as ever.
    """

    def __init__(self, world: World, seam: _Pausable) -> None:
        from transformers.modeling_utils import PreTrainedModel

        _check_version()
        self._world = world
        self._cls = PreTrainedModel
        self._seam = seam
        self._found = {name: vars(PreTrainedModel).get(name) for name in _METHODS}  # None: inherited
        load, self._prepare, self._distribute = (getattr(PreTrainedModel, name).__func__ for name in _METHODS)
        for name, new in zip(_METHODS, (self._given_axis(load), self._prepared, self._distributed), strict=True):
            setattr(PreTrainedModel, name, _class_method(new))

    def close(self) -> None:
        """Put the original methods back."""
        for name, found in self._found.items():
            if found is None:
                delattr(self._cls, name)
            else:
                setattr(self._cls, name, found)

    def _given_axis(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
            is_given = any(kwargs.get(name) is not None for name in ("distributed_config", "tp_plan", "tp_size"))
            if not self._seam.is_paused and not is_given:
                kwargs["distributed_config"] = _distributed_config(self._world)
            return original(cls, *args, **kwargs)

        return from_pretrained

    def _prepared(self, cls: type, distributed_config: Any, device_map: Any = None) -> Any:
        from transformers.distributed import DistributedConfig

        if self._seam.is_paused or distributed_config is None:
            return self._prepare(cls, distributed_config, device_map=device_map)
        if isinstance(distributed_config, dict):
            distributed_config = DistributedConfig.from_dict(distributed_config)
        _check_fits(distributed_config, self._world)
        if device_map is not None:
            raise PartitionError("tp_size puts each rank's part of the model on its device: leave device_map out")
        return distributed_config, None, _Meshes(self._world)

    def _distributed(self, cls: type, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        if self._seam.is_paused or mesh_manager is None:
            return self._distribute(cls, model, distributed_config, mesh_manager)
        return _apply(model, distributed_config, self._world)


def distribute(model: nn.Module, world: World) -> list[tuple[nn.Parameter, str]]:
    """Make a whole model tensor-parallel, with the values of rank 0, if there is a tensor axis; called by all ranks together.

    Returns:
        The parameters that were replaced, with their names.

    Raises:
        PartitionError: transformers has no plan for it.
    """
    from transformers import PreTrainedModel

    found = find_parameters(model)
    if world.tensor.num_ranks == 1 or any(isinstance(each.param, DTensor) for each in found):
        return []
    _check_version()
    if not isinstance(model, PreTrainedModel):
        raise PartitionError(
            f"tp_size is {world.tensor.num_ranks}, but {type(model).__name__} is not a model of transformers, whose tensor "
            "parallelism is used: leave tp_size out"
        )
    old = {id(each.param): each for each in found}
    for each in found:
        world.broadcast(each.param.data, each.names[0])
        for holder, name in each.locations[1:]:  # transformers shares a layer before it ties weights
            holder._parameters[name] = nn.Parameter(each.param.data, each.param.requires_grad)
    _apply(model, _distributed_config(world), world)
    for each in found:
        (holder, name), *others = each.locations
        for other, other_name in others:
            other._parameters[other_name] = holder._parameters[name]
    for each in find_parameters(model):
        if isinstance(each.param, DTensor):  # its part is a view of the whole
            torch_compat.set_local(each.param, torch_compat.local_of(each.param).clone())
    now = {id(each.param) for each in find_parameters(model)}
    return [(each.param, each.names[0]) for key, each in old.items() if key not in now]


def remember_tensor_axis(model: nn.Module, world: World) -> None:
    """Note where a model has `DTensor`s over the tensor axis, before they are cut by rows.

    Raises:
        PartitionError: a parameter cannot be cut so.
    """
    for each in find_parameters(model):
        if not is_over_tensor_axis(each.param, world):
            continue
        assert isinstance(each.param, DTensor)
        tensor = world.cut_of(each.param).tensor
        if tensor is not None and tensor.num_groups > 1 and not tensor.divides:
            raise PartitionError(
                f"tp_size is {world.tensor.num_ranks}, which does not divide the {tensor.num_groups} equal parts of "
                f"{each.names[0]!r}, of shape {tensor.shape}"
            )
        for holder, name in each.locations:
            remember_placement(holder, name, each.param)


def _check_version() -> None:
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__) < Version("5.23"):
        raise ConfigError(f"tp_size needs transformers 5.23 or later, and this is {transformers.__version__}")


def _distributed_config(world: World) -> Any:
    from transformers.distributed import DistributedConfig

    replicas = world.replicas.num_ranks
    shards = world.data.num_ranks // replicas
    return DistributedConfig(tp_size=world.tensor.num_ranks, fsdp_size=shards, dp_replicate_size=replicas)


def _check_fits(given: Any, world: World) -> None:
    ours = _distributed_config(world)
    for name in ("ep_size", "pp_size"):
        if getattr(given, name) > 1:
            raise ConfigError(
                f"DistributedConfig({name}={getattr(given, name)}) cannot be combined with zero"
                + (
                    ": recipes/pipeline.py shows pipeline stages under zero"
                    if name == "pp_size"
                    else ", nor can expert parallelism"
                )
            )
    for name in ("tp_size", "fsdp_size", "dp_replicate_size"):
        wanted = getattr(given, name)
        if wanted != getattr(ours, name) and (name == "tp_size" or wanted != 1):
            raise ConfigError(
                f"DistributedConfig({name}={wanted}), but the ranks are {ours.dp_replicate_size} x {ours.fsdp_size} x "
                f"{ours.tp_size} (dp_replicate_size, fsdp_size, tp_size) by the zero configuration: leave it out there"
            )
    given.fsdp_size, given.dp_replicate_size = ours.fsdp_size, ours.dp_replicate_size


class _Meshes:
    """What transformers asks for its meshes, see `TransformersDeviceMesh`: those of the zero configuration."""

    def __init__(self, world: World) -> None:
        self._world = world

    def get_mesh(self, dims: str | tuple[str, ...]) -> Any:
        """The tensor axis, or the mesh of parameters at rest."""
        return self._world.tensor_mesh if dims == TENSOR_AXIS else self._world.grid


def _class_method(function: Any) -> Any:
    """A class method of a function, or of a method of another object, whose first argument is the class."""
    return classmethod(lambda cls, *args, **kwargs: function(cls, *args, **kwargs))


def _apply(model: PreTrainedModel, config: Any, world: World) -> Any:
    """What transformers does with a model and a `DistributedConfig`, but for FSDP2."""
    from transformers.distributed.mixin import DistributedMixin

    _check_heads(model, world)
    with _without_fsdp(), _with_sums_of_our_own():
        try:
            made = DistributedMixin.maybe_distribute_model.__func__(type(model), model, config, _Meshes(world))
        except ValueError as error:
            raise PartitionError(
                f"tp_size is {world.tensor.num_ranks}, but transformers cannot share the model: {error}"
            ) from error
    return made


def _check_heads(model: PreTrainedModel, world: World) -> None:
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % world.tensor.num_ranks:
            raise ConfigError(
                f"tp_size is {world.tensor.num_ranks}, which does not divide the {heads} {name} of {type(model).__name__}: use "
                f"one of {[size for size in range(1, heads + 1) if heads % size == 0]}"
            )


@contextmanager
def _without_fsdp() -> Iterator[None]:
    from transformers.distributed import mixin

    before = mixin.apply_fully_sharded_data_parallelism
    mixin.apply_fully_sharded_data_parallelism = lambda model, *_: model
    try:
        yield
    finally:
        mixin.apply_fully_sharded_data_parallelism = before


@contextmanager
def _with_sums_of_our_own() -> Iterator[None]:
    """Let gradients of parts of activations be added up where gathered parameters are put into the graph."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    class Sums(TensorParallelLayer):  # type: ignore[misc]
        def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
            sum_gradients_over_tensor_axis(module)
            return module

    ALL_PARALLEL_STYLES[_PARTIAL_STYLE] = Sums()
    try:
        yield
    finally:
        del ALL_PARALLEL_STYLES[_PARTIAL_STYLE]
