"""Logits that nobody has computed yet: see [Note: logits put off]."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hf_zero.errors import UsageError

Function = Callable[..., Any]
Step = Callable[[Tensor], Tensor]

_WRITES = re.compile(r"(?!_).*[^_]_$|__i(add|sub|mul|div|truediv|floordiv|pow|mod)__$|__setitem__$")
_ASKED = (  # what a tensor knows without values
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "itemsize", "nbytes"),
    *("is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_quantized", "is_nested"),
)
_QUESTIONS = (
    *("size", "dim", "numel", "nelement", "ndimension", "stride", "get_device"),
    *("is_floating_point", "is_complex", "element_size"),
)
_ASKS = {getattr(Tensor, name).__get__ for name in _ASKED} | {getattr(Tensor, name) for name in _QUESTIONS}
_rules: dict[Any, Function] = {}  # by function of torch; the logits come first
_HOOKS = (Tensor.register_hook, Tensor.retain_grad)


class Source(Protocol):
    """Who computes logits: a head."""

    family: list[weakref.ref[PutOff]]

    def all_of(self, tokens: Tensor, steps: Sequence[Step]) -> Tensor:
        """The logits of tokens [..., width], after some steps: [..., words]."""

    def reduced(
        self, tokens: Tensor, steps: Sequence[Step], finish: Callable[..., Any], beside: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """What `finish` makes of the logits of tokens [n, width], and of what goes with them, for some at a time."""

    @property
    def is_used(self) -> bool:
        """Whether anything has been computed of logits for some tokens at a time."""

    def tell(self, function: str) -> None:
        """All logits are computed, for a function."""


class PutOff(Tensor):
    """Logits [..., words] that nobody has computed yet. Made by `put_off`.

    Attributes:
        source: of the logits.
        tokens: the head's input, of the tokens that these are the logits of: [..., width].
        steps: what is done with the logits.
    """

    is_put_off = True  # engines do not look into it
    source: Source
    tokens: Tensor
    steps: tuple[Step, ...]
    _parent: PutOff | None
    _how: Step
    _plain: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _HOOKS and args[0].source.is_used:
            raise UsageError(
                f"{func.__name__} of logits that tile_tokens computes for some tokens at a time would see no gradient: their "
                "loss has been computed without them; leave tile_tokens out to look at them"
            )
        rule = _rules.get(func)
        if rule is not None and args and isinstance(args[0], PutOff) and args[0]._plain is None:
            _check_own(args[0])
            found = rule(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        writes = _WRITES.match(getattr(func, "__name__", "")) or "out" in kwargs
        return func(*plain(args, func, bool(writes)), **plain(kwargs, func, bool(writes)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Where torch has passed `__torch_function__` by."""
        return func(*plain(args, func), **plain(kwargs or {}, func))

    def computed(self, in_graph: bool) -> Tensor:
        """All of these logits: computed once, or twice if first without a graph."""
        if self._plain is not None and (self._plain.requires_grad or not in_graph):
            return self._plain
        parent = self._parent
        with torch.set_grad_enabled(in_graph):
            if parent is not None and parent._plain is not None and (parent._plain.requires_grad or not in_graph):
                self._plain = self._how(parent._plain)
            else:
                self._plain = self.source.all_of(self.tokens, self.steps)
        return self._plain


def put_off(
    source: Source,
    tokens: Tensor,
    steps: tuple[Step, ...],
    like: Tensor,
    requires_grad: bool,
    parent: PutOff | None = None,
    how: Step = lambda logits: logits,
) -> PutOff:
    """Logits to be computed when they are needed.

    Args:
        source: of the logits.
        tokens: the head's input.
        steps: what is done with the logits.
        like: logits of no tokens [0, words], after the steps.
        requires_grad: whether they will be in a graph.
        parent: that these are made of.
        how: they are made of it.
    """
    made: PutOff = Tensor._make_wrapper_subclass(
        PutOff, (*tokens.shape[:-1], like.shape[-1]), dtype=like.dtype, device=like.device, requires_grad=requires_grad
    )
    made.source, made.tokens, made.steps = source, tokens, steps
    made._parent, made._how, made._plain = parent, how, None
    if requires_grad:
        with torch._C.DisableTorchFunctionSubclass():
            made.register_hook(_refuse)  # type: ignore[no-untyped-call]
    source.family.append(weakref.ref(made))
    return made


_UNSEEN = (
    "tile_tokens: a function that torch's operators do not see (an autograd.Function) took logits that are not computed yet, "
    "so their gradient would be lost: give it `logits.clone()`, or leave tile_tokens out"
)


def take_rules(rules: Mapping[Any, Function]) -> None:
    """Let functions of logits that are put off be what `rules` say, unless a rule gives NotImplemented."""
    _rules.update(rules)


def _refuse(gradient: Tensor) -> None:
    raise UsageError(_UNSEEN)


def _check_own(logits: PutOff) -> None:
    """Raise if these are what an `autograd.Function` has made of others, whose backward would be left out."""
    with torch._C.DisableTorchFunctionSubclass():
        if logits.grad_fn is not None:
            raise UsageError(_UNSEEN)


def plain(tree: Any, func: Function, writes: bool = False) -> Any:
    """Arguments of a function with all logits computed; those that it writes into, with all that was made of them."""

    def computed(leaf: Any) -> Any:
        if not isinstance(leaf, PutOff):
            return leaf
        _check_own(leaf)
        needs_graph = leaf.requires_grad and (torch.is_grad_enabled() or writes)
        if leaf._plain is None and needs_graph:
            leaf.source.tell(getattr(func, "__name__", str(func)))
        if writes:
            _compute_family(leaf)
        return leaf.computed(needs_graph)

    return pytree.tree_map(computed, tree)


def _compute_family(member: PutOff) -> None:
    """Compute everything made of the same logits before one of them is written into: views see it, others do not."""
    for known in member.source.family:  # in the order in which they were made
        each = known()
        if each is not None:
            each.computed(each.requires_grad)
