"""Heads over a vocabulary, whose logits are put off: see [Note: logits put off]."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_zero import torch_compat
from hf_zero.engine.backward.backward import Backward
from hf_zero.engine.modules.hooks import ModuleHooks
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.ranks.world import World
from hf_zero.engine.tiles import rules
from hf_zero.engine.tiles.put_off import PutOff, Step, put_off
from hf_zero.engine.tiles.work import Work
from hf_zero.engine.units.reading import replace_tensors
from hf_zero.engine.units.unit import Unit
from hf_zero.errors import ConfigError, UsageError
from hf_zero.parameters import parameters_of

logger = logging.getLogger(__name__)


class Runner(nn.Module):
    """Runs a function as a call of another module: inside, and in its backward, that module's parameters are whole.

    The engine hangs the hooks of the other module's calls on it, and nobody else's: a function of slices calls the other module
    once a slice, and everybody's hooks see these calls.
    """

    def forward(self, function: Callable[[], Any]) -> Any:
        """What the function gives."""
        return function()


class TiledHead:
    """A head, as it is called: its logits are put off.

    Args:
        head: a module that gives logits [..., words] of tokens [..., width], for each token alone.
        runner: of the head.
        size: tokens at a time.
        is_running: whether a forward of the model is under way.
        stamp: what changes when the head's parameters do.
    """

    def __init__(
        self,
        head: nn.Module,
        runner: Runner,
        size: int,
        is_running: Callable[[], bool],
        stamp: Callable[[], object],
    ) -> None:
        rules.install()
        self._head = weakref.ref(head)
        self.runner = runner
        self.size = size
        self._is_running = is_running
        self.stamp = stamp
        self._likes: dict[object, Tensor | None] = {}
        self._is_told = False
        self._given = torch_compat.call_of(head)
        torch_compat.call_instead(head, self)

    @property
    def module(self) -> nn.Module:
        """The head."""
        head = self._head()
        assert head is not None, "a graph has outlived its head"
        return head

    @property
    def num_words(self) -> int:
        """How many logits a token has; 0 before the first."""
        return max((like.shape[-1] for like in self._likes.values() if like is not None), default=0)

    def remove(self) -> None:
        """Let calls of the head be as they were."""
        head = self._head()
        if head is not None and torch_compat.call_of(head) is self:
            torch_compat.call_instead(head, self._given)

    def computed(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The head's own call."""
        return torch_compat.call_plainly(self.module, self._given, tokens, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Logits that are put off, where a forward of the model may compute a loss of them."""
        tokens = args[0] if len(args) == 1 and not kwargs else None
        is_asked = torch.is_grad_enabled() or self._is_running()
        if not is_asked or not isinstance(tokens, Tensor) or isinstance(tokens, PutOff) or tokens.ndim < 2:
            return self.computed(*args, **kwargs)
        if torch.compiler.is_compiling() or torch_compat.in_function_transform():
            return self.computed(*args, **kwargs)
        like = self._like(tokens)
        if like is None:
            return self.computed(*args, **kwargs)
        return put_off(_Logits(self, tokens), tokens, (), like, self._is_in_graph(tokens))

    def _is_in_graph(self, tokens: Tensor) -> bool:
        trains = tokens.requires_grad or any(param.requires_grad for param in parameters_of(self.module))
        return torch.is_grad_enabled() and trains

    def _like(self, tokens: Tensor) -> Tensor | None:
        """Logits of no tokens; None if they aren't of the kind that can be put off. The head tells once for each mode."""
        kind = tokens.device.type
        key = tokens.dtype, tokens.shape[-1], torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        if key not in self._likes:
            none = tokens.new_zeros(0, tokens.shape[-1])
            with torch.no_grad():
                found = self.runner(lambda: self.computed(none))
            is_usual = isinstance(found, Tensor) and found.ndim == 2 and found.shape[0] == 0
            self._likes[key] = found.detach() if is_usual else None
        return self._likes[key]

    def tell(self, function: str) -> None:
        """Say once that the bound isn't kept."""
        if not self._is_told and self._is_running():
            self._is_told = True
            logger.warning(
                "tile_tokens: the model's forward gives its logits to %r, which needs them all, so they are computed at once",
                function,
            )


class _Logits:
    """The logits of one call of a head; see `Source`."""

    def __init__(self, head: TiledHead, tokens: Tensor) -> None:
        self._head = head
        self._tokens, self._version = tokens, None if tokens.is_inference() else tokens._version
        self._stamp = head.stamp()
        self.family: list[weakref.ref[PutOff]] = []
        self.is_used = False

    def tell(self, function: str) -> None:
        self._head.tell(function)

    def all_of(self, tokens: Tensor, steps: Sequence[Step]) -> Tensor:
        self._check()
        found: Tensor = self._head.runner(lambda: _after(self._head.computed(tokens), steps))
        return found

    def reduced(
        self, tokens: Tensor, steps: Sequence[Step], finish: Callable[..., Any], beside: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        self._check()
        self.is_used = True
        computed = self._head.computed

        def compute(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            found = finish(_after(computed(x), steps), *rest)
            return (found,) if isinstance(found, Tensor) else tuple(found)

        work = Work(self._head.module, self._head.size, compute)
        results: tuple[Tensor, ...] = self._head.runner(lambda: work(tokens, beside))
        return results

    def _check(self) -> None:
        if self._head.stamp() != self._stamp:
            raise UsageError(
                "the weights of the head have changed since the forward whose logits are read now, and tile_tokens computes "
                "logits only when they are read: read them before the optimizer's step, or leave tile_tokens out"
            )
        if self._version is not None and self._tokens._version != self._version:
            raise UsageError(
                "what the head was given has been written into since, so its logits, which tile_tokens computes only when they "
                "are read, are gone: leave tile_tokens out"
            )


def _after(logits: Tensor, steps: Sequence[Step]) -> Tensor:
    for step in steps:
        logits = step(logits)
    return logits


def heads_of(model: nn.Module) -> list[nn.Module]:
    """The modules that give a model's logits over a vocabulary, as transformers finds them; each once."""
    inside = set(model.modules())
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        get_head = getattr(type(module), "get_output_embeddings", None)
        if get_head is None:
            continue
        try:
            head = get_head(module)
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(head, nn.Module) and head in inside:
            found[head] = None
    return list(found)


@dataclass(frozen=True)
class Surroundings:
    """What an engine knows of its model.

    Attributes:
        world: the ranks.
        parameters: all of the model.
        unit_of: their units, by id of these; none where nothing is gathered.
        hooks_of: the hooks of modules whose calls need units, by id of these.
        backward: of the model.
    """

    world: World
    parameters: Sequence[ZeroParameter]
    unit_of: Mapping[int, Unit]
    hooks_of: Mapping[int, ModuleHooks]
    backward: Backward

    def inside(self, module: nn.Module) -> list[ZeroParameter]:
        """The parameters of a module and its parts."""
        parts = set(module.modules())
        return [p for p in self.parameters if any(holder in parts for holder, _ in p.locations)]

    def runner_of(self, module: nn.Module) -> Runner:
        """What runs functions as calls of a module."""
        runner = Runner()
        for part in module.modules():
            if (hooks := self.hooks_of.get(id(part))) is not None:
                ModuleHooks(hooks.entry, runner, self.backward, is_other=True)
        return runner

    def stamp_of(self, module: nn.Module) -> Callable[[], tuple[int, ...]]:
        """What changes when the parameters of a module do."""
        units, own = self.unit_of, self.inside(module)
        return lambda: tuple(units[id(p)].epoch if id(p) in units else p.param._version for p in own)


def tile_heads(model: nn.Module, seen: Surroundings, is_running: Callable[[], bool]) -> list[TiledHead]:
    """Let the heads of a model compute logits for `tile_tokens` tokens at a time.

    Args:
        model: of an engine.
        seen: what that knows.
        is_running: whether a forward of the model is under way.

    Raises:
        ConfigError: the ranks of the tensor axis hold parts of a head.
    """
    size, found = seen.world.config.tile_tokens, []
    for head in heads_of(model) if size else ():
        cut = next((p for p in seen.inside(head) if seen.world.cut_of(p.param).tensor is not None), None)
        if cut is not None:
            raise ConfigError(
                f"key 'tile_tokens': {cut.name!r} is cut over the tensor axis (tp_size), so no rank computes all logits of a "
                "token: leave one of the two out"
            )
        found.append(TiledHead(head, seen.runner_of(head), size, is_running, seen.stamp_of(head)))
    if size and not found:
        logger.warning("tile_tokens has no effect on %s, which has no head over a vocabulary", type(model).__name__)
    return found


def compute_unused(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of the model: one that has made no graph and no loss gives its logits, as ever."""
    if torch.is_grad_enabled():
        return None
    found = [each for each in pytree.tree_leaves(output) if isinstance(each, PutOff) and not each.source.is_used]
    if not found:
        return None
    return replace_tensors(output, {id(each): each.computed(False) for each in found})
