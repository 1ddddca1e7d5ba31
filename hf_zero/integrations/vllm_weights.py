"""TRL's trainers with `use_vllm`, on a partitioned model: vLLM gets whole weights, as TRL names them.

TRL hands over in three ways, each of `name, param.data`, which here are rows, or around an adapter that is merged in place:

- `VLLMGeneration` (GRPO, RLOO, distillation, GOLD, SDFT, SDPO, IW-OPD). What `_iter_named_params` yields comes from
  `whole_parameters`, with adapters merged layer by layer and into copies. In server mode TRL walks all weights once for their
  names and shapes, which are known without a gather; and ranks without the server's client take part in the gathers only.
- `OnlineDPOTrainer._move_model_to_vllm_inner` does the same by itself.
- `AsyncGRPOTrainer` and `AsyncDistillationTrainer` ask for `full_tensor()` of a `DTensor`, which is right. Only with PEFT they
  merge the adapter and take it out again, after which weights have other bits: there, too, copies are merged.

A model that is not partitioned goes TRL's own way. `hf_zero.undo()` puts the originals back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.changes import Changes
from hf_zero.checkpoint.export import world_of_model
from hf_zero.checkpoint.handover.contents import has_adapters
from hf_zero.checkpoint.handover.stream import WholeParameters, whole_parameters

Item = tuple[str, Tensor]
_changes = Changes()


def install() -> None:
    """Wrap the methods, now or when TRL is imported; a second call changes nothing."""
    if _changes:
        return
    _changes.keep()
    for name, wrap in _WRAPPERS.items():
        _changes.once_imported(name, wrap)


def _weights(model: nn.Module, keep: bool = True) -> WholeParameters:
    return whole_parameters(model, names="model", keep=keep)


def _is_ours(model: nn.Module) -> bool:
    return world_of_model(model) is not None


# ---- VLLMGeneration --------------------------------------------------------------------------------------------------


def _wrap_generation(module: Any) -> None:
    _changes.wrap(module.VLLMGeneration, "_iter_named_params", _iterate)
    _changes.wrap(module.VLLMGeneration, "sync_weights", _sync)


def _iterate(original: Callable[..., Any], generation: Any) -> Iterator[Item]:
    if not _is_ours(generation.model):
        yield from original(generation)
        return
    keep = generation.mode != "server" or generation.accelerator.is_main_process
    for name, tensor in _weights(generation.model, keep):
        yield generation._fix_param_name_to_vllm(name), tensor
        del tensor


def _sync(original: Callable[..., None], generation: Any) -> None:
    if _is_ours(generation.model) and generation.mode == "server" and generation._weight_metadata is None:
        generation._weight_metadata = [
            (generation._fix_param_name_to_vllm(info.name), str(info.dtype).removeprefix("torch."), list(info.shape))
            for info in _weights(generation.model).infos
        ]
    original(generation)


# ---- online DPO ------------------------------------------------------------------------------------------------------


def _wrap_online_dpo(module: Any) -> None:
    _changes.wrap(module.OnlineDPOTrainer, "_move_model_to_vllm_inner", _move)


def _move(original: Callable[..., None], trainer: Any) -> None:
    if not _is_ours(trainer.model):
        original(trainer)
        return
    is_server = trainer.vllm_mode == "server"
    for name, tensor in _weights(trainer.model, not is_server or trainer.accelerator.is_main_process):
        vllm_name = trainer._fix_param_name_to_vllm(name)
        if is_server:
            trainer.vllm_client.update_named_param(vllm_name, tensor)
        else:
            trainer.llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights([(vllm_name, tensor)])
        del tensor


# ---- the asynchronous trainers ---------------------------------------------------------------------------------------


def _wrap_async(trainer: str, module: Any) -> None:
    _changes.wrap(module, "_iter_vllm_named_params", _announce)
    _changes.wrap(getattr(module, trainer), "_streaming_iter", _stream)
    _changes.wrap(getattr(module, trainer), "_sync_weight_merged", _without_merging)


def _is_merged(model: nn.Module) -> bool:
    """Whether adapters are merged into what is handed over of a model of ours."""
    return _is_ours(model) and has_adapters(model)


def _announce(original: Callable[..., Any], model: nn.Module) -> Iterator[Item]:
    if not _is_merged(model):
        yield from original(model)
        return
    for info in _weights(model).infos:  # in the order of the hand-over; of these, names, dtypes and shapes are read
        yield info.name, torch.empty(info.shape, dtype=info.dtype, device="meta")


def _stream(original: Callable[..., Any], trainer: Any) -> Iterator[Item]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    yield from _weights(model, trainer.accelerator.is_main_process) if _is_merged(model) else original(trainer)


def _without_merging(original: Callable[..., Any], trainer: Any, *args: Any) -> Any:
    model = trainer.accelerator.unwrap_model(trainer.model)
    with Changes() as changes:
        if _is_merged(model):
            for name in ("merge_adapter", "unmerge_adapter"):
                changes.replace(model, name, lambda: None)
        return original(trainer, *args)


_WRAPPERS: dict[str, Callable[[Any], None]] = {
    "trl.generation.vllm_generation": _wrap_generation,
    "trl.experimental.online_dpo.online_dpo_trainer": _wrap_online_dpo,
    "trl.experimental.async_grpo.async_grpo_trainer": functools.partial(_wrap_async, "AsyncGRPOTrainer"),
    "trl.experimental.async_distillation.async_distillation_trainer": functools.partial(
        _wrap_async, "AsyncDistillationTrainer"
    ),
}
