"""Values at rest that have keys, and what ranks give each other of them.

[Note: made alone] The main process often computes from weights alone and keeps what it gets over the next steps: the best
weights so far, an average. It has its own rows only. So each rank counts among what it reports at the end of a backward which
values it keeps. Where ranks differ, they tell each other the keys, and the calls that have made these values since the last
backward; who lacks a value makes its own rows of it, from weights that no step has changed yet, and keeps them until no rank
keeps the value any more. A rank that reads a value earlier sends the calls along. What cannot be made so (of weights as they
were before a step or an edit that came in between) is an error where it is read.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hf_zero.comm.agreements import bits, words
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.together import share
from hf_zero.engine.parameters.at_rest.known.entries import (
    Entry,
    entries_of,
    forget,
    keep,
    key_of_cast,
    key_of_gradient,
    key_of_parameter,
    key_of_value,
    with_key,
)
from hf_zero.engine.parameters.at_rest.known.recipes import Key, Recipe
from hf_zero.engine.parameters.at_rest.root import Root
from hf_zero.engine.ranks.apart import same_bits
from hf_zero.engine.ranks.offers import GONE, NameOfGradient, stream_aside
from hf_zero.engine.ranks.serving import Serving
from hf_zero.errors import CollectiveError
from hf_zero.layout import RowLayout

logger = logging.getLogger(__name__)

VALUES = "values computed from parameters"
_LABEL = "values that some ranks have computed alone"
_MOST_RECIPES = 20_000  # between two backwards; of what is still there twice as many, and the rest cannot be read alone
_BITS, _PRINT_BYTES = 62, 7  # of a fingerprint, and of a key in it
_KEEP = "let all ranks compute it, and keep it, or run the line that reads it before it changes"
_CHANGED = "it has changed the value since: let all ranks run the line that reads"
_CASTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_Part = tuple[Tensor, RowLayout]


def note(root: Root, key: Key | None, recipe: Recipe | None = None, is_filled: bool = True) -> None:
    """What a tensor is from now on.

    Args:
        root: the tensor.
        key: None: nobody can know.
        recipe: how it has been made, if others can make it so.
        is_filled: it has its values already.
    """
    world, cut = root.held
    rows, param, serving = root.rows, root.param, world.serving
    if key is None:
        forget(rows)
    elif root.is_cut and serving.is_asked and (param is None or serving.number_of(param) is None):
        keep(serving, rows, key, cut.rows, is_filled)
        if recipe is not None:
            _values_of(serving).remember(key, recipe)


def serve(serving: Serving) -> None:
    """Let its peers ask for values, from now on."""
    if serving.is_asked:
        _values_of(serving)


def fingerprint(serving: Serving) -> int:
    """A number that tells apart which values this rank keeps."""
    values = _by_serving.get(serving)
    return 0 if values is None else values.fingerprint()


def settle(serving: Serving, among: Collectives, are_alike: bool) -> None:
    """Ranks have told each other which values they keep, and no step has come since: see [Note: made alone].

    Args:
        serving: theirs.
        among: them.
        are_alike: whether they keep the same; the same answer on all of them.
    """
    if not are_alike:
        _values_of(serving).exchange(among, serving.device.type)
    if serving in _by_serving:
        _by_serving[serving].recipes.clear()


# ---- of one world's ranks --------------------------------------------------------------------------------------------

_by_serving: weakref.WeakKeyDictionary[Serving, _Values] = weakref.WeakKeyDictionary()


def _values_of(serving: Serving) -> _Values:
    if serving not in _by_serving:
        _by_serving[serving] = values = _Values(serving)
        serving.offer(VALUES, values.give, _search, values.question, outlives_edits=True)
    return _by_serving[serving]


def _search(tensor: Tensor) -> Key | None:
    if not isinstance(tensor, Root):
        return None
    key, serving = key_of_value(tensor), tensor.held[0].serving
    name = serving.gradient_with(tensor.rows) if key is None else None
    return key if name is None else key_of_gradient(serving, name)


class _Values:
    """What ranks give each other.

    Args:
        serving: theirs.

    Attributes:
        recipes: of what this rank has made since the last backward, as it went.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = weakref.ref(serving)
        self.recipes: dict[Key, Recipe] = {}
        self._adopted: dict[Key, Tensor] = {}  # rows of what other ranks keep
        self._parted: set[Key] = set()  # what not all can have
        self._named: tuple[object, dict[Key, NameOfGradient]] = None, {}
        self._table: tuple[int, dict[Key, tuple[tuple[int, int], torch.dtype | None]]] = -1, {}

    def remember(self, key: Key, recipe: Recipe) -> None:
        """This rank has made a value."""
        if len(self.recipes) >= _MOST_RECIPES:
            self.recipes = _needed([entry.key for entry in self._entries()], self.recipes, lambda _: False)
        if len(self.recipes) < 2 * _MOST_RECIPES:
            self.recipes[key] = recipe

    # --- one rank reads ---------------------------------------------------------------------------------------------

    def question(self, key: Key) -> tuple[Key, dict[Key, Recipe]]:
        """What is sent to ask for a value."""
        return key, _needed([key], self.recipes, lambda _: False)

    def give(self, question: tuple[Key, dict[Key, Recipe]]) -> _Part:
        """This rank's part of a value that it has, or can make.

        Raises:
            CollectiveError: it cannot, or has several that are not the same.
        """
        key, recipes = question
        found = with_key(key)
        if not found:
            return self._made_for_another(key, recipes)
        values = [_on_host(rows, entry) for entry, rows in found]
        if any(not same_bits(values[0], value) for value in values):
            raise CollectiveError("it has several such values, which differ: let all ranks run the line that reads")
        if len(with_key(key)) != len(found):
            raise CollectiveError(_CHANGED)
        return values[0], found[0][0].layout

    def _made_for_another(self, key: Key, recipes: dict[Key, Recipe]) -> _Part:
        serving = self._serving()
        if serving is None:
            raise CollectiveError(GONE)
        named = {key, *(each for recipe in recipes.values() for each in recipe.operands)}
        values, gradients = [*filter(with_key, named)], [self._names()[each] for each in named & self._names().keys()]
        with serving.beside(serving.device):
            part = self._made([key], recipes).get(key) or self._of_engine(key)
            if part is None:
                advice = GONE if serving.has_lost_models else _KEEP
                raise CollectiveError(f"it has no such value: {advice}")
            rows = part[0].cpu().clone()
        if not all(map(with_key, values)) or any(serving.gradient(each) is None for each in gradients):
            raise CollectiveError(_CHANGED)
        return rows, part[1]

    # --- all settle what they keep ----------------------------------------------------------------------------------

    def fingerprint(self) -> int:
        """A number that tells apart which values are kept here."""
        return _sum({entry.key for entry in self._entries()} - self._parted)

    @torch.no_grad()
    @torch.inference_mode(False)
    def exchange(self, among: Collectives, kind: str) -> None:
        """Make what other ranks keep, and drop what they do not any more.

        Args:
            among: all of them.
            kind: of their devices.
        """
        with torch.autocast("cpu", enabled=False), torch.autocast(kind, enabled=False):
            self._exchange(among)

    def _exchange(self, among: Collectives) -> None:
        own = self._own()
        prints = [number for (number,) in among.agree([_sum(own)], _LABEL)]
        wanted, recipes = dict[Key, str](), dict[Key, Recipe]()
        for source in sorted({prints.index(number) for number in prints}):
            kept, made = share(among, (own, self.recipes), _LABEL, source)
            wanted, recipes = kept | wanted, recipes | made
        wanted_here = {key: device for key, device in wanted.items() if key not in own}
        self._adopt(wanted_here, recipes)
        for key in self._adopted.keys() - wanted_here.keys():
            del self._adopted[key]
        keys = sorted(wanted)
        lacks = sum(1 << place for place, key in enumerate(keys) if key in wanted_here and key not in self._adopted)
        lacking = among.combine(words(lacks, len(keys)), _LABEL).any_bits if keys else []
        self._parted = {key for place, key in enumerate(keys) if bits(lacking) >> place & 1}
        for key in self._parted & self._adopted.keys():
            del self._adopted[key]

    def _own(self) -> dict[Key, str]:
        """What the program keeps here, and on which kind of device."""
        adopted = {id(rows) for rows in self._adopted.values()}
        alive = [(entry.key, entry.rows()) for entry in self._entries() if id(entry.rows()) not in adopted]
        return {key: rows.device.type for key, rows in alive if rows is not None}

    def _entries(self) -> list[Entry]:
        serving = self._serving()
        return [] if serving is None else entries_of(serving.name)

    def _adopt(self, wanted: dict[Key, str], recipes: dict[Key, Recipe]) -> None:
        serving = self._serving()
        assert serving is not None
        missing = [key for key in wanted if key not in self._adopted]
        try:
            made = self._made(missing, recipes, lambda key: key in wanted or self._adopted.pop(key, None))
            for key in missing:
                part = made.pop(key, None) or self._of_engine(key)
                if part is not None:
                    self._adopted[key] = rows = part[0].to(self._device(wanted[key]), copy=True)
                    keep(serving, rows, key, part[1])
        except Exception as error:  # the others hear that it is lacking here
            logger.warning("what another rank has computed alone is not kept here, and cannot be read: %s", error)

    # --- how values are made ----------------------------------------------------------------------------------------

    def _made(
        self, keys: Sequence[Key], recipes: dict[Key, Recipe], after_last_use: Callable[[Key], object] = lambda _: None
    ) -> dict[Key, _Part]:
        """Those of `keys` that recipes make of what is here."""
        needed = _needed(keys, recipes, self._has)
        uses = Counter(operand for recipe in needed.values() for operand in recipe.operands)
        made = dict[Key, _Part]()
        for key, recipe in needed.items():
            parts = {each: made.get(each) or self._part(each) for each in recipe.operands}
            known = {each: part for each, part in parts.items() if part is not None}
            if len(known) == len(parts):
                rows = {each: part[0].to(self._device(recipe.device)) for each, part in known.items()}
                made[key] = recipe.make(rows.__getitem__), next(iter(known.values()))[1]
            for operand in recipe.operands:
                uses[operand] -= 1
                if not uses[operand] and operand not in keys:
                    made.pop(operand, None)
                    after_last_use(operand)
        return made

    def _has(self, key: Key) -> bool:
        return bool(with_key(key)) or key in self._parameters() or key in self._names()

    def _part(self, key: Key) -> _Part | None:
        """This rank's part of what it has, as it is."""
        for entry, rows in with_key(key):
            if entry.ready is not None and rows.device.type == "cpu":
                entry.ready.synchronize()
            elif entry.ready is not None:
                torch.accelerator.current_stream(rows.device).wait_event(entry.ready)
            return rows, entry.layout
        return self._of_engine(key)

    def _of_engine(self, key: Key) -> _Part | None:
        """What a copy of a parameter has, or of its gradient, as these are now: nobody has to keep a copy for others."""
        serving, known = self._serving(), self._parameters().get(key)
        if serving is None:
            return None
        if known is None:
            return self._of_gradient(key)
        number, dtype = known
        rows, layout = serving.parameter(number)
        return (rows.detach() if dtype is None else rows.detach().to(dtype)), layout

    def _of_gradient(self, key: Key) -> _Part | None:
        serving, name = self._serving(), self._names().get(key)
        gradient = None if serving is None or name is None else serving.gradient(name)
        if gradient is None:
            return None
        if gradient.ready is not None and gradient.rows.device.type != "cpu":
            torch.accelerator.current_stream(gradient.rows.device).wait_event(gradient.ready)
        return gradient.rows, gradient.layout

    def _names(self) -> dict[Key, NameOfGradient]:
        """The gradients that there are now, by their keys."""
        serving = self._serving()
        if serving is None:
            return {}
        if (writes := serving.writes) != self._named[0]:
            self._named = writes, {key_of_gradient(serving, name): name for name in serving.names_of_gradients()}
        return self._named[1]

    def _parameters(self) -> dict[Key, tuple[tuple[int, int], torch.dtype | None]]:
        """The keys that copies of parameters have now, in their dtype or cast."""
        serving = self._serving()
        if serving is None:
            return {}
        version = serving.version
        if self._table[0] != version:
            known = {key_of_parameter(serving, number): number for number in serving.numbers()}
            table: dict[Key, tuple[tuple[int, int], torch.dtype | None]] = {key: (n, None) for key, n in known.items()}
            for cast in _CASTS:
                table |= {key_of_cast(key, cast): (number, cast) for key, number in known.items()}
            self._table = version, table
        return self._table[1]

    def _device(self, kind: str) -> torch.device:
        serving = self._serving()
        return torch.device(kind) if serving is None or serving.device.type != kind else serving.device


