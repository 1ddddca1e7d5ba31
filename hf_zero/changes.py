"""Changes of other libraries' classes and objects: made in one way, and put back in one way.

[Note: changes of other libraries] A library is changed where it offers no hook, and only so that what is not ours behaves as
before. Each change remembers what stood in the object itself: a method that it inherited is inherited again afterwards.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable
from typing import Any

_kept: list[Changes] = []  # of the whole program, in the order in which they were first made


class Changes:
    """Some changes that belong together; as a context manager, they last as long as its block."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Let the attribute `name` of a class, module or object be `new`; what others put there since stays."""
        had, old = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, new)

        def put_back() -> None:
            if vars(owner).get(name) is not new:
                return
            if had:
                setattr(owner, name, old)
            else:
                delattr(owner, name)

        self._undo.append(put_back)

    def wrap(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Let `owner.name(...)` be `replacement(original, ...)`."""
        original = vars(owner)[name]

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        self.replace(owner, name, wrapped)

    def once_imported(self, module: str, change: Callable[[Any], None]) -> None:
        """Call `change` with a module, now or when it has been imported: that takes seconds, and many never need it."""
        if module in sys.modules:
            change(sys.modules[module])
            return
        importing = _Importing(module, change)
        sys.meta_path.insert(0, importing)
        self.also(lambda: sys.meta_path.remove(importing))

    def also(self, undo: Callable[[], None]) -> None:
        """Remember how to undo a change of another kind."""
        self._undo.append(undo)

    def keep(self) -> None:
        """Let `undo_all` put these back, too."""
        _kept.append(self)

    def undo(self) -> None:
        """Put back what was there, the latest change first."""
        if self in _kept:
            _kept.remove(self)
        while self._undo:
            self._undo.pop()()

    def __bool__(self) -> bool:
        return bool(self._undo)

    def __enter__(self) -> Changes:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


class _Importing(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, with a word after the import."""

    def __init__(self, module: str, change: Callable[[Any], None]) -> None:
        self._module, self._change = module, change

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The spec of the module that is waited for."""
        if fullname != self._module:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                if self in sys.meta_path:
                    self._change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def undo_all() -> None:
    """Put back everything that was to be kept until now."""
    while _kept:
        _kept[-1].undo()
