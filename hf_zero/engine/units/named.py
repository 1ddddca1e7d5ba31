"""Modules that a configuration names, by class or by name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from hf_zero.errors import ConfigError


def find_named(model: nn.Module, entries: Sequence[str], key: str) -> list[nn.Module]:
    """The outermost modules that `entries` name.

    Args:
        model: any module.
        entries: classes, or names (whole ones, or their last part) with wildcards.
        key: where a configuration has them.

    Raises:
        ConfigError: an entry fits no module.
    """
    unused = dict.fromkeys(entries)
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        fitting = [entry for entry in entries if _fits(entry, name, module)]
        for entry in fitting:
            unused.pop(entry, None)
        if fitting and module not in inside:
            found.append(module)
            inside.update(module.modules())
    if unused:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"key {key!r}: {next(iter(unused))!r} fits no module of {type(model).__name__}, neither by class nor by name; "
            f"its classes are {', '.join(classes)}"
        )
    return found


def _fits(entry: str, name: str, module: nn.Module) -> bool:
    return entry == type(module).__name__ or fnmatchcase(name, entry) or fnmatchcase(name.rpartition(".")[2], entry)
