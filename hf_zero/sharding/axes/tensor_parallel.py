"""transformers' tensor parallelism for models that are then partitioned; see [Note: tensor axis].

transformers replaces the forwards of a layer's modules and cuts their weights on the meta device, before it loads them, if
it is given a `DistributedConfig`. Here it is given one; and where it would hand the model to FSDP2, it hands it to nobody.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import nn
from torch.distributed.tensor import DTensor

from hf_zero import torch_compat
from hf_zero.changes import Changes
from hf_zero.comm.groups.process_groups import TENSOR_AXIS
from hf_zero.engine.parameters.replaced import replace
from hf_zero.engine.parameters.tensor_axis import (
    is_over_tensor_axis,
    remember_placement,
    sum_gradients_over_tensor_axis,
)
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.grouping import FoundParameter, find_parameters
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.sharding.axes.shared_experts import with_experts_of_our_own
from hf_zero.sharding.whole_window import is_on_tensor_axis

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_METHODS = ("from_pretrained", "prepare_distribute_model", "maybe_distribute_model")
_QUERIES = ("q_proj", "qkv_proj", "query_key_value")
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
        self._seam = seam
        self._changes = Changes()
        load, self._prepare, self._distribute = (getattr(PreTrainedModel, name).__func__ for name in _METHODS)
        for name, new in zip(_METHODS, (self._given_axis(load), self._prepared, self._distributed), strict=True):
            self._changes.replace(PreTrainedModel, name, _class_method(new))

    def close(self) -> None:
        """Put the original methods back."""
        self._changes.undo()

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
        return _apply(model, distributed_config, mesh_manager, self._world.tensor.num_ranks)


def distribute(model: nn.Module, world: World) -> None:
    """Make a whole model tensor-parallel, with the values of rank 0, if there is a tensor axis; called by all ranks together.

    Raises:
        PartitionError: transformers has no plan for it.
    """
    found = find_parameters(model)
    is_shared = any(is_on_tensor_axis(each.param) for each in found)
    if is_shared and not any(isinstance(vars(module).get("forward"), SharedForward) for module in model.modules()):
        raise PartitionError(
            f"{type(model).__name__} was loaded with a DistributedConfig of its own: load it under zero.Init (or after "
            "ZeroTrainingArguments) with tp_size in the zero configuration, which gives it one"
        )
    if world.tensor.num_ranks == 1 or any(isinstance(each.param, DTensor) for each in found):
        return
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping

    _check_version()
    if not isinstance(model, PreTrainedModel):
        raise PartitionError(
            f"tp_size is {world.tensor.num_ranks}, but {type(model).__name__} is not a model of transformers, whose tensor "
            "parallelism is used: leave tp_size out; or load the model in it under zero.Init first, as for adapters"
        )
    mapping = get_model_conversion_mapping(model)
    for each in found:
        world.broadcast(each.param.data, each.names[0])
    share_layers(model, _distributed_config(world), _Meshes(world), world.tensor.num_ranks)
    refuse_mixed_parts(model, mapping, world)
    for each in find_parameters(model):
        if isinstance(each.param, DTensor):  # its part is a view of the whole
            torch_compat.set_local(each.param, torch_compat.local_of(each.param).clone())


def share_layers(model: PreTrainedModel, config: Any, meshes: Any, size: int) -> None:
    """Let `size` ranks share the layers of a whole model, whose weights each of them has.

    Args:
        model: with plain parameters.
        config: transformers' `DistributedConfig`.
        meshes: what transformers asks for its meshes.
        size: of the tensor axis.

    Raises:
        PartitionError: transformers has no plan for it.
        ConfigError: its heads cannot be divided.
    """
    found = find_parameters(model)
    for each in found:
        for holder, name in each.locations[1:]:  # transformers shares a layer before it ties weights
            holder._parameters[name] = nn.Parameter(each.param.data, each.param.requires_grad)
    _apply(model, config, meshes, size)
    _tie_again(found)


def refuse_mixed_parts(model: nn.Module, weight_mapping: Any, world: World) -> None:
    """Raise for weights of which files have other parts on the dim that ranks share than the model: parts would be mixed up.

    Raises:
        PartitionError: a conversion of transformers puts such a weight together on that dim, and its plan does not say so.
    """
    from transformers.core_model_loading import Chunk, Concatenate, Interleave, WeightConverter

    for name, param in model.named_parameters() if world.tensor.num_ranks > 1 else ():
        tensor = world.cut_of(param).tensor if isinstance(param, DTensor) else None
        if tensor is None or tensor.num_groups > 1:
            continue
        for converter in [each for each in weight_mapping or () if isinstance(each, WeightConverter)]:
            patterns = [re.escape(each).replace(r"\*", r"\d+") for each in converter.target_patterns]
            dims = {op.dim % param.ndim for op in converter.operations if type(op) in (Chunk, Concatenate, Interleave)}
            if tensor.dim in dims and any(re.search(pattern, name) for pattern in patterns):
                raise PartitionError(
                    f"{name!r} is put together of several tensors on dim {tensor.dim}, which {world.tensor.num_ranks} ranks "
                    "are to share as one (tp_size): transformers' plan for this model does not fit its weights; leave "
                    "tp_size out"
                )


def share_resized(model: nn.Module, world: World) -> None:
    """Share embeddings and heads over the tensor axis that were made anew, or resized, since the model was shared.

    Called by all ranks together, with whole plain weights in them.
    """
    if world.tensor.num_ranks == 1:
        return
    from transformers import PreTrainedModel
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    for inner in [each for each in model.modules() if isinstance(each, PreTrainedModel) and "_tp_size" in vars(each)]:
        ends = [inner.get_input_embeddings(), inner.get_output_embeddings()]
        new = [end for end in ends if type(end) in (nn.Embedding, nn.Linear) and type(end.weight) is nn.Parameter]
        plan = inner._resolve_parallel_plans(_distributed_config(world))[0] if new else {}
        names = {id(module): name for name, module in inner.named_modules()}
        shared = [module for module in new if plan.get(names.get(id(module), ""))]
        found = [each for each in find_parameters(inner) if any(holder in shared for holder, _ in each.locations)]
        for each in found:
            world.broadcast(each.param.data, each.names[0])
        with _with_forwards_of_our_own():
            for module in shared:
                style = ALL_PARALLEL_STYLES[plan[names[id(module)]]]
                for name, param in list(module.named_parameters(recurse=False)):
                    style.shard_param(module, name, world.tensor_mesh)
                    made = module._parameters[name]
                    if made is not None and isinstance(made, DTensor):
                        torch_compat.set_local(made, torch_compat.local_of(made).clone())  # type: ignore[arg-type]
                        made.requires_grad_(param.requires_grad)
                if not isinstance(vars(module).get("forward"), SharedForward):
                    style.install_forward(module, world.tensor_mesh)
        _tie_again(found)


def _tie_again(found: list[FoundParameter]) -> None:
    """Let modules that held one parameter hold one again: what the first of them has now, in place of what they had."""
    for each in found:
        (holder, name), *others = each.locations
        for other, other_name in others:
            other._parameters[other_name] = holder._parameters[name]
        replace(each.param, cast(nn.Parameter, holder._parameters[name]))


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
    size = world.tensor.num_ranks
    experts = size if world.config.ep_size > 1 else 1
    return DistributedConfig(tp_size=size, fsdp_size=shards, dp_replicate_size=replicas, ep_size=experts)


def _check_fits(given: Any, world: World) -> None:
    ours = _distributed_config(world)
    if given.pp_size > 1:
        raise ConfigError(
            f"DistributedConfig(pp_size={given.pp_size}) cannot be combined with zero: recipes/pipeline.py shows pipeline "
            "stages under zero"
        )
    if given.ep_size not in (1, ours.ep_size, world.config.ep_size):
        raise ConfigError(
            f"DistributedConfig(ep_size={given.ep_size}), but ep_size is {world.config.ep_size} in the zero configuration, "
            "which expert parallelism is asked for in: leave it out there"
        )
    for name in ("tp_size", "fsdp_size", "dp_replicate_size"):
        wanted = getattr(given, name)
        if wanted != getattr(ours, name) and (name == "tp_size" or wanted != 1):
            raise ConfigError(
                f"DistributedConfig({name}={wanted}), but the ranks are {ours.dp_replicate_size} x {ours.fsdp_size} x "
                f"{ours.tp_size} (dp_replicate_size, fsdp_size, tp_size) by the zero configuration: leave it out there"
            )
    given.fsdp_size, given.dp_replicate_size, given.ep_size = ours.fsdp_size, ours.dp_replicate_size, ours.ep_size


class _Meshes:
    """What transformers asks for its meshes, see `TransformersDeviceMesh`: those of the zero configuration."""

    def __init__(self, world: World) -> None:
        self._world = world

    def get_mesh(self, dims: str | tuple[str, ...]) -> Any:
        """The tensor axis, over which experts are divided too, or the mesh of parameters at rest."""
        return self._world.tensor_mesh if dims in (TENSOR_AXIS, "ep") else self._world.grid


def _class_method(function: Any) -> Any:
    """A class method of a function, or of a method of another object, whose first argument is the class."""
    return classmethod(lambda cls, *args, **kwargs: function(cls, *args, **kwargs))


def _apply(model: PreTrainedModel, config: Any, meshes: Any, size: int) -> Any:
    """What transformers does with a model and a `DistributedConfig`, but for FSDP2."""
    from transformers.distributed.mixin import DistributedMixin

    _check_heads(model, size)
    with _without_fsdp(), _with_forwards_of_our_own(), with_experts_of_our_own():
        try:
            made = DistributedMixin.maybe_distribute_model.__func__(type(model), model, config, meshes)
        except ValueError as error:
            raise PartitionError(f"tp_size is {size}, but transformers cannot share the model: {error}") from error
    return made


def _check_heads(model: PreTrainedModel, size: int) -> None:
    """Raise if ranks would share heads that they cannot divide, by the model's plan."""
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    config, plan = model.config.get_text_config(), model.tp_plan or {}
    shares_queries = any(key.rsplit(".", 1)[-1] in _QUERIES and style == "colwise" for key, style in plan.items())
    for name in ("num_attention_heads", "num_key_value_heads"):
        try:
            heads = getattr(config, name, None)
        except AttributeError:  # each layer has its own
            continue
        if not isinstance(heads, int):
            continue
        if name == "num_attention_heads":
            divides = not shares_queries or heads % size == 0
        else:
            divides = get_kv_heads_per_rank(plan, heads, size) is not None
        if not divides:
            raise ConfigError(
                f"tp_size is {size}, which does not divide the {heads} {name} of {type(model).__name__}: use one of "
                f"{[each for each in range(1, heads + 1) if heads % each == 0]}"
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


class SharedForward:
    """The forward of a module whose layer ranks share, in place of the function that transformers would make.

    A copy of the module computes with its own weights, where a function would go on with the original's.

    Args:
        module: whose. Weak: the module holds this.
        style: what transformers does before and after.
        mesh: the tensor axis.
    """

    def __init__(self, module: nn.Module, style: Any, mesh: Any) -> None:
        self._module, self._style, self._mesh = weakref.ref(module), style, mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, with inputs and outputs placed as the plan says."""
        module, style, mesh = self._module(), self._style, self._mesh
        assert module is not None
        args, kwargs = style.transform_inputs_pre_forward(module, args, kwargs, mesh)
        with style.context_around_forward(module, mesh):
            output = type(module).forward(module, *args, **kwargs)
        return style.transform_output_post_forward(module, output, mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self._module()))
        return self if module is None else SharedForward(module, self._style, self._mesh)


@contextmanager
def _with_forwards_of_our_own() -> Iterator[None]:
    """Let shared modules have a `SharedForward`, and gradients of parts of activations be added up with a gathered weight."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    class Sums(TensorParallelLayer):  # type: ignore[misc]
        def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
            sum_gradients_over_tensor_axis(module)
            return module

    def install(style: Any, module: nn.Module, mesh: Any) -> nn.Module:
        module.forward = SharedForward(module, style, mesh)
        return module

    original = TensorParallelLayer.install_forward
    ALL_PARALLEL_STYLES[_PARTIAL_STYLE] = Sums()
    TensorParallelLayer.install_forward = install
    try:
        yield
    finally:
        del ALL_PARALLEL_STYLES[_PARTIAL_STYLE]
        TensorParallelLayer.install_forward = original
