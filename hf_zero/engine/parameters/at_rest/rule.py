"""How operators of torch run on tensors at rest: see [Note: the rule for tensors at rest] in `partitioned_tensor`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from hf_zero import torch_compat
from hf_zero.engine.parameters.at_rest.exchanges import is_alone, run_alone, wait_for
from hf_zero.engine.parameters.at_rest.gathers import gather, known_to_all
from hf_zero.engine.parameters.at_rest.given import (
    is_changed_alone,
    note_computed,
    note_given,
    note_overwritten,
    refuse_unlike,
)
from hf_zero.engine.parameters.at_rest.known.lineage import NOTHING, Call, mark_of
from hf_zero.engine.parameters.at_rest.norms import by_rank, norms_of
from hf_zero.engine.parameters.at_rest.operands import mapped, tensors_in, unique, written_by
from hf_zero.engine.parameters.at_rest.operators import (
    Kind,
    base_name,
    differs_by_rank,
    is_like,
    kind_of,
    writes_of,
)
from hf_zero.engine.parameters.at_rest.root import AtRest, Root
from hf_zero.errors import UsageError

_BETWEEN = ("hf_zero.engine.parameters.", "torch._dynamo.")  # modules between an operator and what has called it


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator of torch of which some operands are at rest."""
    if torch.is_inference_mode_enabled() and not any(t.is_inference() for t in written_by(func, args, kwargs)):
        with torch_compat.as_without_inference_mode():
            return func(*args, **kwargs)
    operands = tensors_in((*args, *kwargs.values()))
    if any(isinstance(t, DTensor) and not isinstance(t, AtRest) for t in operands):
        args, kwargs = pytree.tree_map_only(DTensor, _known, (args, kwargs))
        operands = tensors_in((*args, *kwargs.values()))
    given = [t for t in operands if isinstance(t, AtRest)]
    kind = kind_of(func)
    if any(t.root.shown is not None for t in given) and kind is not Kind.SHAPE:
        return _on_shown(func, args, kwargs, given)
    if kind is Kind.ALIAS:
        return given[0].alias()
    if kind is Kind.VIEW:
        return given[0].taken(func, args[1:], kwargs)
    if kind is Kind.FACTORY:
        return func(torch.empty(0, dtype=operands[0].dtype, device=operands[0].device), *args[1:], **kwargs)
    if kind is Kind.SHAPE:
        _refuse_other_shape(func, given[0])
    written = list(written_by(func, args, kwargs))
    if kind is Kind.EXCHANGE:
        _refuse_unlike(func, written)
        if is_alone(func, given):
            return run_alone(func, args, kwargs, given, written)
    edited = unique(t.root for t in written if isinstance(t, AtRest))
    mark = mark_of(func, args, kwargs) if edited and kind is not Kind.EXCHANGE else 0
    for root in edited:
        root.before_edit(mark)
    try:
        return _run(func, args, kwargs, kind, operands, written)
    finally:
        for root in edited:
            root.after_edit()


def _run(func: Any, args: Any, kwargs: Any, kind: Kind, operands: Sequence[Tensor], written: list[Tensor]) -> Any:
    given = [t for t in operands if isinstance(t, AtRest)]
    in_graph = torch.is_grad_enabled() and any(t.requires_grad for t in operands) and not is_like(base_name(func))
    if in_graph:
        return _on_whole(func, args, kwargs, given, written)
    if kind is Kind.DRAW and isinstance(args[0], Root):
        return _drawn(func, args, kwargs, args[0])
    if kind is Kind.NORM and (norms := norms_of(func, args, kwargs)) is not None:
        return norms
    if kind is Kind.UNSCALE:
        return _unscale(func, *args)
    if kind is Kind.ROWS and is_like(base_name(func)) and _is_asked_by_autograd():
        one = torch.empty((), dtype=operands[0].dtype, device=operands[0].device)
        return func(one.expand(operands[0].shape), *args[1:], **kwargs)
    if kind in (Kind.ROWS, Kind.LISTS):
        done, result = _on_rows(func, args, kwargs, kind, written)
        if done:
            return result
    return _on_whole(func, args, kwargs, given, written)


def _is_asked_by_autograd() -> bool:
    """Whether torch's own formula of a gradient runs this operator, to fill it with this rank's gradient; not a hook."""
    if not torch_compat.in_backward_of_an_operator():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == torch_compat.RUN_BACKWARD


def _known(tensor: DTensor) -> Tensor:
    """A tensor at rest as it is; the whole of another library's, and this rank's own of what is not reduced yet."""
    if isinstance(tensor, AtRest):
        return tensor
    return torch_compat.local_of(tensor) if any(p.is_partial() for p in tensor.placements) else tensor.full_tensor()


