"""Which models cannot be partitioned, and models that differ between the ranks: one error on all of them."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from hf_zero.engine.parameters.quantised import can_be_cut, is_of_own_class, is_quantised, plain_parts
from hf_zero.engine.parameters.records import is_gathered
from hf_zero.engine.parameters.whole import Whole
from hf_zero.engine.ranks.world import World, world_of
from hf_zero.engine.units.grouping import find_parameters
from hf_zero.errors import PartitionError, UsageError
from hf_zero.parameters import parameters_of
from hf_zero.sharding.whole_window import is_on_tensor_axis

_KNOWN_CLASSES = (
    "torch",
    "hf_zero",
    "bitsandbytes",
)  # modules of classes of parameters that mean what `nn.Parameter` does
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "FSDPModule")


def check_model(model: nn.Module) -> None:
    """Raise a `PartitionError` for a model that cannot be partitioned, judging only by facts that all ranks share."""
    name = type(model).__name__
    classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    for wrapper in _WRAPPERS:
        if wrapper in classes:
            raise PartitionError(f"{name} is, or contains, a {wrapper}: give the plain model to hf_zero instead")
    device_map: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    if len(set(device_map.values())) > 1:
        raise PartitionError(f"{name} is spread over {device_map}: load it without device_map")
    refuse_lazy(model)
    devices = {str(param.device) for param in parameters_of(model)}
    whole = {str(param.device) for param in parameters_of(model) if not isinstance(param, DTensor)}
    if len(whole) > 1:
        raise PartitionError(f"{name} is on several devices ({', '.join(sorted(whole))}): move it to one first")
    if devices == {"meta"}:
        raise PartitionError(
            f"{name} has no values yet (meta device): load it with from_pretrained, or construct it, under zero.Init, where it "
            "is never whole; or call its `to_empty(device=...)` and initialise it first"
        )
    for param_name, param in model.named_parameters():
        if param.requires_grad and param.is_complex():
            raise PartitionError(
                f"{param_name} is complex ({param.dtype}) and trainable: freeze it, or keep its two parts"
            )
        if is_of_own_class(param):
            continue
        if type(param.data) not in (torch.Tensor, DTensor) and not isinstance(param, DTensor):
            raise PartitionError(
                f"{param_name} is a {type(param.data).__name__}: only plain tensors can be partitioned"
            )
        if isinstance(param, DTensor) and world_of(param) is None and not is_on_tensor_axis(param):
            raise PartitionError(
                f"{param_name} is a DTensor that hf_zero did not make: give it the unpartitioned model"
            )


def is_of_users_class(param: nn.Parameter) -> bool:
    """Whether a trainable parameter is of a class of users or their libraries, who may ask for it."""
    is_known = type(param).__module__.partition(".")[0] in _KNOWN_CLASSES
    return param.requires_grad and not isinstance(param, DTensor) and not is_known


def refuse_classes_of_users(model: nn.Module) -> None:
    """Raise a `PartitionError` for parameters that would lose their class."""
    for name, param in model.named_parameters():
        if is_of_users_class(param):
            raise PartitionError(
                f"{name} is a {type(param).__name__}, and partitioned it would be a plain parameter, without what its class "
                "does (an optimizer that asks for it steps otherwise): make an nn.Parameter of it, or use stage 0"
            )


def refuse_lazy(model: nn.Module) -> None:
    """Raise a `PartitionError` for parameters that are made by the first forward (`nn.LazyLinear`)."""
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise PartitionError(
                f"{name} of {type(model).__name__} has no shape yet (a lazy module): run a forward with an example first, "
                "under torch.no_grad(), as for DistributedDataParallel"
            )


def refuse_other_ranks(model: nn.Module, world: World) -> None:
    """Raise a `PartitionError` for a parameter that is cut over other ranks already, judging by facts that all ranks share."""
    for name, param in model.named_parameters():
        old = world_of(param) if isinstance(param, DTensor) and not is_on_tensor_axis(param) else None
        if old is not None and (old.num_shards, old.tensor.num_ranks) != (world.num_shards, world.tensor.num_ranks):
            raise PartitionError(
                f"{name} is cut over {old.num_shards * old.tensor.num_ranks} ranks, but with this configuration it would be "
                f"over {world.num_shards * world.tensor.num_ranks}: make or load the model anew, or save it and load it again"
            )


def check_quantised(model: nn.Module, world: World) -> None:
    """Raise a `PartitionError` on every rank if quantised weights would have to be cut, or differ between the ranks."""
    own = [(name, param) for name, param in model.named_parameters() if is_of_own_class(param)]
    name = type(model).__name__
    is_cut = any(is_quantised(param) for param in parameters_of(model))
    is_known = is_cut or (bool(own) and all(can_be_cut(param) for _, param in own))
    cuts = world.config.policy.shards_parameters and world.partitions
    if cuts and not is_known and (own or getattr(model, "is_quantized", False)):
        raise PartitionError(
            f"{name} is quantised ({_kind_of(model, own)}), and of quantised weights stage 3 can cut bitsandbytes' 4-bit ones "
            "only: use those, or stage 2 (or 1), which leaves quantised weights whole; or load it unquantised"
        )
    sums = [sum(int(part.view(torch.uint8).sum()) for part in plain_parts(param)) for _, param in own]
    for rank, others in enumerate(world.everyone.agree(sums, "quantised weights") if own else ()):
        if differing := [name for (name, _), ours, theirs in zip(own, sums, others, strict=True) if ours != theirs]:
            raise PartitionError(
                f"the ranks' models differ: quantised weights such as {differing[0]!r} are others on rank {rank}: load "
                "them from the same files everywhere"
            )


def _kind_of(model: nn.Module, own: list[tuple[str, nn.Parameter]]) -> str:
    """What a user calls these weights: the method that transformers knows, and the class that holds them."""
    method = getattr(model, "quantization_method", None)
    kinds = sorted({type(param).__name__ for _, param in own})
    return ", ".join([*([str(getattr(method, "value", method))] if method is not None else []), *kinds]) or "unknown"


def refuse_whole_for_a_while(model: nn.Module) -> None:
    """Raise a `UsageError` where modules hold what is no parameter: partitioned as new ones, whole tensors would be nobody's.

    Optimizers hold the parameters that those stand for.
    """
    for found in find_parameters(model):
        if is_gathered(found.param):
            raise UsageError(
                f"{found.names[0]!r} is whole for a while, inside `GatheredParameters`, where {type(model).__name__} cannot be "
                "partitioned: call shard_model, and run the first forward, outside; or gather all of its parameters"
            )
        if type(found.param) is Tensor:  # what the engine puts there has another type
            name = found.names[0].rpartition(".")[-1]
            raise UsageError(
                f"{found.names[0]!r} of {type(model).__name__} is no parameter, but a tensor in `module._parameters`. Make it "
                f"an attribute (`del module._parameters[{name!r}]` once, before shard_model; `module.{name} = computed` in "
                "each forward), or use torch.nn.utils.parametrize"
            )
        if isinstance(found.param, Whole) or not isinstance(found.param, nn.Parameter):
            raise UsageError(
                f"{found.names[0]!r} is whole for the length of a call: {type(model).__name__} cannot be partitioned while a "
                "forward or backward of it is under way"
            )


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Raise a `PartitionError` for gradients that cannot be reduced by rows."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise PartitionError(
                f"{name!r} is an {type(module).__name__} with sparse=True: sparse gradients cannot be reduced by rows; make it "
                "with sparse=False"
            )


def refuse_parameters_in_lists(model: nn.Module) -> None:
    """A parameter in a plain list, tuple or dict stays what it was before the model is partitioned, and is never reduced."""
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            continue  # its list follows the parameters
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            held = value.values() if isinstance(value, dict) else value
            if any(isinstance(item, nn.Parameter) and item.requires_grad for item in held):
                raise PartitionError(
                    f"{type(module).__name__} {name!r} holds parameters in a plain {type(value).__name__} ({attribute!r}), "
                    "where they would be neither partitioned nor reduced: hold them in an nn.ParameterList or nn.ParameterDict"
                )


def agree_on_model(model: nn.Module, world: World) -> None:
    """Raise a `PartitionError` on every rank if the ranks' models have different parameters."""
    found = find_parameters(model)
    facts = [f"{each.names} {tuple(each.param.shape)} {each.param.dtype}" for each in found]
    trains = [f"{fact} requires_grad={each.param.requires_grad}" for fact, each in zip(facts, found, strict=True)]
    prints = [zlib.crc32(text.encode()) for text in trains]
    heads = world.everyone.agree([len(found), zlib.crc32("".join(trains).encode())], "shard_model")
    if all(head == heads[0] for head in heads):
        return
    counts = [count for count, _ in heads]
    if len(set(counts)) > 1:
        raise PartitionError(
            f"the ranks' models differ: they have {counts} parameters, by rank; make or load the same on all"
        )
    rows = world.everyone.agree(prints, "the parameters of shard_model")
    position = next(i for i, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1)
    raise PartitionError(
        f"the ranks' models differ: on rank {world.rank} {found[position].names[0]!r} is {trains[position]}, on another "
        "rank it is not: names, shapes, dtypes and requires_grad must be alike on all of them"
    )
