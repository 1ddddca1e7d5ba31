"""Which optimizers may compute on rows alone, which need whole parameters, and which need all parameters at once."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import warnings
import weakref
from collections import defaultdict
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_zero.errors import UsageError

logger = logging.getLogger(__name__)

OptimizerClass = TypeVar("OptimizerClass", bound=type[torch.optim.Optimizer])

# Classes whose `step` computes each element from that element of the gradient and of the state, and from numbers that
# are the same for all parameters. All of them are run beside one process by the tests.
_ELEMENTWISE = {
    *(
        f"torch.optim.{name.lower()}.{name}"
        for name in (
            "Adadelta",
            "Adagrad",
            "Adam",
            "AdamW",
            "Adamax",
            "ASGD",
            "NAdam",
            "RAdam",
            "RMSprop",
            "Rprop",
            "SGD",
        )
    ),
    "lion_pytorch.lion_pytorch.Lion",
    "schedulefree.adamw_schedulefree.AdamWScheduleFree",
    "schedulefree.radam_schedulefree.RAdamScheduleFree",
    "schedulefree.sgd_schedulefree.SGDScheduleFree",
}
_marked: weakref.WeakSet[type] = weakref.WeakSet()

# Optimizers that cannot be run on a part of the parameters, and what they do.
_LOOKS_ACROSS = {
    "LBFGS": "builds one search direction from all parameters",
    "LoraFAOptimizer": "computes the step of one matrix of an adapter from the other",
}
_PROBE_STEPS = 16


def mark_elementwise(optimizer_class: OptimizerClass) -> OptimizerClass:
    """Let optimizers of a class step on each rank's rows alone, which costs no exchange; also a class decorator.

    Args:
        optimizer_class: computes every element of a parameter only from that element of the gradient and of its states
            (which have the parameter's shape), and from numbers that are the same for all parameters. Norms, means,
            factorisations and indices are not elementwise.

    Returns:
        The class.
    """
    _marked.add(optimizer_class)
    return optimizer_class


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's class is known, or marked, to compute each element for itself; so are those it wraps."""
    kind = type(optimizer)
    if not all(map(is_elementwise, wrapped_optimizers(optimizer))):
        return False
    for base in kind.__mro__:
        if base in _marked or f"{base.__module__}.{base.__qualname__}" in _ELEMENTWISE:
            return True
        if _computes(base):
            return False
    return False


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is of a class that is known to compute each element for itself, and not of one derived from it."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" in _ELEMENTWISE


def trial_of(optimizer: Any, group: dict[str, Any], params: list[nn.Parameter]) -> Any:
    """A copy of an optimizer that holds other parameters, in one group with the options of `group`."""
    return _trial(optimizer, group, params, {})


def _computes(kind: type) -> bool:
    """Whether a class has methods of its own that a step may run; torch gives every class its wrapped `step`."""
    for name, value in vars(kind).items():
        if not inspect.isfunction(value) or (name.startswith("__") and name.endswith("__")):
            continue
        if inspect.unwrap(value).__qualname__.startswith(f"{kind.__qualname__}."):
            return True
    return False


def wrapped_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that are attributes of this one, or in its lists and dicts."""
    found = []
    for name, value in vars(optimizer).items():
        if name == "state":
            continue  # an entry a parameter
        values = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else (value,)
        found += [entry for entry in values if isinstance(entry, torch.optim.Optimizer)]
    return list(dict.fromkeys(found))


def refuse_across_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Raise if what an optimizer does to one parameter depends on the others, which other ranks hold.

    Raises:
        UsageError: on all ranks, before anything has changed.
    """
    name = next((base.__name__ for base in type(optimizer).__mro__ if base.__name__ in _LOOKS_ACROSS), None)
    why = _LOOKS_ACROSS[name] if name is not None else None
    if why is None and not is_elementwise(optimizer) and depends_on_others(optimizer):
        why = "steps on one parameter differently when another has another gradient (a norm or step size over all of them)"
    if why is not None:
        raise UsageError(
            f"{type(optimizer).__name__} {why}, but a rank steps on its part of the parameters only: use an optimizer that "
            "sees to each parameter by itself (AdamW, Muon, Adafactor, ...), or stage 0"
        )


def depends_on_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step on one parameter depends on the gradient of another; tried on two tiny ones.

    An optimizer that cannot be tried (it fails on tiny parameters) counts as one that does not.
    """
    for with_closure in (False, True):
        with contextlib.suppress(Exception):
            return _depends_on_others(optimizer, with_closure)
    return False


def _depends_on_others(optimizer: torch.optim.Optimizer, with_closure: bool) -> bool:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for group in optimizer.param_groups:
            if group["params"]:
                like: Tensor = group["params"][0]
                first, second = (_try(optimizer, group, like, scale, with_closure) for scale in (1.0, 3.0))
                # Some rounding differs with how memory is aligned.
                if not torch.allclose(first, second, rtol=0.0, atol=1e-4 * float(first.abs().max()), equal_nan=True):
                    return True
    return False


def _try(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], like: Tensor, scale: float, with_closure: bool
) -> Tensor:
    """Step on two tiny parameters, of which the other's values and gradients are scaled; returns how the first has moved."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    shape = (8,) * like.ndim

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(like.device, like.dtype)

    one, other = nn.Parameter(draw()), nn.Parameter(draw() * scale)
    start = one.detach().clone()
    slopes = draw(), draw() * scale  # with some noise: step sizes that are estimated grow only where gradients agree
    tried = _trial(optimizer, group, [one, other], {})

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
        tried = _trial(optimizer, group, [tiny], {})
        tiny.grad = torch.full_like(tiny, 0.5)
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
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


def _trial(optimizer: Any, group: dict[str, Any], params: list[nn.Parameter], known: dict[int, Any]) -> Any:
    """A copy of an optimizer, and of those it wraps, that holds other parameters, in groups with the options of `group`."""
    tried = known[id(optimizer)] = object.__new__(type(optimizer))
    for inner in wrapped_optimizers(optimizer):
        if id(inner) not in known:
            is_shared = any(each is group for each in inner.param_groups)
            _trial(inner, group if is_shared else inner.param_groups[0], params, known)
    ours = {key: value for key, value in vars(optimizer).items() if not key.startswith("_zero_")}
    ours = {k: v for k, v in ours.items() if k not in ("state", "param_groups") and not (k == "step" and callable(v))}
    kept: dict[int, Any] = {id(p): p for each in optimizer.param_groups for p in each["params"]}

    def copied(value: Any) -> Any:
        if isinstance(value, list | tuple) and any(id(entry) in known for entry in value):
            return type(value)(known.get(id(entry), entry) for entry in value)
        if isinstance(value, dict) and any(id(entry) in known for entry in value.values()):
            return {key: known.get(id(entry), entry) for key, entry in value.items()}
        return known[id(value)] if id(value) in known else _copied(value, kept)

    vars(tried).update({k: copied(v) for k, v in ours.items()})
    if "state" in vars(optimizer):
        tried.state = defaultdict(dict)
        if id(group) not in known:
            options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            known[id(group)] = [{**options, "params": params}]
        tried.param_groups = known[id(group)]
    return tried


def _copied(value: Any, kept: dict[int, Any]) -> Any:
    """A copy into which a trial may write; parameters, models and functions are the same ones."""
    if callable(value) or isinstance(value, nn.Module | torch.optim.Optimizer):
        return value
    try:
        return copy.deepcopy(value, dict(kept))
    except Exception:
        return value


def step_of(optimizer: torch.optim.Optimizer) -> Any:
    """The `step` of an optimizer's class as its author wrote it, without the hooks that torch puts around it."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
