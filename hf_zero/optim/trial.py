"""Trying an optimizer's step on tiny parameters, to see what it is: nothing of the optimizer itself changes."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.errors import UsageError
from hf_zero.optim.kinds import in_slots, is_beside, step_of, wrapped_optimizers
from hf_zero.optim.overrides import is_manager

_PROBE_STEPS = 16
_STAY = (nn.Module, torch.optim.Optimizer, type, types.FunctionType, types.BuiltinFunctionType, functools.partial)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """A trial leaves no trace: the user's random numbers stay where they are, and warnings are of the step, not of it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if (device := _device_in_use()) is not None:
            fork = torch.random.fork_rng(devices=[device.index], device_type=device.type)
            stack.enter_context(fork)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def seed(number: int) -> None:
    """Seed a trial, in `quietly`. (A device that is not in use yet would be seeded when it is, and stay so.)"""
    if _device_in_use() is None:
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def _device_in_use() -> torch.device | None:
    """This process's accelerator, if it has begun to use one."""
    if not torch.accelerator.is_available():
        return None
    index, kind = torch.accelerator.current_device_index(), torch.accelerator.current_accelerator()
    assert kind is not None
    is_used = getattr(torch.get_device_module(kind), "is_initialized", lambda: True)()
    return torch.device(kind.type, index) if is_used else None


def depends_on_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step on one parameter depends on another's gradient, on its place or on whether there are others.

    Tried on tiny ones.

    An optimizer that cannot be tried (it fails on tiny parameters) counts as one that does not.
    """
    for with_closure in (False, True):
        with contextlib.suppress(Exception):
            return _depends_on_others(optimizer, with_closure)
    return False


def why_not_tried(optimizer: torch.optim.Optimizer) -> Exception | None:
    """Why an optimizer's step cannot be tried on tiny parameters; None: it can."""
    failed: Exception | None = None
    for group in [group for group in optimizer.param_groups if group["params"]][:1]:
        for with_closure in (False, True):
            try:
                with quietly():
                    _try(optimizer, group, group["params"][0], 1.0, with_closure)
                return None
            except Exception as error:
                failed = failed or error
    return failed


class _ExchangeError(Exception):
    """A step has called torch.distributed."""


