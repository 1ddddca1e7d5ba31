"""Partition a model while transformers loads it: each rank reads only its rows.

Two private methods of `PreTrainedModel` are wrapped. Before `_load_pretrained_model`, the model's parameters become meta
shards, so that transformers' own loader slices each tensor of a file to this rank's rows. In `_finalize_model_loading`,
missing weights are initialised, on whole tensors.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_zero.changes import Changes
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CollectiveError, PartitionError
from hf_zero.layout import RowLayout
from hf_zero.parameters import parameters_of
from hf_zero.sharding.axes.experts import check_experts
from hf_zero.sharding.axes.tensor_parallel import refuse_mixed_parts, remember_tensor_axis
from hf_zero.sharding.construct import Cutter, is_parameter
from hf_zero.sharding.sequence.checks import check
from hf_zero.sharding.whole_window import is_mapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]
Loaded = Callable[[nn.Module], None]


def checkpoint_shapes(
    state_dict: Mapping[str, Any] | None, checkpoint_files: Sequence[str] | None, load_config: Any
) -> dict[str, Shape]:
    """Every key of the checkpoint with its whole shape, from headers only; one rank reads them for all."""
    from safetensors import safe_open
    from transformers.modeling_utils import load_state_dict

    if state_dict is not None:
        return {key: tuple(value.shape) for key, value in state_dict.items() if isinstance(value, Tensor)}
    shapes: dict[str, Shape] = {}
    for file in checkpoint_files or ():
        if os.fspath(file).endswith(".safetensors"):
            with safe_open(file, framework="pt") as handle:
                shapes.update({key: tuple(handle.get_slice(key).get_shape()) for key in handle.keys()})  # noqa: SIM118
        else:
            meta = load_state_dict(file, map_location="meta", weights_only=load_config.weights_only)
            shapes.update({key: tuple(value.shape) for key, value in meta.items() if isinstance(value, Tensor)})
    return shapes


def keeps_rows(
    operations: Sequence[Any], sources: Sequence[Sequence[Shape]], targets: Sequence[Shape], n: int, cut: int = 0
) -> bool:
    """Whether converting each rank's rows of the sources gives that rank's rows of the targets.

    Two cases are safe: stacking tensors (`MergeModulelist(dim=0)`), where the first dim is cut if every rank owns one of them;
    and operations on other dims than the one that is cut, of sources that have the targets' rows. Anything else, and anything
    unknown, is not safe.

    Args:
        sources: for each source pattern the shapes of the tensors it matched.
        n: number of ranks.
        cut: the dim of the targets that is cut; a row is one index on it.
    """
    from transformers.core_model_loading import Chunk, Concatenate, Interleave, MergeModulelist, Transpose

    ndim = len(targets[0])
    if ndim == 0 or any(len(t) != ndim or (t[0], t[cut]) != (targets[0][0], targets[0][cut]) for t in targets):
        return False
    num_stacked, num_rows = targets[0][0], targets[0][cut]
    first, rest = operations[0], list(operations)
    if type(first) is MergeModulelist:
        if first.dim != 0 or any(len(shapes) != num_stacked for shapes in sources):
            return False
        stacked = [(num_stacked, *shape) for shapes in sources for shape in shapes]
        if cut == 0 and not RowLayout((num_stacked,), n).local_numel(n - 1):
            return False  # a rank has nothing to stack
        rest = rest[1:]
    else:
        stacked = [shape for shapes in sources for shape in shapes]
        if len(stacked) != len(sources):
            return False
    if any(len(shape) != ndim or shape[cut] != num_rows for shape in stacked):
        return False
    for op in rest:
        if type(op) in (Concatenate, Chunk, Interleave):
            dims = [op.dim]
        elif type(op) is Transpose and not op.check_dims:  # check_dims compares local rows with the whole shape
            dims = [op.dim0, op.dim1]
        else:
            return False
        if any(dim % ndim == cut for dim in dims):
            return False
    return True


def names_to_read_whole(
    model: PreTrainedModel, shapes: Mapping[str, Shape], weight_mapping: Sequence[Any], world: World
) -> set[str]:
    """Parameters of `model` (on meta) that transformers' loader must not slice while it reads.

    These are parameters that stay whole (`DtensorShardOperation` slices every DTensor), targets whose checkpoint shape
    differs (so that the size test sees whole shapes, alike on all ranks), and all targets of conversions that mix rows
    (`keeps_rows`). Keys are renamed as in `convert_and_load_state_dict_in_model`, but with copies of the transforms,
    because matching leaves marks on them.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = deepcopy(list(weight_mapping or ()))
    renamings = [t for t in mapping if isinstance(t, WeightRenaming)]
    converters = [t for t in mapping if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    prefix = model.base_model_prefix
    whole = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        cut = world.cut_of(param)
        mixes_rows = cut.tensor is not None and cut.tensor.dim == 0 and cut.tensor.num_groups > 1
        if cut.rows.num_ranks == 1 or mixes_rows:
            whole.add(name)
    sources: dict[str, dict[str, list[Shape]]] = {}
    converter_of: dict[str, Any] = {}
    for key in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if target not in state and key in state:
            target, pattern = rename_source_key(key, [], [], prefix, state)
        if target not in state:
            continue
        if pattern is not None:
            converter_of.setdefault(target, by_pattern[pattern])
            sources.setdefault(target, {}).setdefault(pattern, []).append(shapes[key])
        elif shapes[key] != tuple(state[target].shape):
            whole.add(target)
    for target, by_source in sources.items():
        converter = converter_of[target]
        names = _targets_of(converter, target, state)
        targets = [tuple(state[name].shape) for name in names]
        complete = len(by_source) == len(converter.source_patterns)
        cuts = {world.cut_of(state[name]).rows.dim for name in names}
        if (
            not complete
            or len(cuts) > 1
            or any(_has_scattered_rows(state[name], world) for name in names)
            or not keeps_rows(converter.operations, list(by_source.values()), targets, world.num_shards, min(cuts))
        ):
            whole.update(names)
    return whole


def _has_scattered_rows(param: Tensor, world: World) -> bool:
    """Whether the tensor axis cuts the rows of a parameter so that a rank's are not one range of the whole's, as experts' are.

    Where ranks do not divide the rows, torch and transformers count ranges of them in other ways.
    """
    tensor = world.cut_of(param).tensor
    if tensor is None or tensor.dim != 0:
        return False
    return tensor.num_groups > 1 or tensor.shape[0] % (tensor.num_ranks * world.num_shards) != 0


def _targets_of(converter: Any, first_target: str, state: Mapping[str, Tensor]) -> list[str]:
    """All names that a converter writes, given the name of its first; `*` stands for an index."""
    first = converter.target_patterns[0]
    names = {first_target}
    for pattern in converter.target_patterns:
        literal = first_target.replace(first, pattern) if first in first_target else first_target
        matches = re.compile(re.escape(literal).replace(r"\*", r"\d+"))
        names.update(name for name in state if matches.fullmatch(name))
    return sorted(names)


class LoadSeam:
    """Puts a `Cutter` around `_load_pretrained_model` and `_finalize_model_loading`; `close()` removes it again.

    Args:
        world: the ranks.
        on_loaded: called with every model that has been partitioned while it was loaded.
        open_cutter: the cutter of an enclosing `Init`, whose hook and mode are already active.
    """

    def __init__(self, world: World, on_loaded: Loaded, open_cutter: Cutter | None = None) -> None:
        from transformers.modeling_utils import PreTrainedModel

        self._world = world
        self._on_loaded = on_loaded
        self.is_paused = False
        self.left_whole: weakref.WeakSet[nn.Module] | None = None  # collects the models loaded meanwhile
        self._open_cutter = open_cutter
        self._loaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._load_of_library = PreTrainedModel._load_pretrained_model
        self._finalize_of_library = PreTrainedModel._finalize_model_loading
        self._changes = Changes()
        self._changes.replace(PreTrainedModel, "_load_pretrained_model", staticmethod(self._load))
        self._changes.replace(PreTrainedModel, "_finalize_model_loading", staticmethod(self._finalize))

    def close(self) -> None:
        """Put the original methods back."""
        self._changes.undo()

    def comes_together(self, what: str) -> bool:
        """Whether all ranks make a model, and may cut it; one that makes it alone, the others gone on, has it whole and plain.

        See [Note: alone]. Inside `Init`, all have to make it.
        """
        serving = self._world.serving
        may_be_alone = self._open_cutter is None and self._world.partitions and serving.can_be_alone
        if not may_be_alone or serving.all_come(what, ""):
            return True
        logger.warning(
            "%s: rank %d does so alone, the others have gone on; the model stays whole.", what, self._world.rank
        )
        return False

    def _placed(self, load_config: Any) -> Any:
        """The load config with everything on this rank's device; refuses what cannot be partitioned."""
        device = self._world.device
        places = set((load_config.device_map or {}).values())
        is_here = len(places) < 2 and all(_is_on(device, place) for place in places)
        with self._world.together("cannot partition this model while loading", PartitionError):
            if load_config.hf_quantizer is not None:
                raise PartitionError(
                    "quantised weights cannot be cut while they are loaded: load the model outside of zero.Init; the Trainer, "
                    "ZeroAccelerator.prepare or shard_model partitions it then"
                )
            if load_config.device_mesh is not None and self._world.tensor.num_ranks == 1:
                raise PartitionError(
                    "a distributed_config shards the model already: give its sizes in the zero configuration (tp_size, ep_size)"
                )
            if not is_here:
                raise PartitionError(
                    f"device_map={load_config.device_map} does not put the whole model on {device}; leave it out"
                )
        return dataclasses.replace(load_config, device_map={"": device})

    def _load(
        self,
        model: PreTrainedModel,
        state_dict: dict[str, Any] | None,
        checkpoint_files: list[str] | None,
        load_config: Any,
        expected_keys: list[str] | None = None,
    ) -> Any:
        load = self._load_of_library
        if self.left_whole is not None:
            self.left_whole.add(model)
        is_ours = not self.is_paused and expected_keys is None and any(p.is_meta for p in parameters_of(model))
        if load_config.hf_quantizer is not None and self._open_cutter is None:
            is_ours = False  # whole, until `shard_model` cuts what can be cut
        if is_ours and not self.comes_together(f"loading {load_config.pretrained_model_name_or_path}"):
            is_ours = False
        if is_ours:
            if self._world.sequence.num_ranks > 1:
                check(model, self._world)
            check_experts(model, self._world)
            self._loaded.add(model)
        if not is_ours or not self._world.partitions:
            return load(
                model, state_dict, checkpoint_files, load_config, expected_keys
            )  # an adapter, a model that stays whole
        cutter = self._open_cutter or Cutter(self._world)
        with self._world.together("cannot share this model's layers", PartitionError):
            refuse_mixed_parts(model, load_config.weight_mapping, self._world)
        remember_tensor_axis(model, self._world)
        load_config = self._placed(load_config)
        shapes = self._world.from_first(
            lambda: checkpoint_shapes(state_dict, checkpoint_files, load_config),
            "reading the files' headers",
            PartitionError,
        )
        whole = names_to_read_whole(model, shapes, load_config.weight_mapping, self._world)
        for param in parameters_of(model):  # transformers makes them anew, so what a constructor froze is trained then
            param.requires_grad_(param.is_floating_point())
        cutter.cut_meta(model, keep_whole=whole)
        with ExitStack() as stack:
            what = f"loading {load_config.pretrained_model_name_or_path}"
            stack.enter_context(self._world.together(what, PartitionError))
            # The loader's threads read ahead: if tensors are read whole, that could be the whole model at once.
            stack.enter_context(_environ("HF_DEACTIVATE_ASYNC_LOAD", "1" if _has_rows(model, whole) else None))
            stack.enter_context(cutter.reading())
            stack.enter_context(_quiet(self._world.rank != 0))
            result = load(model, state_dict, checkpoint_files, load_config, expected_keys)
            problem = "; ".join(f"{k}: {v.splitlines()[-1]}" for k, v in result[0].conversion_errors.items())
            if problem:
                raise PartitionError(problem)
        with cutter.paused():
            _own_buffers(model)
            for module in model.modules():
                if isinstance(module, nn.RNNBase):  # its __setattr__ keeps what was set, not what the hook made of it
                    module._init_flat_weights()
        cutter.cut_meta(model, keep_whole=set())  # missing and mismatched parameters are initialised as shards
        return result

    def _finalize(self, model: PreTrainedModel, load_config: Any, loading_info: Any) -> Any:
        finalize = self._finalize_of_library
        if model not in self._loaded:
            return finalize(model, load_config, loading_info)
        self._loaded.discard(model)
        if not self._world.partitions:
            result = finalize(model, load_config, loading_info)
            self._on_loaded(model)
            return result
        cutter = self._open_cutter or Cutter(self._world)
        placed = self._placed(load_config)
        # Draw missing weights where the unsharded load would: on the CPU unless the caller named a device.
        cutter.window.home = torch.device("cpu") if load_config.device_map is None else placed.device_map[""]
        with ExitStack() as stack:
            if self._open_cutter is None or not cutter.cuts_as_made:
                stack.enter_context(cutter.constructing())
            try:
                result, error = finalize(model, placed, loading_info), None
            except CollectiveError:
                raise
            except Exception as raised:
                result, error = None, raised
            reports = self._world.everyone.agree([int(error is not None)], "the end of loading")
            failed = [rank for rank, (has_failed,) in enumerate(reports) if has_failed]
            if error is not None:
                raise error  # as transformers has raised it; ranks that found nothing wrong must not go on alone
            if failed:
                raise PartitionError(
                    f"the model could not be loaded on ranks {failed}: see the error there, and give all ranks the same files"
                )
        with cutter.paused():
            self._on_loaded(model)
        return result


def _is_on(device: torch.device, place: Any) -> bool:
    """Whether a place of a `device_map` ("auto" may have made it) is a rank's device, which it may name without a number."""
    if place == "disk":
        return False
    found = torch.device(place)
    is_any = device.type == "cpu" or found.index is None
    return found.type == device.type and (is_any or found.index == device.index)


def _has_rows(model: nn.Module, names: set[str]) -> bool:
    return any(math.prod(model.get_parameter(n).shape) > 1 for n in names if is_parameter(model, n))


def _own_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and not buffer.is_meta and is_mapped(buffer):
                copy = buffer.clone()
                vars(copy).update(vars(buffer))  # _is_hf_initialized
                module._buffers[name] = copy


@contextmanager
def _quiet(is_quiet: bool) -> Iterator[None]:
    """While active, show no progress bar on this rank, if `is_quiet`."""
    from transformers.utils import logging as bars

    was_shown = bars.is_progress_bar_enabled()
    if is_quiet and was_shown:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        if is_quiet and was_shown:
            bars.enable_progress_bar()


@contextmanager
def _environ(name: str, value: str | None) -> Iterator[None]:
    if value is None:
        yield
        return
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
