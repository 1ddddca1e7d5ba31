"""A model -> its units: which parameters are gathered together, and which modules' calls need them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn

from hf_zero.config.zero_config import UnitGrouping
from hf_zero.engine.parameters.experts import Computed, is_of_experts
from hf_zero.engine.parameters.quantised import can_be_cut, is_of_own_class, is_quantised
from hf_zero.engine.parameters.records import ZeroParameter, at_rest_id
from hf_zero.engine.parameters.tensor_axis import Seen
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.named import find_named
from hf_zero.errors import ConfigError
from hf_zero.parameters import parameters_of

logger = logging.getLogger(__name__)

# Containers whose `forward` is never called: what lies in them is used by the module around them.
_NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# Modules whose `forward` reads its children's parameters without calling the children (in evaluation, on a fast path).
_READS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_LISTS = (nn.ModuleList, nn.Sequential)  # that hold a model's repeated blocks
_IGNORED = "_zero_ignored"  # a module's attribute: names of parameters that are left as they are
_SIZE_FRACTION = 8  # grouping by size makes units of about an eighth of the model
_LARGE_NUMEL = 10**7


@dataclass(eq=False)
class Group:
    """One unit to be.

    Attributes:
        name: the entry modules' qualified names.
        entries: the modules whose calls need the parameters.
        params: each with its (module, attribute) locations and all its names, in the order of the model.
        stays_whole: between uses, in stage 3 too; see `UnitGrouping.whole`.
    """

    name: str
    entries: list[nn.Module]
    params: list[FoundParameter] = field(default_factory=list)
    stays_whole: bool = False


@dataclass(eq=False)
class FoundParameter:
    """A parameter with all the places that hold it."""

    param: nn.Parameter
    names: list[str] = field(default_factory=list)
    locations: list[tuple[nn.Module, str]] = field(default_factory=list)

    def record(self, world: World, keeps_float32: bool) -> ZeroParameter:
        """What an engine knows of it.

        Args:
            world: the ranks over which it is cut.
            keeps_float32: modules compute with it in float32, whatever the compute dtype.
        """
        param = self.param
        made_in = getattr(param, "_zero_made_in", param.dtype)
        computed = Computed.by(self.locations, param, world)
        return ZeroParameter(
            name=self.names[0],
            param=param,
            holders=[(weakref.ref(module), name) for module, name in self.locations],
            layout=world.layout_of(param),
            rank=world.shard_rank,
            computed=computed,
            compute_dtype=param.dtype if is_quantised(param) else world.precision.compute_for(made_in, keeps_float32),
            averages=world.config.gradient_reduction == "mean",
            aliases=self.names[1:],
            seen=Seen.by(self.locations, param, computed.is_part, world),
        )


def find_parameters(model: nn.Module) -> list[FoundParameter]:
    """Every parameter once, in the model's order, with all its names and places (tied ones have several).

    But for those of a class of their own, see [Note: quantised weights], and ignored ones.
    """
    return _find(model, lambda param: not is_of_own_class(param))


def ignore(model: nn.Module, params: Iterable[nn.Parameter]) -> None:
    """Leave parameters of a model as they are, for good and in its copies: nobody finds them any more."""
    ignored = set(map(id, params))
    for module in model.modules():
        names = {name for name, param in module._parameters.items() if id(param) in ignored}
        if names:
            module.__dict__[_IGNORED] = names | module.__dict__.get(_IGNORED, set())


def find_quantised(model: nn.Module) -> list[FoundParameter]:
    """The parameters of a class of their own that can be cut nevertheless."""
    return _find(model, can_be_cut)


def _find(model: nn.Module, is_wanted: Callable[[nn.Parameter], bool]) -> list[FoundParameter]:
    found: dict[int, FoundParameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, param in module._parameters.items():
            if param is None or attribute in module.__dict__.get(_IGNORED, ()) or not is_wanted(param):
                continue
            entry = found.setdefault(id(param), FoundParameter(param))
            entry.names.append(f"{prefix}.{attribute}" if prefix else attribute)
            if not any(module is known and attribute == name for known, name in entry.locations):
                entry.locations.append((module, attribute))
    return list(found.values())


def group(model: nn.Module, grouping: UnitGrouping) -> list[Group]:
    """Cut a model into units.

    By default the repeated blocks of a model are a unit each (found by transformers' `_no_split_modules`, and as children
    of one class in a `ModuleList`), and so is every module beside them: embeddings, the final norm, the head. A
    parameter that several of these hold (tied weights) is a unit of its own, needed by the calls of all of them.

    Raises:
        ConfigError: `grouping` names classes or modules that the model does not have.
    """
    whole = find_named(model, grouping.whole, "units.whole")
    entries = _entries(model, grouping) | {id(called) for module in whole for called in _called_in(module)}
    in_whole = {id(inner) for module in whole for inner in module.modules()}
    entry_of_path: dict[str, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if path == "":
            entry_of_path[path] = (type(model).__name__, model)
        elif id(module) in entries:
            entry_of_path[path] = (path, module)
        else:
            entry_of_path[path] = entry_of_path[path.rpartition(".")[0]]
    groups: dict[tuple[object, ...], Group] = {}
    for found in find_parameters(model):
        needed_by: dict[int, tuple[str, nn.Module]] = {}
        for name in found.names:
            path, entry = entry_of_path[name.rpartition(".")[0]]
            needed_by.setdefault(id(entry), (path, entry))
        is_part = is_of_experts(found.locations)  # which come from other ranks, see [Note: experts]
        key = (is_part, *sorted(needed_by))
        if key not in groups:
            label = " + ".join(path for path, _ in needed_by.values()) + (" (experts)" if is_part else "")
            stays_whole = in_whole.issuperset(needed_by)
            groups[key] = Group(label, [entry for _, entry in needed_by.values()], stays_whole=stays_whole)
        groups[key].params.append(found)
    return list(groups.values())


def _called_in(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or those in it whose `forward` is called, where its own is not."""
    if not isinstance(module, _NOT_CALLED):
        yield module
        return
    for child in module.children():
        yield from _called_in(child)


