"""Calls of autograd: where a backward begins and ends for the program that called it.

[Note: a backward ends where it was called] On a GPU autograd runs a backward on a thread of its own. If that raises, the
exception comes back to the caller at once; what autograd was to call at the end is dropped by the other thread, some time
later. So a program that catches the error would go on with a model that is still whole, and a recovery that waits for the
drop would run beside it. Therefore the call itself tells: it gives the backward something to carry, and before it returns it
ends what has begun under that.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_zero import torch_compat
from hf_zero.changes import Changes
from hf_zero.engine.parameters.whole import RECORD, Whole
from hf_zero.engine.units.keeping import note_failure
from hf_zero.engine.units.reading import connected
from hf_zero.errors import UsageError, ZeroError

_KEY = "hf_zero pass"
_CREATES_GRAPH, _INPUTS = 3, 4  # among the arguments of `RUN_BACKWARD`; the latter: what gradients are asked for
_changes = Changes()
_at_next: list[weakref.WeakMethod[Callable[[], None]]] = []


class Pass:
    """One call of `backward` or `torch.autograd.grad`, from the program; calls inside it are part of it.

    Attributes:
        is_over: it has returned or raised. A node that another thread still runs for it begins nothing any more.
        num_inside: calls inside it that are under way: reentrant checkpoints.
        is_for_all: it gives gradients to whatever it reaches; not `torch.autograd.grad`, nor `backward(inputs=...)`.
        makes_graph: of itself, to be differentiated again (`create_graph=True`).
    """

    def __init__(self, is_for_all: bool = True, makes_graph: bool = False) -> None:
        self.is_over = False
        self.is_for_all = is_for_all
        self.makes_graph = makes_graph
        self.num_inside = 0
        self._completions: list[Callable[[], None]] = []
        self._ends: list[Callable[[], None]] = []

    def at_end(self, end: Callable[[], None]) -> None:
        """Let `end` be called in the thread that has called, when the call returns or raises."""
        self._ends.append(end)

    def at_completion(self, complete: Callable[[], None]) -> None:
        """Let `complete` be called when all of it has run, and nothing has raised."""
        self._completions.append(complete)

    def complete(self) -> None:
        """All of it has run."""
        while self._completions:
            self._completions.pop(0)()

    def end(self) -> None:
        """It returns or raises."""
        self.is_over = True
        while self._ends:
            self._ends.pop()()


def current_pass() -> Pass | None:
    """The call that this thread works for, whichever thread has made it."""
    found = torch_compat.carried_by_backward(_KEY)
    return found if isinstance(found, Pass) else None


def makes_graph() -> bool:
    """Whether the backward under way is to be differentiated again."""
    found = current_pass()
    return torch.is_grad_enabled() if found is None else found.makes_graph


def hear_of_passes() -> None:
    """Let every call of autograd tell of its end; a second time changes nothing."""
    if _changes:
        return
    _changes.keep()
    for owner in torch_compat.CALLERS_OF_BACKWARD:
        _changes.replace(owner, torch_compat.RUN_BACKWARD, _telling(getattr(owner, torch_compat.RUN_BACKWARD)))


def at_next_pass(method: Callable[[], None]) -> None:
    """Let a method be called when the next pass begins, if its object is there still."""
    _at_next.append(weakref.WeakMethod(method))


def _call_those_due() -> None:
    while True:
        try:
            method = _at_next.pop()()
        except IndexError:  # none is left: another thread may have taken the last
            return
        if method is not None:
            method()


def refuse_create_graph() -> None:
    """Raise where the backward under way, which gives a parameter a gradient, is to be differentiated again."""
    if torch.is_grad_enabled():
        raise UsageError(
            "backward with create_graph=True is not supported under ZeRO: gradients of partitioned parameters are reduced "
            "outside autograd, so they cannot be differentiated again; those of inputs can: "
            "`torch.autograd.grad(outputs, inputs, create_graph=True)`"
        )


def _of_parameters(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with parameters for what modules see of them: so gradients are those of all uses, not of one read."""
    if len(args) <= _INPUTS or not any(isinstance(each, Whole) for each in args[_INPUTS]):
        return args
    return (*args[:_INPUTS], tuple(map(_as_parameter, args[_INPUTS])), *args[_INPUTS + 1 :])


def _as_parameter(tensor: Any) -> Any:
    record = vars(tensor).get(RECORD) if isinstance(tensor, Whole) else None
    return tensor if record is None or connected([record])[0] is None else record.param


@contextlib.contextmanager
def _inside(around: Pass | None) -> Iterator[None]:
    """Within: a call inside a call."""
    if around is None:
        yield
        return
    around.num_inside += 1
    try:
        yield
    finally:
        around.num_inside -= 1


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch_compat.in_backward():  # of a checkpoint, or in a hook: the call around it tells
            with _inside(current_pass()):
                return original(*args, **kwargs)
        if _at_next:
            _call_those_due()
        args = _of_parameters(args)
        begun = Pass(
            torch_compat.backward_is_for_all(*args, **kwargs), len(args) > _CREATES_GRAPH and bool(args[_CREATES_GRAPH])
        )
        torch_compat.carry_into_backward(_KEY, begun)
        try:
            result = original(*args, **kwargs)
            begun.complete()
        except BaseException as error:
            note_failure(error)
            try:
                begun.end()
            except ZeroError as later:  # what the program has to hear of is the first
                error.add_note(f"While the model was put at rest: {later}")
            raise
        finally:
            torch_compat.carry_into_backward(_KEY, None)
        begun.end()
        return result

    disabled: Callable[..., Any] = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
    return disabled
