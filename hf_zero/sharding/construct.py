"""Partition a model while it is constructed: parameters become shards as they are registered on modules.

One rule: while a `Cutter` is active, every registered parameter becomes a shard at once, and every torch function that
touches it meanwhile sees it whole for a moment (`WholeWindow`, `WholeOnTouch`). Weight initialisation therefore runs
unchanged, on whole tensors, in the unsharded order.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from hf_zero.engine.parameters.replaced import replace
from hf_zero.engine.ranks.world import World
from hf_zero.parameters import parameters_of
from hf_zero.sharding.checks import is_of_users_class
from hf_zero.sharding.shared_memory import refuse_aliases
from hf_zero.sharding.whole_window import WINDOW_BYTES, WholeWindow, is_plain, is_shard, own, to_shard


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Functions that overwrite their first tensor (or `out`) entirely, so that its old values are not needed.
_OVERWRITES = _words(
    "normal_ uniform_ zero_ fill_ copy_ random_ exponential_ bernoulli_ log_normal_ cauchy_ geometric_ "
    "constant_ ones_ zeros_ eye_ eye xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ "
    "trunc_normal_"
)
# Functions that use only a tensor's shape, dtype and device.
_SHAPE_ONLY = _words(
    "new_empty new_zeros new_ones new_full empty_like zeros_like ones_like full_like rand_like randn_like"
)
# Facts that a DTensor knows about itself, and functions that must see the parameter, not its value.
_FACTS = _words(
    "size dim ndimension numel nelement stride is_contiguous element_size is_floating_point is_complex "
    "is_signed requires_grad_ register_hook register_post_accumulate_grad_hook get_device storage_offset "
    "__len__ __repr__ __format__ __hash__ __deepcopy__ __reduce_ex__ is_same_size "
    "_has_compatible_shallow_copy_type"
)
# What `nn.Module.to` and its relatives call on each parameter.
_CONVERSIONS = _words("to float double half bfloat16 cpu cuda type")
_VALUE_ATTRIBUTES = frozenset(("data", "T", "H", "mT", "mH", "real", "imag"))


def _sees_facts_only(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VALUE_ATTRIBUTES
    return name in _FACTS


class WholeOnTouch(TorchFunctionMode):
    """Hand torch functions whole tensors in place of parameters that were cut."""

    def __init__(self, window: WholeWindow, twins: WeakIdKeyDictionary) -> None:
        super().__init__()
        self._window = window
        self._twins = twins  # plain parameter somebody may still hold -> what it was cut into
        self.is_paused = False

    def _shard_of(self, value: object) -> DTensor | None:
        if is_shard(value):
            return None if value.is_meta else value
        return cast("DTensor | None", self._twins.get(value)) if is_plain(value) else None  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` on whole tensors, unless it asks for facts that a shard knows about itself."""
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if not any(self._shard_of(a) is not None for a in _flat((*args, *kwargs.values()))):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        subject = self._shard_of(args[0]) if args else None
        if _sees_facts_only(func):
            if name in ("__deepcopy__", "__reduce_ex__") and subject is not None:
                self._window.settle(subject)
            return func(*args, **kwargs)
        if name in _CONVERSIONS and subject is not None and _is_called_by_module():
            self._window.settle(subject, forget=True)  # module.to(...): rows are converted as rows
            return func(*args, **kwargs)
        if name == "detach" and subject is not None and _is_called_by_parameter():  # it wants a DTensor back
            self._window.settle(subject)
            return DTensor.detach(subject).clone()
        target = kwargs.get("out", kwargs.get("tensor", args[0] if args else None))
        opened: dict[int, DTensor] = {}

        def swap(value: Any) -> Any:
            if isinstance(value, list | tuple) and type(value) in (list, tuple):
                return type(value)(swap(v) for v in value)
            shard = self._shard_of(value)
            if shard is None:
                return value
            if name in _SHAPE_ONLY:
                return torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
            whole = self._window.open(shard, overwrites=name in _OVERWRITES and value is target)
            opened[id(whole)] = shard
            return whole

        result = func(*(swap(a) for a in args), **{k: swap(v) for k, v in kwargs.items()})
        return opened.get(id(result), result)  # an in-place function returns the parameter, as it would unsharded


def _is_called_by_module() -> bool:
    """Whether the current torch function was called by torch's own `nn.Module` (two Python frames up)."""
    return sys._getframe(2).f_globals.get("__name__") == nn.Module.__module__


def _is_called_by_parameter() -> bool:
    """Whether the current torch function was called by `nn.Parameter.__new__` (two Python frames up)."""
    return sys._getframe(2).f_code is nn.Parameter.__new__.__code__


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


