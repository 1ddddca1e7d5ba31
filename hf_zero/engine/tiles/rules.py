"""What is done with logits that are put off: noted down, taken of fewer tokens, or computed for some tokens at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hf_zero.engine.tiles.put_off import Function, PutOff, Step, put_off, take_rules

# --- what is noted down ---------------------------------------------------------------------------------------------


def _step(func: Function, logits: PutOff, *args: Any, **kwargs: Any) -> Any:
    """A function that acts on each logit alone, or on each token's."""
    if not all(_is_constant(each, logits) for each in pytree.tree_leaves((args, kwargs))):
        return NotImplemented
    return _after(logits, lambda x: func(x, *args, **kwargs))


def _after(logits: PutOff, step: Step, in_graph: bool = True) -> Any:
    with torch.no_grad():
        like = step(torch.zeros(0, logits.shape[-1], dtype=logits.dtype, device=logits.device))
    if like.shape != (0, logits.shape[-1]) or like.device != logits.device:
        return NotImplemented
    requires_grad = logits.requires_grad and in_graph and torch.is_grad_enabled() and like.is_floating_point()
    return put_off(logits.source, logits.tokens, (*logits.steps, step), like, requires_grad, logits, step)


def _is_constant(value: Any, logits: PutOff) -> bool:
    """Whether a value means the same for every token: a number, a dtype, a tensor of one number or of one for each word."""
    if not isinstance(value, Tensor):
        return True
    if isinstance(value, PutOff) or value.requires_grad:
        return False
    return value.numel() == 1 or value.shape == (logits.shape[-1],)


def _over_words(func: Function, logits: PutOff, *args: Any, **kwargs: Any) -> Any:
    """`softmax` and its like, if over the words."""
    dim = args[0] if args else kwargs.get("dim")
    if dim not in (-1, logits.ndim - 1):
        return NotImplemented
    rest = {key: value for key, value in kwargs.items() if key != "dim"}
    return _after(logits, lambda x: func(x, -1, *args[1:], **rest))


def _detach(func: Function, logits: PutOff) -> Any:
    return _after(logits, Tensor.detach, in_graph=False)


def _itself(func: Function, logits: PutOff, *args: Any, **kwargs: Any) -> Any:
    """Logits are made contiguous."""
    return NotImplemented if args or kwargs else logits


# --- what takes some of the tokens ----------------------------------------------------------------------------------


def _taken(logits: PutOff, tokens: Tensor, how: Step) -> PutOff:
    like = torch.empty(0, logits.shape[-1], dtype=logits.dtype, device=logits.device)
    requires_grad = logits.requires_grad and torch.is_grad_enabled()
    return put_off(logits.source, tokens, logits.steps, like, requires_grad, logits, how)


