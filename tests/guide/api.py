"""Writes the page of the public names from their signatures and docstrings: `python -m tests.guide.api`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import hf_zero

PAGE = Path(hf_zero.__file__).parent / "guide" / "api.md"
_HEAD = """# API

The public names of `import hf_zero as zero`. `help(zero.shard_model)` tells the rest: arguments, shapes, units, errors,
sources. (`python -m tests.guide.api` writes this page from the docstrings.)
"""
_GROUPS = {
    "Partition a model": ["shard_model", "Init", "ZeroConfig", "leave_whole", "disabled", "undo"],
    "Train": [
        "ZeroTrainingArguments",
        "with_zero",
        "ZeroCallback",
        "ZeroAccelerator",
        "ZeroPlugin",
        "resume_or_start",
        "LossScaler",
        "LossScale",
        "mark_elementwise",
    ],
    "Look, and change by hand": [
        "GatheredParameters",
        "whole_parameters",
        "WholeParameters",
        "register_forward_method",
        "mark_dirty",
        "engine_of",
        "ZeroEngine",
    ],
}


def page() -> str:
    """The page as it should be."""
    parts = [_HEAD]
    for title, names in _GROUPS.items():
        parts.append(f"## {title}\n\n" + "\n\n".join(map(_entry, names)) + "\n")
    errors = sorted(set(hf_zero.__all__) - {name for names in _GROUPS.values() for name in names})
    rows = [f"| `{name}` | {_first(getattr(hf_zero, name))} |" for name in errors]
    parts.append("## Errors\n\n| error | when |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _entry(name: str) -> str:
    value = getattr(hf_zero, name)
    return f"**`{name}{_signature(value)}`**  \n{_first(value)}"


def _first(value: Any) -> str:
    """The first paragraph of a docstring as one line."""
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def _signature(value: Any) -> str:
    """Names and defaults without annotations; of what a class takes from its parent, `...`."""
    signature = inspect.signature(value)
    own = [each for each in signature.parameters.values() if _is_own(value, each.name)]
    texts = [_text(each) for each in own if each.kind is not each.VAR_POSITIONAL]
    if len(own) < len(signature.parameters):
        texts.insert(0, "...")
    text = f"({', '.join(texts)})"
    return text if len(text) < 200 else "(...)"


def _text(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    if parameter.default is parameter.empty:
        return parameter.name
    return f"{parameter.name}={re.sub(r'<(.*)>', '...', repr(parameter.default))}"


def _is_own(value: Any, name: str) -> bool:
    parents = value.__mro__[1:-1] if inspect.isclass(value) else ()
    return not any(name in vars(parent).get("__dataclass_fields__", {}) for parent in parents)


if __name__ == "__main__":
    PAGE.write_text(page())
