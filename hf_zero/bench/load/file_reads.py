"""How many bytes of safetensors files a process asks for."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import safetensors
import transformers.modeling_utils


class ReadCount:
    """While active, counts what is requested from files opened with `safe_open`, by transformers or directly.

    A tensor or a slice counts with its bytes as it comes from the reader, whatever is done with it. Reading headers
    counts nothing. Several threads may read.
    """

    def __init__(self) -> None:
        self._asked: list[int] = []  # appended to by the loader's threads
        self._modules: tuple[ModuleType, ...] = (safetensors, transformers.modeling_utils)
        self._open: Any = safetensors.safe_open

    @property
    def num_bytes(self) -> int | None:
        """Bytes requested so far; None if no tensor was requested, as with a loader that has its own reader."""
        return sum(self._asked) if self._asked else None

    def __enter__(self) -> ReadCount:
        for module in self._modules:
            vars(module)["safe_open"] = lambda *args, **options: _Counting(self._open(*args, **options), self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for module in self._modules:
            vars(module)["safe_open"] = self._open


class _Counting:
    """An open file, or a slice of it that is read when it is indexed; what is not counted here is passed on to it."""

    def __init__(self, source: Any, asked: list[int]) -> None:
        self._source = source
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __enter__(self) -> _Counting:
        self._source.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._source.__exit__(*error)

    def get_slice(self, name: str) -> _Counting:
        return _Counting(self._source.get_slice(name), self._asked)

    def get_tensor(self, name: str) -> Any:
        return self._count(self._source.get_tensor(name))

    def __getitem__(self, index: Any) -> Any:
        return self._count(self._source[index])

    def _count(self, tensor: Any) -> Any:
        self._asked.append(tensor.nbytes)
        return tensor