# --- on the whole -----------------------------------------------------------------------------------------------


def _on_shown(func: Any, args: Any, kwargs: Any, given: Sequence[AtRest]) -> Any:
    """Run an operator on what stands for its operands just now: what it gives of that alone is plain."""
    plain = {id(t): t.of(whole) for t in given if (whole := t.root.shown) is not None}
    originals = {id(plain[id(t)]): t for t in written_by(func, args, kwargs) if id(t) in plain}
    result = mapped(func, args, kwargs, plain)  # may come here again, for what is at rest among them
    return pytree.tree_map_only(Tensor, lambda t: originals.get(id(t), t), result)


def _on_whole(func: Any, args: Any, kwargs: Any, given: Sequence[AtRest], written: list[Tensor]) -> Any:
    roots = unique(t.root for t in given)
    call = Call.of(func, args, kwargs) if written else NOTHING
    roots_written = [cast(Tensor, t.root) for t in written if isinstance(t, AtRest)]
    if kind_of(func) is Kind.EXCHANGE and (cut := [root for root in roots if root.is_cut]):
        refuse_unlike(cut, base_name(func).strip("_"), cut[0].held[0])
    with torch.no_grad():
        what = f"{base_name(func)} of {given[0].describe()}"
        wholes = dict(zip(map(id, roots), gather(roots, what, not roots_written), strict=True))
        plain = {id(t): cast(AtRest, t).of(wholes[id(cast(AtRest, t).root)]) for t in cast(list[Tensor], given)}
        apart = _apart(roots_written, wholes) if call.source is None else []
        result = mapped(func, args, kwargs, plain)
        if kind_of(func) is Kind.EXCHANGE and base_name(func) != "send":
            wait_for(result)
        for tensor in written:
            if isinstance(tensor, AtRest) and plain[id(tensor)].shape != tensor.shape:
                _refuse_other_shape(func, tensor)
        for root, before in apart:
            _refuse_others_rows(root, before, wholes[id(root)])
        call.begin(roots_written)
        for root in unique(t.root for t in written if isinstance(t, AtRest)):
            if root.is_cut:
                root.rows.copy_(root.cut(wholes[id(root)]))
    call.note_written(roots_written)
    if kind_of(func) is not Kind.EXCHANGE:
        plain_ones = [t for t in tensors_in((*args, *kwargs.values())) if t.ndim and not isinstance(t, AtRest)]
        for written_root, other in itertools.product(cast(list[Root], roots_written), plain_ones):
            note_given(written_root, other, False)
    originals = {id(plain.get(id(t), t)): t for t in written}
    return pytree.tree_map_only(Tensor, lambda t: originals.get(id(t), t), result)


def _apart(written: Sequence[Tensor], wholes: dict[int, Tensor]) -> list[tuple[Root, Tensor]]:
    """What this rank alone is about to write to, with copies of the whole."""
    roots = {id(root): root for root in cast("Sequence[Root]", written) if root.is_cut}
    mine = [root for root in roots.values() if root.held[0].serving.apart.before(known_to_all(root)) is not None]
    return [(root, wholes[id(root)].clone()) for root in mine]


def _refuse_others_rows(root: Root, before: Tensor, after: Tensor) -> None:
    if (before != after).sum() > (root.cut(before) != root.cut(after)).sum():
        raise UsageError(
            f"this rank alone writes to rows of {root.describe()} that other ranks hold: let all ranks run the line, or copy a "
            "whole tensor into it (`p.data.copy_`)"
        )


def _refuse_other_shape(func: Any, given: AtRest) -> NoReturn:
    raise UsageError(
        f"{func} changes what memory {given.describe()} shows, which is partitioned: resize it before it is partitioned, "
        "or write into it"
    )


def _refuse_unlike(func: Any, written: Sequence[Tensor]) -> None:
    at_rest = [t for t in written if isinstance(t, AtRest)]
    if at_rest and differs_by_rank(func):
        raise UsageError(
            f"{base_name(func).strip('_')} writes other values on each rank, and {at_rest[0].describe()} is one on "
            "all of them: let it write into a plain tensor, or call all_reduce"
        )


# --- on rows ----------------------------------------------------------------------------------------------------


