"""What a model computes in a forward and a backward, by the units that are in use: counted on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker
from transformers import masking_utils

from hf_zero import torch_compat
from hf_zero.changes import Changes
from hf_zero.errors import UsageError
from hf_zero.plan.activations import is_grouped

_ROOT = "Global"  # of a `ModuleTracker`, which has the root's class in front of every other name
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_PRODUCTS = {
    _ATTENTION: 2,
    f"{_ATTENTION}_backward": 5,
}  # of queries and keys in an attention, which torch does not count


@dataclass(frozen=True)
class Work:
    """What operators do.

    Attributes:
        operations: multiplications and additions of matrix products and attention.
        product_bytes: that these read and write.
        other_bytes: that all others read and write.
        launches: operators that compute.
    """

    operations: float = 0
    product_bytes: int = 0
    other_bytes: int = 0
    launches: int = 0

    def plus(self, other: Work) -> Work:
        """Both."""
        return Work(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Stretch:
    """What runs while the same units are in use.

    Attributes:
        units: by number.
        work: of the operators.
    """

    units: frozenset[int]
    work: Work


@dataclass(frozen=True)
class Pass:
    """A forward and its backward, in the order in which they run."""

    forward: tuple[Stretch, ...]
    backward: tuple[Stretch, ...]

    def total(self) -> Work:
        """All work."""
        found = Work()
        for stretch in (*self.forward, *self.backward):
            found = found.plus(stretch.work)
        return found


def count(model: nn.Module, batch: Mapping[str, Tensor], units: Sequence[str]) -> Pass:
    """What a forward of a batch and its backward compute.

    Args:
        model: on the meta device, in the dtype that it computes in; its output has a loss.
        batch: keyword arguments of its forward, on the meta device.
        units: their names, as `shapes_of` gives them.

    Raises:
        UsageError: the model does not run without values, or gives no loss.
    """
    entries = {path: number for number, name in enumerate(units) for path in name.split(" + ")}
    with torch_compat.fake_tensors() as convert, Changes() as changes:
        changes.replace(masking_utils, "find_packed_sequence_indices", lambda _: None)  # it looks at values
        named = {name: convert(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        given = {key: convert(value) for key, value in batch.items()}
        counting = _Counting(type(model).__name__, entries)
        try:
            with _GroupedAsOne(), counting, counting.tracker:
                loss = torch.func.functional_call(model, named, (), given).loss
                loss.backward()
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{type(model).__name__} does not train on tensors without values ({str(error).splitlines()[0]}), so the time "
                "of a step is not known: leave --gpu and --measure out"
            ) from error
    return Pass(tuple(counting.forward), tuple(counting.backward))


class _GroupedAsOne(TorchFunctionMode):
    """Within: a product grouped by expert is one of all rows with one expert's weights, which computes as much.

    torch counts no operations of the grouped one, and without values knows it in bfloat16 only.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] @ args[1][0] if is_grouped(func, args) else func(*args, **(kwargs or {}))


@dataclass
class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """While active, operators are counted by the units in use, forward and backward apart.

    Args:
        root: the class of the model.
        entries: number of the unit by the path of each module that uses it.
    """

    root: str
    entries: Mapping[str, int]
    tracker: ModuleTracker = field(default_factory=ModuleTracker)
    forward: list[Stretch] = field(default_factory=list)
    backward: list[Stretch] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        work = _work_of(func, args, kwargs or {}, out)
        if work.launches:
            stretches = self.backward if self.tracker.is_bw else self.forward
            units = frozenset(self._units_in_use())
            if stretches and (stretches[-1].units == units or not units):
                stretches[-1] = Stretch(stretches[-1].units, stretches[-1].work.plus(work))
            else:
                stretches.append(Stretch(units, work))
        return out

    def _units_in_use(self) -> Iterable[int]:
        for name in self.tracker.parents:
            path = name.removeprefix(f"{self.root}.") if name != self.root else ""
            if path in self.entries:
                yield self.entries[path]


def _work_of(func: Any, args: Any, kwargs: Any, out: Any) -> Work:
    """Of one operator; a view, or a question about a tensor, does nothing."""
    made = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
    if not made or func.is_view or "alias" in func.name() or func.name().startswith(("prim::", "aten::detach")):
        return Work()
    read = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    num_bytes = sum(t.numel() * t.element_size() for t in (*read, *made))
    name = func.name().partition("::")[2].partition(".")[0]
    if name in _PRODUCTS:
        query, key = read[0], read[1]
        if name.endswith("backward"):
            query, key = read[1], read[2]
        operations = 2 * _PRODUCTS[name] * query.numel() * key.shape[-2]
        return Work(operations, num_bytes, 0, 1)
    counted: Callable[..., Any] | None = flop_registry.get(func.overloadpacket)
    if counted is not None:
        return Work(float(counted(*args, **kwargs, out_val=out)), num_bytes, 0, 1)
    return Work(0, 0, num_bytes, 1)
