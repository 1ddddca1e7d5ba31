"""Where a configuration is written: mappings, YAML and JSON files, JSON text, short forms, and what HF_ZERO_CONFIG names.

The only reader of the `HF_ZERO_*` variables but for `HF_ZERO_COLLECTIVES`, which `ZeroConfig.exchange` reads.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hf_zero.config import shipped, values
from hf_zero.errors import ConfigError

CONFIG_VARIABLE = "HF_ZERO_CONFIG"
"""Environment variable: the file, JSON text or short form that `ZeroConfig.load(None)` reads."""


def read(source: object) -> tuple[object, str]:
    """The raw content of a source, and the name that errors call it by."""
    if source is None:
        source = os.environ.get(CONFIG_VARIABLE)
        if not source:
            raise ConfigError(
                f"no configuration was given and the environment variable {CONFIG_VARIABLE} is not set; "
                "pass a stage or a path, or set it to a stage or to the path of a YAML or JSON file"
            )
        content, name = read(source)
        return content, f"{CONFIG_VARIABLE}={name}"
    if isinstance(source, Mapping):
        return source, "the given mapping"
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return _parse_json(source, "the inline JSON"), "the inline JSON"
    if (isinstance(source, str) and shipped.is_short(source)) or type(source) is int:
        stage = shipped.stage_of(source)
        if stage is not None:
            return {"stage": stage}, str(source)
        return read_file(shipped.file_of(str(source))), str(source)
    if isinstance(source, (str, os.PathLike)):
        path = os.fsdecode(source)
        return read_file(path), path
    raise ConfigError(
        f"{values.shown(source)} is not a configuration; use a stage, a ZeroConfig, a mapping, a path, or JSON text in {{...}}"
    )


def from_anywhere(source: str) -> str:
    """What `read` takes to mean the same in another working directory: the whole path of a file, all else as it is."""
    is_file = not shipped.is_short(source) and os.path.exists(source)
    return os.path.abspath(source) if is_file else source


def read_file(path: str) -> object:
    """The raw content of a YAML (.yaml, .yml) or JSON (.json) file."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{path!r}: is not a configuration file; its name must end in .yaml, .yml or .json")
    try:
        text = Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        short = Path(path).stem
        hint = f"; {short!r} alone is the one that comes with hf_zero" if short in shipped.names() else ""
        raise ConfigError(f"{path}: no such file (the working directory is {os.getcwd()}){hint}") from None
    except (OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8, or a NUL in the path
        raise ConfigError(f"{path!r}: cannot be read: {error}") from None
    return _parse_json(text, path) if suffix == ".json" else _parse_yaml(text, path)


def _parse_json(text: str, source: str) -> object:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for key, value in pairs:
            if key in mapping:
                raise ConfigError(f"{source}: key {values.shown(key)} is written twice; keep one")
            mapping[key] = value
        return mapping

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}: is not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except ConfigError:
        raise
    except (RecursionError, ValueError) as error:  # ValueError: an integer of thousands of digits
        raise ConfigError(f"{source}: cannot be read as JSON: {error}") from None


def _parse_yaml(text: str, source: str) -> object:
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        """A SafeLoader that refuses a key written twice; YAML would silently keep the last one."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                    problem = f"key {values.shown(key.value)} is written twice; keep one"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add((key.tag, str(key.value)))
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{source}: is not YAML: {where}{error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date such as 2026-13-45
        raise ConfigError(f"{source}: cannot be read as YAML: {error}") from None


SUMMARY_VARIABLE = "HF_ZERO_SUMMARY"
"""Environment variable: how much summaries say."""


def summary_level() -> Literal["short", "full", "none"]:
    """How much summaries say. Raises ConfigError for an unknown word."""
    word = os.environ.get(SUMMARY_VARIABLE, "").strip().lower()
    if word in ("full", "all"):
        return "full"
    if word in ("none", "0"):
        return "none"
    if word not in ("", "1", "short"):
        raise ConfigError(f"{SUMMARY_VARIABLE} is {word!r}; use short, full or none")
    return "short"


@functools.cache
def show_once(text: str) -> None:
    """Write to stderr, on the first rank: loggers are silent at the level of information, and this is what people must know."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(text)
