"""Files that others write of a partitioned model's tensors: what is in them is whole.

`safetensors.torch.save_file(model.state_dict(), path)`, `save`, `save_model`, and what stands on them (LoRA weights of
diffusers, modules of sentence-transformers, `huggingface_hub.save_torch_model`) read tensors where they lie. So every rank
gathers them, one after the other, onto its CPU, and writes what it would have written of a whole model; all ranks must make the
call. These are wrapped:

- `safetensors.torch._flatten_as_ptr`: all that is written passes it.
- `safetensors.torch._remove_duplicate_names`, with which `save_model` finds tied tensors by their memory.
- `_clean_state_dict_for_safetensors` of huggingface_hub, which does the same before it deals tensors out to files.

Nothing changes for tensors that are not partitioned. `hf_zero.undo()` puts the originals back.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from hf_zero.changes import Changes
from hf_zero.engine.parameters.at_rest.gathers import gather
from hf_zero.engine.parameters.at_rest.root import AtRest, Root

_changes = Changes()


def install() -> None:
    """Wrap the functions; a second call changes nothing."""
    if not _changes:
        _changes.keep()
        safetensors = importlib.import_module("safetensors.torch")
        hub = importlib.import_module("huggingface_hub.serialization._torch")
        _changes.wrap(safetensors, "_flatten_as_ptr", functools.partial(_given, _whole))
        _changes.wrap(safetensors, "_remove_duplicate_names", functools.partial(_given, _without_values))
        _changes.wrap(hub, "_clean_state_dict_for_safetensors", functools.partial(_given, _whole))


def _given(
    make: Callable[[Root], Tensor], original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any
) -> Any:
    return original(_mapped(tensors, make), *args, **kwargs)


def _whole(root: Root) -> Tensor:
    with torch.no_grad():
        return gather([root], f"saving {root.describe()} with safetensors")[0].detach().cpu()


def _without_values(root: Root) -> Tensor:
    like = cast(Tensor, root)
    return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def _mapped(tensors: Any, make: Callable[[Root], Tensor]) -> Any:
    """Tensors by name, with plain ones in place of partitioned ones; what shares memory does so still."""
    if not isinstance(tensors, Mapping) or not any(isinstance(value, AtRest) for value in tensors.values()):
        return tensors
    made: dict[int, Tensor] = {}

    def plain(value: Any) -> Any:
        if not isinstance(value, AtRest):
            return value
        base = vars(value.root).get("_zero_base")  # of an alias: the parameter
        key = id(value.root if base is None else base)
        if key not in made:
            made[key] = make(value.root)
        return value.of(made[key])

    return {name: plain(value) for name, value in tensors.items()}