@contextmanager
def shared_rng(world: World) -> Iterator[None]:
    """Make all ranks draw what rank 0 would draw.

    On exit, a rank whose state differed from rank 0's gets its own state back. A rank that had the same state continues
    from where the draws ended, as an unsharded model would leave it.
    """
    own = {"cpu": torch.get_rng_state()}
    kind = world.device.type
    if kind != "cpu":
        own[kind] = torch.get_device_module(kind).get_rng_state()
    shared = world.share(own, "random states")
    _set_rng(shared)
    try:
        yield
    finally:
        _set_rng({kind: state for kind, state in own.items() if not torch.equal(state, shared[kind])})


def _set_rng(states: Mapping[str, Tensor]) -> None:
    for kind, state in states.items():
        if kind == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(kind).set_rng_state(state)


class Cutter:
    """Turns parameters into shards as they are registered on modules; owns the hook, the window and the mode."""

    def __init__(self, world: World, window_bytes: int = WINDOW_BYTES) -> None:
        self.world = world
        self.window = WholeWindow(world, window_bytes)
        self._made: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._twins = WeakIdKeyDictionary()
        self._mode = WholeOnTouch(self.window, self._twins)
        self._cuts = False
        self._reads_file = False
        self._is_paused = False
        self._thread = threading.get_ident()  # torch's hooks are global; other threads' modules are left alone

    @property
    def cuts_as_made(self) -> bool:
        """Whether parameters are cut as they are made: not where layers are shared first, for which a model must be there."""
        return self.world.partitions and self.world.tensor.num_ranks == 1

    @contextmanager
    def constructing(self) -> Iterator[None]:
        """Cut parameters when they are registered; show them whole to whatever touches them meanwhile."""
        with self._hooked(), shared_rng(self.world), self._mode:
            before, self._cuts = self._cuts, True
            try:
                yield
                with self.paused():
                    for model in self.models():
                        refuse_aliases(model, self.window.wholes())
            finally:
                self._cuts = before
                with self.paused():
                    self.window.close()
                    for old, shard in list(self._twins.items()):  # type: ignore[no-untyped-call]
                        replace(old, shard)
                    self._twins.clear()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Only remember which models are constructed; for when nothing is to be cut."""
        with self._hooked():
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Cut what a loader sets whole, and give sliced rows memory of their own; nothing is shown whole."""
        was_paused, self._mode.is_paused, self._reads_file = self._mode.is_paused, True, True
        try:
            with self._hooked():
                yield
        finally:
            self._mode.is_paused, self._reads_file = was_paused, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While active, nothing is cut, and nothing is shown whole."""
        before = self._is_paused, self._mode.is_paused
        self._is_paused = self._mode.is_paused = True
        try:
            yield
        finally:
            self._is_paused, self._mode.is_paused = before

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles = [
            register_module_parameter_registration_hook(self._on_registration),  # type: ignore[arg-type]
            register_module_module_registration_hook(self._on_module),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_module(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if not self._is_paused and threading.get_ident() == self._thread and submodule is not None:
            self._made.add(module)
            self._parts.add(submodule)

    def models(self) -> list[nn.Module]:
        """The outermost modules constructed here that hold shards, or, if nothing is cut, parameters."""
        roots = [module for module in self._made if module not in self._parts]
        cuts = self.cuts_as_made
        return [module for module in roots if any(is_shard(param) or not cuts for param in parameters_of(module))]

    def _on_registration(self, module: nn.Module, name: str, param: nn.Parameter | None) -> Tensor | None:
        if not self._is_paused and threading.get_ident() == self._thread:
            self._made.add(module)
        if (
            not self.world.partitions
            or not (self._cuts or self._reads_file)
            or param is None
            or is_lazy(param)
            or param.is_meta
            or self._is_paused
            or threading.get_ident() != self._thread
        ):
            return None
        with self.paused():
            if is_shard(param):
                return own(param, self.world) if self._reads_file else None
            if not is_plain(param) or is_of_users_class(param):  # which the engine will refuse
                return None
            twin = cast("DTensor | None", self._twins.get(param))  # type: ignore[no-untyped-call]
            if twin is not None:
                return twin
            shard = to_shard(param, self.world)
            if not self._reads_file:
                self._twins[param] = shard
                self.window.admit(shard, param.detach())
            return shard

    def cut_meta(self, model: nn.Module, keep_whole: set[str]) -> None:
        """Replace all of `model`'s meta parameters but `keep_whole` with meta shards; tied ones get the same shard."""
        with self.paused():
            shards: dict[int, DTensor] = {}
            kept = {id(model.get_parameter(name)) for name in keep_whole if is_parameter(model, name)}
            for module in model.modules():
                for name, param in list(module._parameters.items()):
                    if param is not None and is_plain(param) and param.is_meta and id(param) not in kept:
                        setattr(module, name, shards.setdefault(id(param), to_shard(param, self.world)))


def is_parameter(model: nn.Module, name: str) -> bool:
    """Whether `model` has a parameter of this name."""
    module_name, _, leaf = name.rpartition(".")
    return model.get_submodule(module_name)._parameters.get(leaf) is not None
