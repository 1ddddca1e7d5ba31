"""MLPs of blocks, computed for some tokens at a time.

What an MLP makes between its layers is several times as wide as a token. With `tile_mlp`, it is there for some tokens only:
each slice is computed again in the backward. A module is taken for an MLP by its name in a block, and because it is made of
layers, activations, norms and dropout alone: these act on each token by itself. Routers with their experts are left alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero import torch_compat
from hf_zero.engine.tiles.heads import Runner, Surroundings
from hf_zero.engine.tiles.work import Work
from hf_zero.errors import ConfigError
from hf_zero.parameters import parameters_of

_NAMES = ("mlp", "feed_forward", "feedforward", "ffn", "ff")
_MIXES = ("expert", "router", "moe", "gate")  # in names of parts, but for a gate's projection


class TiledBlock:
    """A module that acts on each token alone, as it is called.

    Args:
        module: with tokens [..., width] as its only input, and one output.
        size: tokens at a time.
        runner: of the module, where the calls of the block around it don't make its parameters whole.
    """

    def __init__(self, module: nn.Module, size: int, runner: Runner | None) -> None:
        self._module = weakref.ref(module)
        self._size = size
        self.runner = runner
        self._given = torch_compat.call_of(module)
        torch_compat.call_instead(module, self)

    def remove(self) -> None:
        """Let calls of the module be as they were."""
        module = self._module()
        if module is not None and torch_compat.call_of(module) is self:
            torch_compat.call_instead(module, self._given)

    def _computed(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "a graph has outlived its module"
        return torch_compat.call_plainly(module, self._given, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, some tokens at a time."""
        tokens = args[0] if len(args) == 1 and not kwargs else None
        is_plain = not isinstance(tokens, Tensor) or tokens.ndim < 2
        if is_plain or torch.compiler.is_compiling() or torch_compat.in_function_transform():
            return self._computed(*args, **kwargs)
        assert isinstance(tokens, Tensor)
        module = self._module()
        assert module is not None
        work = Work(module, self._size, lambda x: (self._computed(x),))
        flat = tokens.reshape(-1, tokens.shape[-1])
        (found,) = work(flat) if self.runner is None else self.runner(lambda: work(flat))
        return found.reshape(*tokens.shape[:-1], found.shape[-1])


def tile_mlps(model: nn.Module, seen: Surroundings) -> list[TiledBlock]:
    """Let the MLPs of a model's blocks compute `tile_mlp` tokens at a time.

    Raises:
        ConfigError: it has none.
    """
    size = seen.world.config.tile_mlp
    if not size:
        return []
    found = list(mlps_of(model))
    if not found:
        raise ConfigError(
            f"key 'tile_mlp': no MLP found in {type(model).__name__}: a module named {', '.join(_NAMES[:-1])} or {_NAMES[-1]} "
            "in a list of blocks, made of plain layers; leave the key out"
        )
    return [TiledBlock(each, size, _runner(each, seen)) for each in found]


def _runner(module: nn.Module, seen: Surroundings) -> Runner | None:
    has_entries = any(id(part) in seen.hooks_of for part in module.modules())
    return seen.runner_of(module) if has_entries else None


def mlps_of(model: nn.Module) -> Collection[nn.Module]:
    """The MLPs of a model's blocks, see the module's docstring."""
    found: dict[nn.Module, None] = {}
    for each in model.modules():
        if isinstance(each, nn.ModuleList):
            for block in each:
                found.update(dict.fromkeys(m for name, m in block.named_children() if _is_mlp(name, m)))
    return list(found)


def _is_mlp(name: str, module: nn.Module) -> bool:
    if name.lower() not in _NAMES or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    names = [path.rpartition(".")[2].lower() for path, _ in module.named_modules()]
    mixes = any(word in each and "proj" not in each for each in names for word in _MIXES)
    is_flat = all(param.ndim <= 2 for param in parameters_of(module))
    return not mixes and is_flat and next(parameters_of(module), None) is not None
