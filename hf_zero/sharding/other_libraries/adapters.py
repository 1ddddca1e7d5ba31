"""Adapters of PEFT on models that are partitioned already: made, merged and combined with whole weights, a layer at a time.

PEFT computes with weights outside of any forward: DoRA takes norms of them, PiSSA and OLoRA factor them and keep the rest in
the base, token indices copy rows of them, prompts begin as embeddings of words. These are wrapped, so that the weights which
each of them is about are whole while it runs, with what rank 0 makes of them on every rank:

- `BaseTuner.inject_adapter`: each module while it gets its adapter. `PeftModel`, `inject_adapter_in_model` and transformers'
  `add_adapter` all come by here.
- `TrainableTokensLayer.update_layer`, `PromptEmbedding` and `CPTEmbedding`: the embedding that they begin with.
- `onload_layer`, which PEFT puts around each layer that it merges, unmerges or unloads: that layer.
- `LoraModel.add_weighted_adapter` and that of IA3: the adapters, which are combined.
- `AdaLoraModel.update_and_allocate`: the adapters, of which it ranks the parts.
- `ParamWrapper._activate_lora` (`target_parameters`, for stacked experts): PEFT makes a parametrization of the parameter for
  the length of a call, which takes it away from its module; where modules see a gathered tensor, it is its sum with the
  adapter that they see.
- `PeftModel.__init__`, `merge_and_unload`, `unload`: the model with adapters, or without them again, gets the engine.

What is made is plain, until `shard_model`, the Trainer, `prepare` or the first forward partitions it. Nothing changes for a
model that is not partitioned. `hf_zero.undo()` puts the originals back.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from hf_zero.changes import Changes
from hf_zero.engine.gathered_parameters import GatheredParameters
from hf_zero.engine.parameters.whole import Whole
from hf_zero.parameters import parameters_of
from hf_zero.sharding.active import is_constructing
from hf_zero.sharding.late import run_instead

_changes = Changes()


def install() -> None:
    """Wrap the functions, now or when PEFT is imported; a second call changes nothing."""
    if _changes:
        return
    _changes.keep()
    _changes.once_imported("peft", _wrap_all)


def _wrap_all(peft: Any) -> None:
    tuners = importlib.import_module("peft.tuners")
    tuners_utils = importlib.import_module("peft.tuners.tuners_utils")
    _changes.wrap(tuners_utils.BaseTuner, "inject_adapter", _inject_adapter)
    _changes.wrap(tuners_utils, "onload_layer", _onload_layer)
    _changes.wrap(tuners.trainable_tokens.TrainableTokensLayer, "update_layer", _update_tokens)
    for kind in (tuners.prompt_tuning.PromptEmbedding, tuners.cpt.CPTEmbedding):
        _changes.wrap(kind, "__init__", _make_prompt)
    for kind in (tuners.LoraModel, tuners.IA3Model):
        _changes.wrap(kind, "add_weighted_adapter", _combine)
    _changes.wrap(tuners.AdaLoraModel, "update_and_allocate", _allocate)
    layers = importlib.import_module("peft.tuners.lora.layer")
    if hasattr(layers, "ParamWrapper"):
        _changes.wrap(layers.ParamWrapper, "_activate_lora", functools.partial(_adapt_parameter, layers))
    _changes.wrap(importlib.import_module("peft.peft_model").PeftModel, "__init__", _make_model)
    for name in ("merge_and_unload", "unload"):
        _changes.wrap(tuners_utils.BaseTuner, name, _unload)


@contextmanager
def _whole(module: nn.Module | None, decides: int | None = 0) -> Iterator[None]:
    """Within: the parameters of `module` are whole. Under `Init` they are whole to whoever touches them anyway."""
    params = [] if module is None or is_constructing() else [p for p in parameters_of(module) if isinstance(p, DTensor)]
    with GatheredParameters(params, decides, enabled=bool(params)):
        yield


def _inject_adapter(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    create = self._create_and_replace
    names = inspect.signature(create)

    def create_with_whole_weights(*given: Any, **named: Any) -> None:
        with _whole(names.bind(*given, **named).arguments["target"]):
            create(*given, **named)

    self.__dict__["_create_and_replace"] = create_with_whole_weights
    try:
        original(self, *args, **kwargs)
    finally:
        del self.__dict__["_create_and_replace"]


@contextmanager
def _onload_layer(original: Callable[..., Any], layer: nn.Module) -> Iterator[None]:
    is_adapted = hasattr(layer, "base_layer") or hasattr(layer, "unload_and_optionally_merge_module")
    with _whole(layer if is_adapted else None, None), original(layer):  # every rank computes the same
        yield


def _update_tokens(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    with _whole(self.get_base_layer()):
        original(self, *args, **kwargs)


def _make_prompt(original: Callable[..., None], self: Any, config: Any, word_embeddings: nn.Module) -> None:
    with _whole(word_embeddings):
        original(self, config, word_embeddings)


def _combine(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    with _whole(_adapters_of(self)):
        return original(self, *args, **kwargs)


def _allocate(original: Callable[..., None], self: Any, global_step: int) -> None:
    with _whole(_adapters_of(self), None):  # every rank computes the same
        original(self, global_step)


@contextmanager
def _adapt_parameter(
    layers: Any, original: Callable[..., Any], self: Any, active_adapters: list[str]
) -> Iterator[None]:
    base, name = self.get_base_layer(), self.parameter_name
    whole = getattr(base, name)
    adapters = [each for each in active_adapters if each in self.lora_A]
    if not isinstance(whole, Whole) or not adapters:
        with original(self, active_adapters):
            yield
        return
    if len(adapters) == 1 and self.num_experts > 1 and hasattr(layers, "_LoraFactorsProxy"):
        adapt = layers._LoraFactorsProxy(*self.get_delta_factors(adapters[0]))
    else:
        adapt = layers._LoraParameterProxy(functools.reduce(operator.add, map(self.get_delta_weight, adapters)))
    held = dict.__getitem__(base._parameters, name)
    base._parameters[name] = adapt(whole)
    try:
        yield
    finally:
        base._parameters[name] = held


def _adapters_of(tuner: Any) -> nn.ParameterList:
    return nn.ParameterList(param for name, param in tuner.named_parameters() if tuner.prefix in name)


def _make_model(original: Callable[..., None], self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    original(self, model, *args, **kwargs)
    if not is_constructing():
        run_instead(self)


def _unload(original: Callable[..., nn.Module], self: Any, *args: Any, **kwargs: Any) -> nn.Module:
    left = original(self, *args, **kwargs)
    run_instead(left)
    return left
