"""Whether an optimizer's step may be taken in pieces, and what of it every piece needs a copy of.

[Note: a step in pieces] Each piece is a step of its own, of some elements of some parameters. Numbers, tensors and containers
of these that an optimizer keeps in its groups, in attributes or in states beside the rows are therefore given to each piece as
they were before the step, and those of the last piece (of a group: the last that has some of it) are kept. What this cannot
serve is found by trying: a tiny step as a whole, and the same in pieces, must come to the same values.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.errors import OffloadError, UsageError
from hf_zero.optim.kinds import is_known, step_of
from hf_zero.optim.trial import quietly, seed, trial_of

_STEPS = 4
_SIDE = 8


def is_plain_data(value: Any) -> bool:
    """Whether a value is made of numbers, texts and tensors that are not parameters."""
    if isinstance(value, dict):
        return all(is_plain_data(key) and is_plain_data(each) for key, each in value.items())
    if isinstance(value, (list, tuple, set, deque)):
        return all(map(is_plain_data, value))
    if isinstance(value, Tensor):
        return type(value) is Tensor
    return value is None or isinstance(value, (bool, int, float, complex, str))


def own_copy(value: Any) -> Any:
    """A copy into which a piece may write, of plain data; other values are the same ones."""
    is_written = isinstance(value, (dict, list, set, deque, Tensor)) and is_plain_data(value)
    if not is_written:
        return value
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def written_back(original: Any, changed: Any) -> Any:
    """`changed`, as the original object where it can hold the values: others may refer to it."""
    if original is changed or type(original) is not type(changed):
        return changed
    if type(original) is Tensor and original.shape == changed.shape and original.dtype == changed.dtype:
        with torch.no_grad():
            return original.copy_(changed)
    if isinstance(original, (dict, set)):
        original.clear()
        original.update(changed)
        return original
    if isinstance(original, (list, deque)):
        original.clear()
        original.extend(changed)
        return original
    return changed


class Evaluated:
    """The closure of a step in pieces: evaluated once, before the first, and answered from then on.

    Args:
        evaluate: the user's closure.
    """

    def __init__(self, evaluate: Callable[[], Any]) -> None:
        with torch.enable_grad():
            self._result = evaluate()
        self._is_answered = False

    def begin_chunk(self) -> None:
        """Another piece of the step begins, which may ask once."""
        self._is_answered = False

    def __call__(self) -> Any:
        """What the closure has returned."""
        if self._is_answered:
            raise OffloadError(
                "an optimizer evaluates its closure more than once a step, between which parameters change: such a step cannot "
                "be streamed from a disk; use offload.optimizer: none"
            )
        self._is_answered = True
        return self._result


def refuse_in_pieces(optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
    """Raise if an optimizer's step in pieces is another one than the whole; those of torch and a few more are known.

    Args:
        optimizer: computes element by element.
        has_closure: its step is given a closure.

    Raises:
        UsageError: on all ranks, before anything has changed.
    """
    if is_known(optimizer):
        return
    group = next((each for each in optimizer.param_groups if each["params"]), None)
    if group is None:
        return
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    try:
        with quietly():
            why = _difference(optimizer, group, has_closure)
    except Exception as error:
        raise UsageError(
            f"{name} cannot be tried in pieces on tiny parameters, so its states cannot be offloaded to a disk "
            f"({type(error).__name__}: {error}); use offload.optimizer: none"
        ) from error
    if why is not None:
        raise UsageError(
            f"{name} {why}, so its step cannot be taken in pieces from a disk; use offload.optimizer: none"
        )


def _difference(optimizer: Any, group: dict[str, Any], has_closure: bool) -> str | None:
    like: Tensor = group["params"][0]
    shape = (_SIDE,) * max(like.ndim, 1)
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(like.device, like.dtype)

    starts = [draw(), draw()]
    wholes = [nn.Parameter(start.clone()) for start in starts]
    whole = trial_of(optimizer, group, wholes)
    pieces = [nn.Parameter(part) for part in _parts(starts[0])] + [nn.Parameter(starts[1].clone())]
    parts = trial_of(optimizer, group, pieces)
    for number in range(_STEPS):
        slopes = [draw(), draw()]
        seed(number)
        _step(whole, wholes, slopes, wholes, has_closure)
        seed(number)
        _step_in_pieces(parts, pieces, [*_parts(slopes[0]), slopes[1].clone()], has_closure)
    for key, state in whole.state.items():
        if not isinstance(key, Tensor):
            return f"keeps a state under {key!r}, which is no parameter"
        if any(isinstance(value, (list, tuple, dict, set)) and _has_tensors(value) for value in state.values()):
            return "keeps several tensors in one state of a parameter"
    joined = [torch.cat([piece.detach().reshape(-1) for piece in pieces[:2]]), pieces[2].detach().reshape(-1)]
    for param, found in zip(wholes, joined, strict=True):
        if not _is_near(param.detach().reshape(-1), found):
            return (
                "comes to other values in pieces (it counts, draws or remembers something over all parameters, or runs its "
                "closure where they have moved)"
            )
    return _state_difference(whole, parts, wholes, pieces)


def _state_difference(whole: Any, parts: Any, wholes: list[nn.Parameter], pieces: list[nn.Parameter]) -> str | None:
    first, second, other = (parts.state.get(piece, {}) for piece in pieces)
    for state, found in ((whole.state.get(wholes[0], {}), [first, second]), (whole.state.get(wholes[1], {}), [other])):
        for name, value in state.items():
            values = [each.get(name) for each in found]
            if not isinstance(value, Tensor) or value.numel() <= 1:
                if any(not _is_same(value, each) for each in values):
                    return f"comes to another state {name!r} in pieces"
                continue
            if not all(isinstance(each, Tensor) for each in values):
                return f"comes to another state {name!r} in pieces"
            if not _is_near(value.reshape(-1), torch.cat([each.reshape(-1) for each in values])):
                return f"comes to another state {name!r} in pieces"
    return None


def _parts(values: Tensor) -> list[Tensor]:
    """Two halves, in as many dimensions."""
    return [half.clone().view(-1, *[1] * (values.ndim - 1)) for half in values.reshape(-1).chunk(2)]


def _step(
    tried: Any, params: list[nn.Parameter], slopes: list[Tensor], seen: list[nn.Parameter], has_closure: bool
) -> None:
    def closure() -> Tensor:
        for param, slope in zip(params, slopes, strict=True):
            param.grad = slope + 0.1 * param.detach() if has_closure else slope.clone()
        return sum((param.detach().float().sum() for param in seen), torch.zeros((), device="cpu"))

    closure()
    step_of(tried)(tried, *([closure] if has_closure else []))


def _step_in_pieces(tried: Any, pieces: list[nn.Parameter], slopes: list[Tensor], has_closure: bool) -> None:
    for piece, slope in zip(pieces, slopes, strict=True):
        piece.grad = slope + 0.1 * piece.detach() if has_closure else slope.clone()
    result = sum((piece.detach().float().sum() for piece in pieces), torch.zeros((), device="cpu"))
    own = {key: value for key, value in vars(tried).items() if key not in ("state", "param_groups")}
    options = {key: value for key, value in tried.param_groups[0].items() if key != "params"}
    one: Any = None
    for piece in pieces:
        one = object.__new__(type(tried))
        vars(one).update({key: own_copy(value) for key, value in own.items()})
        one.param_groups = [{**{key: own_copy(value) for key, value in options.items()}, "params": [piece]}]
        one.state = defaultdict(dict)
        if piece in tried.state:
            one.state[piece] = tried.state[piece]
        step_of(one)(one, *([lambda: result] if has_closure else []))
        tried.state.update(one.state)
    vars(tried).update({key: value for key, value in vars(one).items() if key not in ("state", "param_groups")})
    tried.param_groups[0].update({key: value for key, value in one.param_groups[0].items() if key != "params"})


def _has_tensors(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value
    return any(
        isinstance(each, Tensor) or (isinstance(each, (list, tuple, dict)) and _has_tensors(each)) for each in values
    )


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and bool(torch.equal(left, right))
    return bool(left == right)


def _is_near(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.allclose(left.float(), right.float(), rtol=1e-4, atol=1e-6, equal_nan=True)
