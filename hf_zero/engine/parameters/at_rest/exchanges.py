"""Exchanges of `torch.distributed` that one rank makes alone with tensors at rest, which the others do not have there.

[Note: sent alone] Under DDP every rank has every parameter, so one sends it, or broadcasts it, to others who take it into a
plain tensor: a process that generates, a rank that compares. Here the whole has to be asked for first, and the others do not
know. So before an exchange of parameters, and of values computed from them, ranks meet as before what reads them (see [Note:
alone]). Where the others come to it with plain tensors, this rank asks for the whole, and runs the exchange with that. It may
send so, and not receive: each rank holds its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hf_zero.engine.parameters.at_rest.gathers import ask_alone, known_to_all
from hf_zero.engine.parameters.at_rest.known.lineage import key_of
from hf_zero.engine.parameters.at_rest.operands import mapped, unique
from hf_zero.engine.parameters.at_rest.operators import base_name
from hf_zero.engine.parameters.at_rest.root import AtRest
from hf_zero.engine.ranks.place import SENDING
from hf_zero.errors import UsageError


def is_alone(func: Any, given: Sequence[AtRest]) -> bool:
    """Whether the other ranks do not run an exchange on tensors at rest, as this one does."""
    cut = [root for root in unique(t.root for t in given) if root.is_cut and root.shown is None]
    worlds = dict.fromkeys(root.held[0] for root in cut)
    if len(worlds) != 1 or any(root.param is None and key_of(root) is None for root in cut):
        return False
    (world,) = worlds
    what = SENDING if base_name(func) == "send" else base_name(func).strip("_")
    return world.serving.can_be_alone and not world.all_come(f"{what} of {cut[0].describe()}", map(known_to_all, cut))


def run_alone(func: Any, args: Any, kwargs: Any, given: Sequence[AtRest], written: Sequence[Tensor]) -> Any:
    """Run an exchange that `is_alone`.

    Raises:
        UsageError: it has received something into a tensor at rest.
    """
    wholes = {id(root): ask_alone(root) for root in unique(t.root for t in given)}
    before = {id(t): t.of(wholes[id(t.root)]).clone() for t in written if isinstance(t, AtRest)}
    plain = {id(t): t.of(wholes[id(t.root)]) for t in given}
    result = mapped(func, args, kwargs, plain)
    if base_name(func) != "send":
        wait_for(result)
    for tensor in written:
        if isinstance(tensor, AtRest) and not torch.equal(before[id(tensor)], plain[id(tensor)]):
            raise UsageError(
                f"{base_name(func).strip('_')}: this rank alone receives values into {tensor.describe()}, of which every rank "
                "holds its rows: let all ranks run the line, or receive into a plain tensor"
            )
    originals = {id(plain[id(t)]): cast(Tensor, t) for t in given}
    return pytree.tree_map_only(Tensor, lambda t: originals.get(id(t), t), result)


def wait_for(result: Any) -> None:
    """Others read and write the tensors of an exchange till it ends."""
    for work in pytree.tree_leaves(result):
        if isinstance(work, torch.ScriptObject):
            work.wait()  # type: ignore[attr-defined]