def _indexed(func: Function, logits: PutOff, index: Any) -> Any:
    """`logits[index]`, where the index leaves the words alone."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, PutOff) for part in parts):
        return NotImplemented
    taken = [_num_dims(part) for part in parts]
    places = [at for at, part in enumerate(parts) if part is Ellipsis]
    if places:
        reaches_words = sum(taken[places[0] + 1 :]) > 0
    else:
        reaches_words = sum(taken) == logits.ndim
    if reaches_words and not (isinstance(parts[-1], slice) and parts[-1] == slice(None)):
        return NotImplemented
    return _taken(logits, logits.tokens[index], lambda x: x[index])


def _num_dims(part: Any) -> int:
    if part is None or part is Ellipsis:
        return 0
    is_mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
    return int(part.ndim) if is_mask else 1


def _viewed(func: Function, logits: PutOff, *shape: Any) -> Any:
    """`view` and `reshape`, where the words stay the last dim."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        words, total = logits.shape[-1], logits.numel()
    known = -torch.Size(sizes).numel() if -1 in sizes else 0
    resolved = tuple(total // known if size == -1 and known else size for size in sizes)
    if resolved[-1] != words or torch.Size(resolved).numel() != total or -1 in resolved:
        return NotImplemented
    width = logits.tokens.shape[-1]
    return _taken(logits, logits.tokens.reshape(*resolved[:-1], width), lambda x: x.reshape(resolved))


def _flattened(func: Function, logits: PutOff, start_dim: int = 0, end_dim: int = -1) -> Any:
    shape = tuple(logits.shape)
    start, end = start_dim % len(shape), end_dim % len(shape)
    if end == len(shape) - 1 or start > end:
        return NotImplemented
    return _viewed(func, logits, *shape[:start], torch.Size(shape[start : end + 1]).numel(), *shape[end + 1 :])


def _along(place: int, default: int | None = None) -> Function:
    """Functions with a dim of the tokens, the argument at `place`: `chunk`, `split`, `narrow`, ..."""

    def rule(func: Function, logits: PutOff, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[place] if len(args) > place else default)
        if not isinstance(dim, int) or not -logits.ndim <= dim < logits.ndim or dim % logits.ndim == logits.ndim - 1:
            return NotImplemented
        rest = {key: value for key, value in kwargs.items() if key != "dim"}
        head = list(args)
        head[place : place + 1] = [dim % logits.ndim]
        if any(isinstance(each, Tensor) and each.is_floating_point() for each in pytree.tree_leaves((head, rest))):
            return NotImplemented
        found = func(logits.tokens, *head, **rest)
        if isinstance(found, Tensor):
            return _taken(logits, found, lambda x: func(x, *head, **rest))
        hows = (lambda x, at=at: func(x, *head, **rest)[at] for at in range(len(found)))
        return tuple(_taken(logits, each, how) for each, how in zip(found, hows, strict=True))

    return rule


# --- what leaves little of them -------------------------------------------------------------------------------------


def _reduced(logits: PutOff, finish: Callable[..., Any], beside: Sequence[Tensor] = ()) -> list[Tensor]:
    """What `finish` makes of logits [n, words], back in the shape of the tokens."""
    lead = logits.tokens.shape[:-1]
    flat = [each.reshape(-1, *each.shape[len(lead) :]).to(logits.device) for each in beside]
    steps = logits.steps
    with torch.set_grad_enabled(torch.is_grad_enabled() and logits.requires_grad):
        found = logits.source.reduced(logits.tokens.reshape(-1, logits.tokens.shape[-1]), steps, finish, flat)
    return [each.reshape(*lead, *each.shape[1:]) for each in found]


def _of_words(func: Function, logits: PutOff, *args: Any, **kwargs: Any) -> Any:
    """Sums, maxima and the like over the words."""
    dim = kwargs.get("dim", args[0] if args else None)
    dims = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    if len(dims) != 1 or dims[0] not in (-1, logits.ndim - 1) or isinstance(dims[0], Tensor):
        return NotImplemented
    rest = {key: value for key, value in kwargs.items() if key != "dim"}
    kind: list[Any] = []

    def finish(x: Tensor) -> tuple[Tensor, ...]:
        found = func(x, -1, *args[1:], **rest)
        kind[:] = [type(found)]
        return (found,) if isinstance(found, Tensor) else tuple(found)

    found = _reduced(logits, finish)
    return found[0] if issubclass(kind[0], Tensor) else kind[0](found)


def _gathered(func: Function, logits: PutOff, dim: int, index: Tensor, **kwargs: Any) -> Any:
    """The logits of some words of each token."""
    if dim not in (-1, logits.ndim - 1) or index.shape[:-1] != logits.shape[:-1] or kwargs:
        return NotImplemented
    return _reduced(logits, lambda x, i: (x.gather(-1, i),), [index])[0]


def _cross_entropy(
    func: Function,
    logits: PutOff,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """The cross entropy of each token; their sum or mean is torch's own, so that it adds up in the same order."""
    is_usual = weight is None and size_average is None and reduce is None and not target.is_floating_point()
    if not is_usual or target.shape != logits.shape[:-1] or logits.ndim != 2:
        return NotImplemented
    entropy = functools.partial(
        torch.nn.functional.cross_entropy,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    (losses,) = _reduced(logits, lambda x, t: (entropy(x, t),), [target])
    if reduction == "none":
        return losses
    chosen = torch.where(target.to(losses.device) == ignore_index, -100, 0)
    return torch.nn.functional.nll_loss(-losses.unsqueeze(1), chosen, reduction=reduction)


def _all_rules() -> dict[Any, Function]:
    functional = torch.nn.functional
    rules: dict[Any, Function] = {}

    def add(rule: Function, names: str, *others: Any) -> None:
        for name in names.split():
            for owner in (Tensor, torch):
                if hasattr(owner, name):
                    rules[getattr(owner, name)] = rule
        rules.update(dict.fromkeys(others, rule))

    add(_step, "float half bfloat16 double to neg exp tanh sigmoid abs clamp clip nan_to_num")
    add(_step, "mul multiply div divide true_divide add sub subtract pow")
    add(_step, "__mul__ __rmul__ __truediv__ __div__ __add__ __radd__ __sub__ __neg__ __pow__", functional.tanh)
    add(_over_words, "softmax log_softmax", functional.softmax, functional.log_softmax)
    add(_detach, "detach")
    add(_itself, "contiguous")
    add(_indexed, "__getitem__")
    add(_viewed, "view reshape")
    add(_flattened, "flatten")
    add(_along(0, 0), "unbind")
    add(_along(1, 0), "chunk split")
    add(_along(0), "narrow select index_select")
    add(_of_words, "sum mean max min amax amin argmax argmin logsumexp")
    add(_gathered, "gather")
    rules[functional.cross_entropy] = _cross_entropy
    for skipped in (torch.max, torch.min, Tensor.max, Tensor.min):
        rules[skipped] = _of_words
    return rules


def install() -> None:
    """Let logits that are put off know these rules."""
    take_rules(_all_rules())