def _entries(model: nn.Module, grouping: UnitGrouping) -> set[int]:
    if grouping.min_numel is not None:
        return _by_size(model, grouping.min_numel)
    if grouping.class_names:
        blocks = named_blocks(model, grouping)
    else:
        blocks = _automatic_blocks(model)
    if not blocks:
        total = _numel(model)
        level = logging.WARNING if total >= _LARGE_NUMEL else logging.INFO  # of a small one, it does not matter
        logger.log(
            level,
            "no repeated blocks found in %s: its parameters are grouped by size instead, into units of about %d elements; "
            "name the block classes with `units: [ClassName]` if that is too coarse",
            type(model).__name__,
            max(total // _SIZE_FRACTION, 1),
        )
        return _by_size(model, max(total // _SIZE_FRACTION, 1))
    return blocks | _beside_blocks(model, blocks)


def named_blocks(model: nn.Module, grouping: UnitGrouping) -> set[int]:
    """The ids of the modules whose classes `grouping` names.

    Raises:
        ConfigError: it names classes, and the model has none of them.
    """
    blocks = {id(module) for module in _outermost(model, set(grouping.class_names))}
    if grouping.class_names and not blocks:
        with_children = [m for m in model.modules() if next(m.children(), None) and not isinstance(m, _NOT_CALLED)]
        classes = sorted({type(module).__name__ for module in with_children})
        raise ConfigError(
            f"units: {list(grouping.class_names)}: {type(model).__name__} has no module of such a class; "
            f"it has {', '.join(classes) or 'no submodules'}"
        )
    return blocks


def _outermost(model: nn.Module, class_names: set[str]) -> Iterator[nn.Module]:
    for child in model.children():
        if type(child).__name__ in class_names and not isinstance(child, _NOT_CALLED) and _has_parameters(child):
            yield child
        else:
            yield from _outermost(child, class_names)


def _automatic_blocks(model: nn.Module) -> set[int]:
    no_split: set[str] = set()
    for module in model.modules():
        no_split.update(getattr(module, "_no_split_modules", None) or ())
    blocks: set[int] = set()
    _collect_blocks(model, no_split, blocks)
    return blocks


def _collect_blocks(module: nn.Module, no_split: set[str], blocks: set[int]) -> None:
    repeated = _repeated_children(module)
    for name, child in module.named_children():
        if not _has_parameters(child):
            continue
        is_named = type(child).__name__ in no_split and not isinstance(child, _NOT_CALLED)
        is_repeated = id(child) in repeated and name != "experts"
        if (is_named or is_repeated) and not _is_made_of_lists(child):
            blocks.add(id(child))
        else:
            _collect_blocks(child, no_split, blocks)


def _repeated_children(module: nn.Module) -> set[int]:
    """Children of a list that share their class with another one, and have submodules: a model's blocks."""
    if not isinstance(module, _LISTS):
        return set()
    children = [child for child in module.children() if next(child.children(), None) is not None]
    classes = [type(child) for child in children]
    return {id(child) for child in children if classes.count(type(child)) > 1 and not isinstance(child, _NOT_CALLED)}


def _is_made_of_lists(module: nn.Module) -> bool:
    """Whether most of a module lies in blocks of its own, as in the stages of a hierarchical vision model."""
    total = _numel(module)
    inner = sum(
        _numel(child)
        for name, submodule in module.named_modules()
        if isinstance(submodule, _LISTS) and not name.endswith("experts")
        for child in submodule.children()
        if id(child) in _repeated_children(submodule)
    )
    return inner * 2 > total


def _beside_blocks(model: nn.Module, blocks: set[int]) -> set[int]:
    """Modules that lie beside the blocks, outermost ones, as entries of their own."""
    entries: set[int] = set()

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if id(child) in blocks or not _has_parameters(child):
                continue
            if isinstance(child, _NOT_CALLED) or any(id(inner) in blocks for inner in child.modules()):
                if not isinstance(child, _NOT_CALLED):
                    entries.add(id(child))  # for parameters that it holds itself
                visit(child)
            else:
                entries.add(id(child))

    visit(model)
    return entries


def _by_size(model: nn.Module, min_numel: int) -> set[int]:
    """The smallest modules that hold at least `min_numel` elements beside those in entries below them."""
    entries: set[int] = set()

    def visit(module: nn.Module) -> int:
        if isinstance(module, _READS_CHILDREN):
            left = _numel(module)
        else:
            own = sum(param.numel() for param in module._parameters.values() if param is not None)
            left = own + sum(visit(child) for child in module.children())
        if left >= min_numel and module is not model and not isinstance(module, _NOT_CALLED):
            entries.add(id(module))
            return 0
        return left

    visit(model)
    return entries


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in parameters_of(module))


def _has_parameters(module: nn.Module) -> bool:
    return next(parameters_of(module), None) is not None


def roots_of(model: nn.Module, entries: set[int]) -> list[nn.Module]:
    """The model, and the modules in it that hold entries: a forward of any of them is one of the model."""
    return [m for m in model.modules() if m is model or any(id(c) in entries for c in m.modules() if c is not m)]


class Structure:
    """Which parameters and modules every module of a model holds, under which names, as it is when this is made.

    In whichever order: who takes a module away and puts it back (to save the model without it) has changed nothing, and may
    have done so on one rank alone.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [(weakref.ref(module), _held_by(module)) for module in model.modules()]
        self._held = [(module, [*by_name.values()], by_name) for module, by_name in found]

    def is_unchanged(self) -> bool:
        """Whether they hold the same now; every forward asks."""
        for known, ids, by_name in self._held:
            module = known()
            if module is None:
                return False
            held = [*map(id, dict.values(module._parameters)), *map(id, module._modules.values())]
            if held != ids and _held_by(module) != by_name:
                return False
        return True


def _held_by(module: nn.Module) -> dict[str, int]:
    """The ids of what a module holds, by name; of parameters as they are at rest."""
    parameters = {name: at_rest_id(param) for name, param in dict.items(module._parameters)}
    return parameters | {name: id(each) for name, each in module._modules.items()}


def reads_in_backward(module: nn.Module) -> bool:
    """Whether the backward of a call of `module` reads its parameters; that of a plain embedding needs indices only.

    Not by its hooks, which may differ between ranks: one that computes with the weights makes torch's backward raise.
    """
    is_plain = type(module) is nn.Embedding and module._parameters.keys() == {"weight"}
    return not is_plain or bool(module._modules) or "forward" in vars(module)