def _needed(keys: Sequence[Key], recipes: dict[Key, Recipe], has: Callable[[Key], bool]) -> dict[Key, Recipe]:
    """Those of the recipes that make `keys`, each after those of what it is made of."""
    found, seen = dict[Key, Recipe](), set[Key]()
    open_keys = [(key, False) for key in reversed(keys)]
    while open_keys:
        key, is_ready = open_keys.pop()
        if is_ready:
            found[key] = recipes[key]
        elif key in recipes and key not in seen and not has(key):
            seen.add(key)
            open_keys.append((key, True))
            open_keys += [(operand, False) for operand in recipes[key].operands]
    return found


def _sum(keys: Iterable[Key]) -> int:
    return sum(int.from_bytes(key[:_PRINT_BYTES], "little") for key in keys) & (1 << _BITS) - 1


def _on_host(rows: Tensor, entry: Entry) -> Tensor:
    if rows.device.type == "cpu" and entry.ready is not None:
        entry.ready.synchronize()  # a copy from a device that nobody has waited for
        return rows.detach().clone()
    with _after(entry.ready, rows.device):
        return rows.detach().cpu().clone()


@contextlib.contextmanager
def _after(ready: torch.Event | None, device: torch.device) -> Iterator[None]:
    """On a device: on a stream beside what is queued behind an event."""
    if ready is None:
        yield
        return
    aside = stream_aside(device)
    aside.wait_event(ready)
    with aside:
        yield
