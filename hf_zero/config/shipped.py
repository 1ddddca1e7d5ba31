"""Short forms of a configuration: the number of a stage (`3`), or the name of a file that comes with the package (`zero3`)."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hf_zero.config.stages import POLICIES
from hf_zero.errors import ConfigError

_NAME = re.compile(r"[+-]?\w[\w-]*")  # neither a folder nor a suffix
_NUMBER = re.compile(r"[+-]?\d{1,30}", re.ASCII)


def is_short(source: str) -> bool:
    """Whether a text is a short form, right or wrong: one word, so that no file's name is meant."""
    return _NAME.fullmatch(source) is not None


def stage_of(source: str | int) -> int | None:
    """The stage that a number, or its text, stands for; None for a name.

    Raises:
        ConfigError: there is no such stage.
    """
    if _NUMBER.fullmatch(str(source)) is None:
        return None
    if int(source) not in range(len(POLICIES)):
        raise ConfigError(f"{source} is not a stage; use 0, 1, 2 or 3, or a configuration file")
    return int(source)


def file_of(name: str) -> str:
    """The path of the file that comes with the package under this name.

    Raises:
        ConfigError: there is none.
    """
    path = folder() / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"{name!r} is not a configuration; use a stage (0, 1, 2, 3), one that comes with hf_zero ({', '.join(names())}), "
            "or a file whose name ends in .yaml, .yml or .json"
        )
    return os.fspath(path)


def names() -> list[str]:
    """What comes with the package."""
    return sorted(path.stem for path in folder().glob("*.yaml"))


def folder() -> Path:
    """Where the files are: in the package, as a wheel puts them there, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"