class _NoExchanges(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _ExchangeError
        return func(*args, **(kwargs or {}))


def exchanges(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step calls `torch.distributed`; tried on two tiny parameters, without exchanging anything.

    One that cannot be tried counts as one that does not.
    """
    for group in optimizer.param_groups:
        for with_closure in (False, True) if group["params"] else ():
            try:
                with quietly(), _NoExchanges():  # type: ignore[no-untyped-call, unused-ignore]
                    _try(optimizer, group, group["params"][0], 1.0, with_closure)
                break
            except _ExchangeError:
                return True
            except Exception:
                continue
    return False


def _depends_on_others(optimizer: torch.optim.Optimizer, with_closure: bool) -> bool:
    with quietly():
        for group in optimizer.param_groups:
            if group["params"]:
                like: Tensor = group["params"][0]
                first, *others = (_try(optimizer, group, like, scale, with_closure) for scale in (1.0, 3.0))
                has_drawn = _has_drawn()
                if not has_drawn:  # else another order draws other numbers
                    others.append(_try(optimizer, group, like, 1.0, with_closure, "other, one"))
                for held in ("idle, one, other",) if has_drawn else ("idle, one, other", "one"):
                    with contextlib.suppress(Exception):  # some need several, or a gradient of each
                        others.append(_try(optimizer, group, like, 1.0, with_closure, held))
                # Some rounding differs with how memory is aligned.
                atol = 1e-4 * float(first.abs().max())
                if not all(torch.allclose(first, each, rtol=0.0, atol=atol, equal_nan=True) for each in others):
                    return True
    return False


def _has_drawn() -> bool:
    """Whether the last trial has drawn random numbers."""
    return not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(0).get_state())


def _try(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    like: Tensor,
    scale: float,
    with_closure: bool,
    held: str = "one, other",
) -> Tensor:
    """Step on tiny parameters, of which the other's values and gradients are scaled; returns how the one has moved.

    Args:
        optimizer: whose step it is.
        group: of the parameters, with its options.
        like: a parameter of as many dims.
        scale: of the other's.
        with_closure: whether the step is given one.
        held: which parameters there are, in their order; the idle one has no gradient.
    """
    generator = torch.Generator().manual_seed(0)
    seed(0)
    shape = (8,) * like.ndim

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(like.device, like.dtype)

    one, other = nn.Parameter(draw()), nn.Parameter(draw() * scale)
    idle = nn.Parameter(torch.ones_like(one))
    start = one.detach().clone()
    slopes = draw(), draw() * scale  # with some noise: step sizes that are estimated grow only where gradients agree
    by_name = {"one": one, "other": other, "idle": idle}
    tried = trial_of(optimizer, group, [by_name[name] for name in held.split(", ")], (one, other))

    def closure() -> Tensor:
        # With a part that follows the values: some optimizers move them before they ask, and back again.
        ours = zip((one, other), slopes, strict=True)
        part = 1.0 if with_closure else 0.0
        one.grad, other.grad = (slope + 0.1 * draw() + part * param.detach() for param, slope in ours)
        return one.detach().sum()

    for _ in range(_PROBE_STEPS):
        closure()
        step_of(tried)(tried, *([closure] if with_closure else []))
    return one.detach() - start


def states_of_step(optimizer: torch.optim.Optimizer, group: dict[str, Any], like: Tensor) -> dict[str, torch.dtype]:
    """Names and dtypes of the states, of a parameter's shape, that a first step makes; tried on a tiny parameter.

    Args:
        optimizer: whose step it is.
        group: of the parameter, with its options.
        like: the parameter.

    Raises:
        UsageError: the step fails on a tiny parameter.
    """
    failed: Exception | None = None
    for closure in ((), (lambda: 1.0,)):
        tiny = nn.Parameter(torch.ones((8,) * like.ndim, dtype=like.dtype, device=like.device))
        tried = trial_of(optimizer, group, [tiny])
        tiny.grad = torch.full_like(tiny, 0.5)
        try:
            with quietly():
                step_of(tried)(tried, *closure)
        except Exception as error:
            failed = failed or error
            continue
        states = tried.state[tiny].items()
        return {k: value.dtype for k, value in states if isinstance(value, Tensor) and value.shape == tiny.shape}
    raise UsageError(
        f"{type(optimizer).__name__} cannot be tried on a tiny parameter, to see which states it has, so they cannot be "
        f"offloaded to a disk ({type(failed).__name__}: {failed}); use offload.optimizer: none"
    ) from failed


def trial_of(
    optimizer: Any,
    group: dict[str, Any],
    params: list[nn.Parameter],
    stand_ins: Sequence[nn.Parameter] = (),
    known: dict[int, Any] | None = None,
) -> Any:
    """A copy of an optimizer, and of those it wraps, that holds other parameters, in groups with the options of `group`.

    Args:
        optimizer: to copy.
        group: one of its own.
        params: of the copy.
        stand_ins: what attributes that hold the first parameters of the group hold in the copy; by default `params`. Of all
            other parameters it is one that does not matter.
        known: what has been copied, by id.
    """
    known = {} if known is None else known
    stand_ins = stand_ins or params
    tried = known[id(optimizer)] = object.__new__(type(optimizer))
    for inner in wrapped_optimizers(optimizer):
        if id(inner) not in known:
            is_shared = any(each is group for each in inner.param_groups)
            trial_of(inner, group if is_shared else inner.param_groups[0], params, stand_ins, known)
    ours = {key: value for key, value in vars(optimizer).items() if not key.startswith("_zero_")}
    ours = {k: v for k, v in ours.items() if k not in ("state", "param_groups") and not (k == "step" and callable(v))}
    held = [p for each in optimizer.param_groups for p in each["params"]]
    none = nn.Parameter(torch.zeros_like(params[0]))
    none.grad = torch.zeros_like(params[0])
    instead: dict[int, Any] = {id(p): none for p in held} | {
        id(p): stand_in for p, stand_in in zip(group["params"], stand_ins, strict=False)
    }

    def copied(value: Any) -> Any:
        if isinstance(value, list | tuple) and any(id(entry) in known for entry in value):
            return type(value)(known.get(id(entry), entry) for entry in value)
        if isinstance(value, dict) and any(id(entry) in known for entry in value.values()):
            return {key: known.get(id(entry), entry) for key, entry in value.items()}
        return known[id(value)] if id(value) in known else _copied(value, known | instead)

    vars(tried).update({k: copied(v) for k, v in ours.items()})
    for name, value in in_slots(optimizer):
        setattr(tried, name, copied(value))
    if "state" in vars(optimizer):
        tried.state = defaultdict(dict)
    if "param_groups" in vars(optimizer):
        if id(group) not in known:
            options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for key in [key for key in options if is_beside(key, options[key], len(group["params"]))]:
                beside = {id(stand_in): entry for stand_in, entry in zip(stand_ins, options[key], strict=False)}
                options[key] = [beside[id(param)] for param in params if id(param) in beside]
            known[id(group)] = [{**options, "params": params}]
        tried.param_groups = known[id(group)]
    return tried


def _copied(value: Any, instead: dict[int, Any]) -> Any:
    """A copy into which a trial may write, with other parameters, and methods of the copy; models and functions stay."""
    if id(value) in instead:
        return instead[id(value)]
    stays = _that_stay(value, instead, {})
    if id(value) in stays:
        return stays[id(value)]
    try:
        return copy.deepcopy(value, {**instead, **stays})
    except Exception:
        return value


def _that_stay(value: Any, instead: dict[int, Any], found: dict[int, Any]) -> dict[int, Any]:
    """By id, what is not copied of a value and of what its containers hold: methods of the optimizer become the copy's."""
    if isinstance(value, types.MethodType):
        owner = instead.get(id(value.__self__))
        found[id(value)] = value if owner is None else types.MethodType(value.__func__, owner)
    elif isinstance(value, _STAY) or is_manager(value):
        found[id(value)] = value
    elif isinstance(value, list | tuple | set | dict):
        for entry in (*value, *value.values()) if isinstance(value, dict) else value:
            _that_stay(entry, instead, found)
    return found
