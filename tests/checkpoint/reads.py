"""How many bytes of tensor files a process reads, whoever asks for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def counting_reads() -> Iterator[list[int]]:
    """While active, the size of every read from a safetensors file is appended to the list."""
    sizes: list[int] = []
    opened: Any = Path.open
    preadv = os.preadv

    def open_counted(path: Path, *args: Any, **kwargs: Any) -> Any:
        file = opened(path, *args, **kwargs)
        return _Counted(file, sizes) if path.suffix == ".safetensors" else file

    def preadv_counted(fd: int, buffers: Any, *args: Any) -> int:
        count = preadv(fd, buffers, *args)
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors"):
            sizes.append(count)
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", open_counted)
        patch.setattr(os, "preadv", preadv_counted)
        yield sizes


class _Counted:
    def __init__(self, file: Any, sizes: list[int]) -> None:
        self._file, self._sizes = file, sizes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, *args: int) -> Any:
        data = self._file.read(*args)
        self._sizes.append(len(data))
        return data
