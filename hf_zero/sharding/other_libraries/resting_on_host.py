"""What asks a model where it computes, or moves it, while its parameters rest in host memory: see [Note: rows on the host].

- `model.device` of transformers' and other libraries' classes, which is that of the first parameter: inputs belong on the
  device on which modules compute.
- `nn.Module._apply` (`model.to(device)`, `.cuda()`): buffers move, and what rests in host memory stays there, with its
  gradients. Another dtype is given to it there.
  Under `torch.inference_mode()` partitioned parameters, on the host or not, stay ones that can be trained.
- `GradScaler`, which sends its scale to where gradients are, and does not wait for it: what reads it in host memory would read
  it too early. It waits there, once a step.

Nothing else changes for models whose parameters rest where they compute. `hf_zero.undo()` puts the originals back.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.changes import Changes
from hf_zero.engine.parameters.at_rest.root import Root
from hf_zero.engine.parameters.on_host import computes_on
from hf_zero.parameters import parameters_of

_changes = Changes()


class _Device(property):
    """Of a class of models, by way of what it was."""


def install() -> None:
    """Wrap torch's function; a second call changes nothing."""
    if not _changes:
        _changes.keep()
        _changes.wrap(nn.Module, "_apply", _apply)
        scaling = importlib.import_module("torch.amp.grad_scaler")
        _changes.wrap(scaling._MultiDeviceReplicator, "get", _served)


def _served(original: Any, replicator: Any, device: torch.device) -> Tensor:
    is_first = device not in replicator._per_device_tensors
    found: Tensor = original(replicator, device)
    source: torch.device = replicator.master.device
    if is_first and device.type == "cpu" != source.type:
        torch.accelerator.current_stream(source).synchronize()
    return found


def tell_device(model: nn.Module) -> None:
    """Let a model, and its parts, say that they are where they compute."""
    for kind in {base for part in model.modules() for base in type(part).__mro__}:
        asked = vars(kind).get("device")
        if isinstance(asked, property) and asked.fget is not None and not isinstance(asked, _Device):
            _changes.replace(kind, "device", _Device(functools.partial(_device_of, asked.fget), doc=asked.__doc__))


def _device_of(asked: Callable[[Any], Any], model: nn.Module) -> Any:
    first = next(parameters_of(model), None)
    elsewhere = None if first is None else computes_on(first)
    return asked(model) if elsewhere is None else elsewhere


def _apply(original: Any, module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
    held: dict[str, Any] = module._parameters
    if torch.is_inference_mode_enabled() and any(isinstance(param, Root) for param in dict.values(held)):
        with torch.inference_mode(False):
            return _apply(original, module, fn, *args, **kwargs)
    resting = {name: param for name, param in dict.items(held) if param is not None and computes_on(param) is not None}
    moved = {name: found for name, param in resting.items() if (found := _found_elsewhere(fn, param)) is not None}
    if not moved:
        return original(module, fn, *args, **kwargs)
    stay = {name: resting[name] for name, dtype in moved.items() if dtype == resting[name].dtype}
    cast = {id(resting[name]): dtype for name, dtype in moved.items() if name not in stay}
    cast |= {
        id(resting[name].grad): moved[name] for name in moved if name not in stay and resting[name].grad is not None
    }
    order = list(dict.keys(held))
    for name in stay:
        dict.pop(held, name)
    try:
        return original(module, lambda t: t.to(cast[id(t)]) if id(t) in cast else fn(t), *args, **kwargs)
    finally:
        rest = dict(dict.items(held)) | stay
        dict.clear(held)
        dict.update(held, {name: rest[name] for name in order})


def _found_elsewhere(fn: Callable[[Tensor], Tensor], param: Tensor) -> torch.dtype | None:
    """The dtype that a function gives to a tensor that it moves to another device; None: it does not move."""
    like = torch.empty(0, dtype=param.dtype, device=param.device)
    found = fn(like)
    return found.dtype if found.device != like.device else None
