"""Stages of a pipeline, each under ZeRO over its own ranks: what `torch.distributed.pipelining` does not have for such models.

[Note: stages] A causal language model of transformers is cut by its own plan (`base_model_pp_plan`): what comes before the
layers stays on the first stage, what comes after on the last, and the layers are divided evenly. What a stage does not have
becomes an identity in its old place. So parameters keep the names of the whole model, layers their numbers, and the model's
own forward is the stage's: it takes hidden states as `inputs_embeds`. Sequences have one length, without padding: masks do
not travel.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_zero.checkpoint.files.model_plan import plan_model, source_of
from hf_zero.checkpoint.files.tensor_file import Source
from hf_zero.checkpoint.ranks.cooperative import shares_folder, write_plan
from hf_zero.comm.groups.select import plain_choice
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.engine import engine_of
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError, PartitionError, UsageError
from hf_zero.layout import PlacedLayout
from hf_zero.parameters import parameters_of


class Passed(nn.Module):
    """In the place of a module that another stage has: gives back its first argument."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The same tensor."""
        return hidden


def keep_stage(model: PreTrainedModel, index: int, num_stages: int) -> PreTrainedModel:
    """Leave of a causal language model what one stage has, in place; see [Note: stages].

    Args:
        model: loaded or made as ever, under `Init` best; without an engine.
        index: of the stage, from 0.
        num_stages: of the whole pipeline.

    Returns:
        The model. Called with token ids (the first stage) or hidden states, it gives hidden states, or logits (the last).

    Raises:
        PartitionError: it cannot be cut: it has no plan, too few layers, weights that two stages would share, or it computes
            with hidden states outside of its layers.
    """
    name, base = type(model).__name__, model.base_model
    inner = f"{model.base_model_prefix}."
    plan = sorted(
        model.pp_plan, key=lambda each: not each.startswith(inner)
    )  # the head's plan comes first, the head last
    modules = [model.get_submodule(each) for each in plan]
    lists = [at for at, module in enumerate(modules) if isinstance(module, nn.ModuleList)]
    if len(lists) != 1:
        raise PartitionError(f"{name} has no plan for a pipeline (base_model_pp_plan), so it cannot be cut into stages")
    layers = modules[lists[0]]
    assert isinstance(layers, nn.ModuleList)
    if not 0 <= index < num_stages <= len(layers):
        raise PartitionError(
            f"stage {index} of {num_stages} of {name}, which has {len(layers)} layers: it needs one a stage"
        )
    shared = _tied_names(model)
    if shared and num_stages > 1:
        raise PartitionError(
            f"{name} ties {' and '.join(shared)}, which would be on the first and on the last stage: train it with "
            "tie_word_embeddings=False, or without a pipeline"
        )
    first, last = (len(layers) * at // num_stages for at in (index, index + 1))
    for at in range(len(layers)):
        if not first <= at < last:
            layers[at] = Passed()
    before, after = plan[: lists[0]], plan[lists[0] + 1 :]
    for each in [*(before if index else []), *(after if index < num_stages - 1 else [])]:
        holder, _, leaf = each.rpartition(".")
        setattr(model.get_submodule(holder), leaf, Passed())
    _check_passes(model, layers, after)
    forward = _logits if index == num_stages - 1 else _hidden_states
    model.forward = types.MethodType(forward, model)
    model._zero_is_first_stage = index == 0
    assert base is model.base_model
    return model


def _tied_names(model: nn.Module) -> list[str]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return next((each for each in names.values() if len(each) > 1), [])


@torch.no_grad()
def _check_passes(model: PreTrainedModel, layers: nn.ModuleList, after: list[str]) -> None:
    """Raise if the model does more with hidden states than its plan says: each stage would do it again."""
    kept = list(layers)
    size, like = model.config.get_text_config().hidden_size, next(parameters_of(model))
    hidden = torch.randn(1, 3, size, device=like.device, dtype=like.dtype)
    tails = {each: model.get_submodule(each) for each in after if each.startswith(f"{model.base_model_prefix}.")}
    try:
        for at in range(len(layers)):
            layers[at] = Passed()
        for each in tails:
            holder, _, leaf = each.rpartition(".")
            setattr(model.get_submodule(holder), leaf, Passed())
        found = model.base_model(inputs_embeds=hidden, use_cache=False).last_hidden_state
    finally:
        for at, layer in enumerate(kept):
            layers[at] = layer
        for each, module in tails.items():
            holder, _, leaf = each.rpartition(".")
            setattr(model.get_submodule(holder), leaf, module)
    if not torch.equal(found, hidden):
        raise PartitionError(
            f"{type(model).__name__} changes hidden states outside of its layers (it scales embeddings, say), which every "
            "stage of a pipeline would do again: it cannot be cut into stages"
        )


def _input_of(model: Any, given: Tensor) -> dict[str, Any]:
    name = "input_ids" if model._zero_is_first_stage else "inputs_embeds"
    return {name: given, "use_cache": False}


def _hidden_states(self: Any, given: Tensor) -> Tensor:
    hidden: Tensor = self.base_model(**_input_of(self, given)).last_hidden_state
    return hidden


def _logits(self: Any, given: Tensor) -> Tensor:
    logits: Tensor = type(self).forward(self, **_input_of(self, given)).logits
    return logits


class ZeroStage(PipelineStage):
    """A `PipelineStage` of a partitioned model: stages 0 and 1 of ZeRO reduce gradients once a step, at its last backward."""

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        """See `PipelineStage`."""
        model: Any = self.submod
        with contextlib.nullcontext() if last_backward else model.no_sync():
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


def clip_grad_norm_(models: Sequence[nn.Module], max_norm: float, group: dist.ProcessGroup | None = None) -> Tensor:
    """Clip the gradients of a pipeline by their norm over all stages; called by all ranks together.

    Args:
        models: this rank's stages.
        max_norm: of all gradients.
        group: the ranks that hold the other stages of the same pipeline.

    Returns:
        The norm, before clipping.
    """
    params = [param for model in models for param in parameters_of(model) if param.grad is not None]
    own = torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
    own = own.full_tensor() if isinstance(own, DTensor) else own
    squared = own.detach().double() ** 2
    dist.all_reduce(squared, group=group)
    norm = squared.sqrt().to(own.dtype)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


def save_stages(models: Sequence[PreTrainedModel], template: PreTrainedModel, folder: str | Path) -> None:
    """Write what `save_pretrained` of the whole model would, each rank its rows of its stages; called by all ranks together.

    Args:
        models: this rank's stages, with their engines.
        template: the whole model, on the meta device.
        folder: that all ranks see; created if needed.

    Raises:
        CheckpointError: on all ranks, if a rank could not write, or does not see the folder, or a weight is in no stage.
        UsageError: a stage has no engine.
    """
    folder = Path(folder)
    engines = [engine_of(model) for model in models]
    if None in engines:
        raise UsageError("save_stages: a stage has no engine: call shard_model on it first")
    own = next(engine.world for engine in engines if engine is not None)
    config = ZeroConfig(stage=1, collectives=plain_choice(own.device), checkpoint_files=own.config.checkpoint_files)
    everyone = World.create(config, own.device)
    what = f"preparing {folder}"

    def plan_writing() -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        return plan_model(template, folder)

    plan = everyone.from_first(plan_writing, what, CheckpointError)
    sources: dict[str, Source] = {}
    for model, engine in zip(models, engines, strict=True):
        assert engine is not None
        for name, value in model.state_dict().items():
            sources[name] = _placed(value, engine.world, everyone)
    held = {name: source.layout for name, source in sources.items()}
    layouts = dict(itertools.chain(*(each.items() for each in everyone.share(everyone.collect(held, what), what))))
    wanted = {piece.source for pieces in plan.pieces.values() for piece in pieces}
    with everyone.together(what, CheckpointError):
        missing = sorted(wanted - layouts.keys())
        if missing:
            raise CheckpointError(f"{missing[0]!r} of {type(template).__name__} is in no stage")
        if not shares_folder(folder, everyone):
            raise CheckpointError(f"not all ranks see {folder}: stages are written to a folder that they share")
    whole = template.state_dict()
    for name in wanted - sources.keys():
        sources[name] = Source(torch.empty(0, dtype=whole[name].dtype, device="cpu"), layouts[name])
    write_plan(plan, sources, folder, everyone)


def _placed(value: Tensor, world: World, everyone: World) -> Source:
    """This rank's part of a tensor of its stage, among all ranks."""
    source = source_of(value)
    holders = world.shards.ranks if source.layout.num_ranks > 1 else world.shards.ranks[:1]
    places = tuple(everyone.everyone.ranks.index(rank) for rank in holders)
    return Source(source.rows, PlacedLayout(tuple(value.shape), everyone.num_ranks, places, dim=source.layout.dim))