def _on_rows(func: Any, args: Any, kwargs: Any, kind: Kind, written: list[Tensor]) -> tuple[bool, Any]:
    """Whether the operator could run on rows, and what it gives."""
    plain: dict[int, Tensor] = {}
    templates: list[Root | None] = []
    writes = {id(t) for t in written}
    for group in _groups(args, kwargs, kind):
        roots = [t for t in group if isinstance(t, AtRest)]
        templates.append(cast(Root, roots[0]) if roots else None)
        if roots and not _put_rows(func, group, writes, plain):
            return False, None
    call = Call.of(func, args, kwargs, len(templates) if kind is Kind.LISTS else None, is_on_rows=True)
    call.begin(written)
    result = mapped(func, args, kwargs, plain)
    if written:
        call.note_written(written)
        _note_sources(func, args, kwargs, written)
        return True, written[0] if isinstance(result, Tensor) else result
    operands = [t for t in tensors_in((*args, *kwargs.values())) if isinstance(t, Root)]
    if kind is Kind.LISTS and isinstance(result, list | tuple):
        made = [t if root is None else root.like(t) for root, t in zip(templates, result, strict=True)]
        call.note_made(made)
        note_computed(made, operands)
        return True, type(result)(made)
    root = cast(Root, templates[0])
    given = pytree.tree_map_only(Tensor, root.like, result)
    call.note_made(pytree.tree_leaves(given))
    note_computed(pytree.tree_leaves(given), operands)
    return True, given


def _note_sources(func: Any, args: Any, kwargs: Any, written: Sequence[Tensor]) -> None:
    """Of what has been written: what with."""
    name = base_name(func)
    if (
        name == "copy_"
        and isinstance(written[0], Root)
        and (isinstance(args[1], Root) or not getattr(args[1], "ndim", 0))
    ):
        note_overwritten(written[0], args[1] if isinstance(args[1], Root) else None)
    elif name in ("zero_", "fill_", "_foreach_zero_"):
        for root in written:
            if isinstance(root, Root):
                note_overwritten(root, None)
    else:
        operands = [t for t in tensors_in((*args, *kwargs.values())) if isinstance(t, Root)]
        note_computed([root for root in written if isinstance(root, Root) and not is_changed_alone(root)], operands)


def _groups(args: Any, kwargs: Any, kind: Kind) -> list[list[Tensor]]:
    """The tensors that an operator puts together: all, or those of each place of its lists, and what goes with every place."""
    if kind is Kind.ROWS:
        return [tensors_in((*args, *kwargs.values()))]
    values = [*args, *kwargs.values()]
    lists = [v for v in values if isinstance(v, list | tuple) and v and isinstance(v[0], Tensor)]
    shared = [v for v in values if isinstance(v, Tensor)]
    return [[*(each[place] for each in lists if place < len(each)), *shared] for place in range(len(lists[0]))]


def _put_rows(func: Any, group: list[Tensor], writes: set[int], plain: dict[int, Tensor]) -> bool:
    """Put this rank's rows of tensors that are cut alike into `plain`; False where they are not."""
    if any(isinstance(t, AtRest) and not isinstance(t, Root) for t in group):
        return False
    roots = [t for t in group if isinstance(t, Root)]
    first = roots[0]
    if any(root.held != first.held for root in roots):
        return False
    others = [t for t in group if not isinstance(t, Root)]
    is_edit = any(id(root) in writes for root in roots)
    if any(id(t) in writes for t in others) or (others and torch_compat.in_backward() and not is_edit):
        return False
    shape = first.held[1].shape
    for other in others:
        if not other.ndim:
            continue
        if not is_edit or not _broadcasts(other.shape, shape):
            return False
        plain[id(other)] = first.cut(other.expand(shape))
        for root in roots:
            if id(root) in writes:
                note_given(root, other, func is torch.ops.aten.copy_.default)
    plain.update((id(root), root.rows) for root in roots)
    return True


# --- what needs not the whole -----------------------------------------------------------------------------------


def _drawn(func: Any, args: Any, kwargs: Any, subject: Root) -> Tensor:
    """Random numbers for the whole tensor, of which this rank keeps its rows, as an unsharded model would draw them."""
    tensor = cast(Tensor, subject)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    drawn = func(whole, *args[1:], **kwargs)
    if not writes_of(func):
        return subject.like(subject.cut(drawn))
    NOTHING.begin([tensor])
    subject.rows.copy_(subject.cut(drawn))
    return tensor


def _unscale(func: Any, grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Torch's own, on rows; an overflow in any rank's rows is one on every rank."""
    func([t.rows if isinstance(t, Root) else t for t in grads], found_inf, inv_scale)
    for world in dict.fromkeys(t.held[0] for t in grads if isinstance(t, Root) and t.is_cut):
        for over_tensor in (False, True):
            found_inf.copy_(by_rank(world, found_inf.reshape(1), over_tensor).amax())


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, wanted) for size, wanted in pairs)
