"""What is under way on a thread: calls of a module, methods of an object, functions. The one place that looks at frames.

[Note: under way] Flags that hooks set and clear come first, and do not suffice: torch calls a module's forward hooks after an
`Exception` but not after a `KeyboardInterrupt`, and no post-hook of an optimizer's step that has raised. So at the next event
what the hooks have counted is held against the frames of the thread on which they counted it. That thread has to be named: on a
GPU autograd runs a backward on a thread of its own, while the one that called `step(closure)` waits inside the closure.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType

from torch import nn
from torch.nn.utils import parametrize


def _frames(thread: int | None) -> Iterator[FrameType]:
    """The frames of a thread, the innermost first; None: of this one. None at all of a thread that has ended."""
    frame = sys._getframe(2) if thread is None else sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def calls_of(module: nn.Module, thread: int | None = None) -> int:
    """How many calls of `module` are under way on a thread."""
    return sum(f.f_code.co_name == "_call_impl" and f.f_locals.get("self") is module for f in _frames(thread))


def has_raised(output: object) -> bool:
    """Whether a forward hook that is always called is called because its module has raised."""
    return output is None and sys.exc_info()[1] is not None


def is_method_running(owner: object, thread: int) -> bool:
    """Whether a method of `owner` is under way on a thread."""
    return any(frame.f_locals.get("self") is owner for frame in _frames(thread))


_GETATTR, _PEEKS = nn.Module.__getattr__.__code__, nn.TransformerEncoder.forward.__code__


def is_peeked_at() -> bool:
    """Whether the parameter just asked for is only looked at, by code of torch, for its device.

    `nn.TransformerEncoder` does so with its first layer's, on the ranks alone whose masks allow nested tensors.
    """
    asked = next((frame for frame in _frames(None) if frame.f_code is _GETATTR), None)
    return asked is not None and asked.f_back is not None and asked.f_back.f_code is _PEEKS


_ASSIGN = {nn.Module.__setattr__.__code__: "value", nn.Module.register_parameter.__code__: "param"}


def assigned_name(value: object) -> str | None:
    """The name under which `value` is being assigned: `module.name = value` asks, or `module.register_parameter(name, value)`.

    None if nobody assigns it, or to a module of no sharded model.
    """
    frame = sys._getframe(3)  # beyond the property that asks here, and `isinstance(value, Parameter)`, which asks that
    assigned = _ASSIGN.get(frame.f_code)
    known = frame.f_locals
    if assigned is None or known[assigned] is not value or type(known["self"]._parameters) is dict:
        return None
    return str(known["name"])


_REGISTERS = (*_ASSIGN, parametrize._register_parameter_or_buffer.__code__)


def is_registered() -> bool:
    """Whether the property that asks here is asked by code of torch that would register a parameter, or else a tensor."""
    return sys._getframe(3).f_code in _REGISTERS


def is_made_a_parameter() -> bool:
    """Whether the method that asks here is called by `nn.Parameter(tensor)`."""
    return sys._getframe(2).f_code is nn.Parameter.__new__.__code__


def is_function_running(name: str) -> bool:
    """Whether a function of that name is under way on this thread."""
    return any(frame.f_code.co_name == name for frame in _frames(None))


class CountedCalls:
    """The calls of a model, or of parts of it, that hooks have counted, one within another, on the thread they run on.

    Attributes:
        modules: whose calls are under way, the outermost first.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self._thread = 0

    def begin(self, module: nn.Module) -> None:
        """A call of `module` begins, on this thread."""
        self._thread = threading.get_ident()
        self.modules.append(module)

    def are_alive(self, entering: nn.Module) -> bool:
        """Whether what was counted still runs; `entering` has been called on this thread, and is not counted yet."""
        outermost = self.modules[0]
        is_own_call = entering is outermost and self._thread == threading.get_ident()
        return calls_of(outermost, self._thread) >= self.modules.count(outermost) + is_own_call

    def are_here(self) -> bool:
        """Whether any are under way, on this thread."""
        return bool(self.modules) and self._thread == threading.get_ident()

    def have_ended_unseen(self) -> bool:
        """Whether calls counted on this thread have ended without their hooks, as Ctrl-C ends them."""
        return self.are_here() and not calls_of(self.modules[0])
