"""TRL's trainers with `use_vllm`, on a partitioned model: vLLM gets whole weights, as TRL names them.

`VLLMGeneration` (GRPO, RLOO, distillation) hands over `name, param.data`, which here are rows. Two of its methods are wrapped:

- `_iter_named_params`: what it yields comes from `whole_parameters`, with adapters merged layer by layer and into copies.
- `sync_weights`: in server mode TRL walks all weights once for their names and shapes, which are known without a gather; and
  ranks without the server's client take part in the gathers only.

A model that is not partitioned goes TRL's own way. `hf_zero.undo()` puts the originals back.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hf_zero.changes import Changes
from hf_zero.checkpoint.export import world_of_model
from hf_zero.handover.stream import WholeParameters, whole_parameters

_MODULE = "trl.generation.vllm_generation"
_changes = Changes()


class _Importing(importlib.abc.MetaPathFinder):
    """Wraps TRL's methods when they have been imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """What the other finders find, with a word after the import."""
        if fullname != _MODULE:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                if self in sys.meta_path:
                    _wrap(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_importing = _Importing()


def install() -> None:
    """Wrap the methods, now or when TRL is imported; a second call changes nothing."""
    if _changes:
        return
    _changes.keep()
    sys.meta_path.insert(0, _importing)
    _changes.also(lambda: sys.meta_path.remove(_importing))
    if _MODULE in sys.modules:
        _wrap(sys.modules[_MODULE])


def _wrap(module: Any) -> None:
    _changes.wrap(module.VLLMGeneration, "_iter_named_params", _iterate)
    _changes.wrap(module.VLLMGeneration, "sync_weights", _sync)


def _weights(generation: Any) -> WholeParameters:
    keep = generation.mode != "server" or generation.accelerator.is_main_process
    return whole_parameters(generation.model, names="model", keep=keep)


def _iterate(original: Callable[..., Any], generation: Any) -> Iterator[tuple[str, Tensor]]:
    if world_of_model(generation.model) is None:
        yield from original(generation)
        return
    for name, tensor in _weights(generation):
        yield generation._fix_param_name_to_vllm(name), tensor
        del tensor


def _sync(original: Callable[..., None], generation: Any) -> None:
    is_ours = world_of_model(generation.model) is not None
    if is_ours and generation.mode == "server" and generation._weight_metadata is None:
        generation._weight_metadata = [
            (generation._fix_param_name_to_vllm(info.name), str(info.dtype).removeprefix("torch."), list(info.shape))
            for info in _weights(generation).infos
        ]
    original(generation)
