"""The private names of torch that hf_zero stands on, in one place; tests/test_seams.py fails when one of them moves."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._library import simple_registry
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _foreach_utils

from hf_zero.errors import PartitionError
from hf_zero.layout import Cut, TensorCut, row_major

_DISPATCHES_BY_CLASS = "2.12"
_with_a_rule: dict[type, Callable[..., Any]] = {}


def tensor_cut(shape: tuple[int, ...], placement: Placement, num_ranks: int) -> TensorCut | None:
    """How a placement of the tensor axis cuts a tensor; None where every rank has the whole.

    Raises:
        PartitionError: it is one that nobody here knows.
    """
    if isinstance(placement, _StridedShard):
        return TensorCut(shape, placement.dim % len(shape), num_ranks, int(placement.split_factor))
    if isinstance(placement, Shard):
        return TensorCut(shape, placement.dim % len(shape), num_ranks)
    if not placement.is_replicate():
        raise PartitionError(
            f"a parameter of shape {shape} is {placement} over the tensor axis, which cannot be partitioned"
        )
    return None


def dim_of(placement: Placement) -> int:
    """The dim that a placement cuts."""
    return int(cast(Shard, placement).dim)


def wrap_local(local: Tensor, cut: Cut, mesh: DeviceMesh) -> DTensor:
    """A `DTensor` of `cut.shape` over this rank's elements `local`, without communication."""
    placements: list[Placement] = [Shard(cut.rows.dim) if cut.rows.num_ranks > 1 else Replicate()]
    if mesh.ndim == 2:
        tensor = cut.tensor
        if tensor is None:
            placements.append(Replicate())
        elif tensor.num_groups > 1:
            placements.append(_StridedShard(tensor.dim, split_factor=tensor.num_groups))
        else:
            placements.append(Shard(tensor.dim))
        if (
            tensor is not None and not tensor.dim and cut.rows.num_ranks > 1
        ):  # rows of what the tensor axis has cut by rows
            placements[0] = _StridedShard(0, split_factor=tensor.num_ranks * tensor.num_groups)
    shape, stride = torch.Size(cut.shape), row_major(cut.shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def wrap_partial(whole: Tensor, parameter: DTensor, averages: bool) -> DTensor:
    """A `DTensor` of the shape of `parameter`, whose value is the average (or sum) of all ranks' `whole`, not computed yet."""
    kind = "avg" if averages else "sum"
    mesh, along = parameter.device_mesh, parameter.placements[1:]
    placements = [Partial(kind), *along]
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(whole, mesh, placements, run_check=False, shape=shape, stride=stride)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor` (the tensor itself where it is plain), without autograd."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.detach()


def locals_in(tensors: Iterable[Tensor]) -> list[Tensor]:
    """`local_of` each tensor."""
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors]


def locals_of(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """The same mapping, with this rank's parts in place of `DTensor`s."""
    return {key: value._local_tensor if isinstance(value, DTensor) else value for key, value in values.items()}


def are_locals_of(values: Mapping[Any, Any], others: Mapping[Any, Any]) -> bool:
    """Whether the values are those of `locals_of(others)`, the same objects."""
    if len(values) != len(others):
        return False
    for key, other in others.items():
        if values.get(key) is not (other._local_tensor if isinstance(other, DTensor) else other):
            return False
    return True


def complete(tensor: Tensor) -> Tensor:
    """What a functional collective gives, as an ordinary tensor, once its exchange is over; any other as it is."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def dispatch_by_class(kind: type[DTensor]) -> type[DTensor]:
    """Let operators on a subclass of `DTensor` come to its `__torch_dispatch__`; a decorator.

    They do since torch 2.12. In 2.11 torch's C++ takes them for a `DTensor`'s, unless a rule is registered for the operator and
    the exact type: here all operators have one.
    """
    if torch.__version__ < _DISPATCHES_BY_CLASS:
        if not _with_a_rule:
            holder: Any = simple_registry.GenericTorchDispatchRuleHolder
            plainly = holder.find
            holder.find = lambda self, found: _with_a_rule.get(found) or plainly(self, found)
        _with_a_rule[kind] = lambda cls, *call: cls.__torch_dispatch__(*call)
    return kind


@contextlib.contextmanager
def as_without_inference_mode() -> Iterator[None]:
    """Within a `__torch_dispatch__` that inference mode has called: operators run as in a program's own line without it.

    In that mode operators come there that are made of others. Run there again as they are, their parts would pass by what torch
    does for conjugate and negated views. They pass by autocast: whether it is on cannot be asked there.
    """
    with torch.inference_mode(False), torch.no_grad():
        excluded = torch._C._dispatch_tls_local_exclude_set()
        for name in ("Conjugate", "Negative", "ZeroTensor"):
            excluded = excluded.remove(name)
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
            yield


def step_in_lists(kind: type[Tensor]) -> None:
    """Let torch's clipping and optimizers take tensors of this type in lists (`_foreach_`), as `DTensor` lets them.

    They ask for the exact type, and otherwise go tensor by tensor: an exchange for the norm of each.
    """
    if kind not in _foreach_utils._foreach_supported_types:
        _foreach_utils._foreach_supported_types.append(kind)


def let_compiled_code_take(*kinds: type[Tensor]) -> None:
    """Let code that AOT autograd has compiled take tensors of these types, of which operators know nothing.

    Its first run is watched by a mode (`_AnalyzeCustomOpInputOutputMode`) that lets exact types pass only; since torch 2.15
    it lets all pass that have no `__torch_dispatch__` of their own.
    """
    importlib.import_module("torch._dynamo")  # before the other, which needs it made
    runtime_wrappers: Any = importlib.import_module("torch._functorch._aot_autograd.runtime_wrappers")
    known = getattr(runtime_wrappers, "HANDLED_TYPES", None)
    if known is not None:
        runtime_wrappers.HANDLED_TYPES = (*known, *(kind for kind in kinds if kind not in known))


def outside_compiled_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, where `torch.compile` looks away, if it has been imported: it would be."""
    return _disabled(function) if "torch._dynamo" in sys.modules else function


@functools.cache
def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    return cast(Callable[..., Any], torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def let_compilers_pass_by(*kinds: type[Tensor]) -> None:
    """Let `torch.compile` run what takes tensors of these types as it is written: it would take them for `DTensor`s."""
    importlib.import_module("torch._dynamo").config.nontraceable_tensor_subclasses.update(kinds)


def set_local(parameter: nn.Parameter, local: Tensor) -> None:
    """Let the rows of `parameter`, and of its aliases, live in the memory of `local` (same shape and dtype)."""
    if not isinstance(parameter, DTensor):
        parameter.data = local
    elif (rows := parameter._local_tensor).is_inference() or rows.device != local.device:
        parameter._local_tensor = local
    else:
        rows.set_(local)  # type: ignore[call-overload]


def storage_alias(storage: torch.UntypedStorage, start_bytes: int, num_bytes: int) -> torch.UntypedStorage:
    """A storage of its own over a range of bytes of `storage`, which it keeps alive. Tensors made on it have storage offset 0
    (so that `copy.deepcopy` of a `DTensor` works) and a version counter of their own."""
    return cast(torch.UntypedStorage, storage[start_bytes : start_bytes + num_bytes])


def tensor_on(storage: torch.UntypedStorage, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of `shape` over the memory of `storage` from `offset_bytes` on; a new version counter."""
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset_bytes // dtype.itemsize, shape, row_major(shape))


def can_be_fused_on(device: torch.device) -> bool:
    """Whether torch has fused optimizers for a device."""
    return device.type in map(_real_name, _foreach_utils._get_fused_kernels_supported_devices())


def _real_name(device_type: str) -> str:
    return torch._C._get_privateuse1_backend_name() if device_type == "privateuseone" else device_type


@contextlib.contextmanager
def fake_tensors() -> Iterator[Callable[[Tensor], Tensor]]:
    """While active, tensors have shapes but no values; gives what makes such tensors of others, as if on the CPU.

    On the meta device, torch would choose its slow attention, which keeps all scores.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):

        def convert(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device="cpu").requires_grad_(tensor.requires_grad)

        yield convert


def push_saved_tensor_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Let autograd save tensors by `pack` from now on: `torch.autograd.graph.saved_tensors_hooks` without a block."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def top_saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The hooks that save tensors now, if there are any."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if top is None else (top[0], top[1])


def pop_saved_tensor_hooks() -> None:
    """Take the hooks on top away."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


@functools.cache
@torch.inference_mode(False)  # it is asked for again in other modes
def _no_memory(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


def counter_of(tensor: Tensor) -> Tensor:
    """A tensor without memory whose version counter is that of `tensor`."""
    counter = tensor.detach()
    torch._C.TensorBase.data.__set__(counter, _no_memory(tensor.device))  # type: ignore[attr-defined]
    return counter


def nums_of_references(tensors: list[Tensor]) -> list[int]:
    """How many references Python has to each tensor of a list, that of the list included.

    Newer releases of torch add one of their own as long as C++ holds it, too: a view of it, which an output may be.
    """
    counts = [count - 1 for count in map(sys.getrefcount, tensors)]
    if _counts_itself():
        uses = [tensor._use_count() for tensor in tensors]  # type: ignore[attr-defined, unused-ignore]
        counts = [count - (num_uses > 1) for count, num_uses in zip(counts, uses, strict=True)]
    return counts


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)` outside of transforms of `torch.func`, of which it looks at every argument."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


@functools.cache
@torch.inference_mode(False)  # under which views have no base, and the answer is kept
def _counts_itself() -> bool:
    tensor = torch.empty(1, device="cpu", requires_grad=True).clone()
    before = sys.getrefcount(tensor)
    view = tensor[:1]
    return sys.getrefcount(tensor) > before and view.numel() == 1


def num_holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and storages hold the memory of `storage`, in Python and in C++."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Whether other tensors than this one hold its memory."""
    return num_holders(tensor.untyped_storage()) > 2  # it, and Python's object of the storage


def gradient_node(leaf: Tensor) -> Any:
    """The node of the graph that adds to `.grad` of a leaf."""
    with torch.inference_mode(False):
        return torch.autograd.graph.get_gradient_edge(leaf).node


def will_run(node: Any) -> bool:
    """Whether the running backward reaches `node`.

    Raises:
        RuntimeError: the backward is one of `torch.autograd.grad`, and the node belongs to a leaf asked for.
    """
    return bool(torch._C._will_engine_execute_node(node))


def compiles_frames() -> bool:
    """Whether this thread runs what `torch.compile` was given: every frame that begins then comes to it."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def call_of(module: nn.Module) -> Callable[..., Any] | None:
    """What a call of a module runs instead of its hooks and `forward`: what `module.compile()` has put there, if anything.

    Copies and pickles of the module leave it out.
    """
    return cast(Callable[..., Any] | None, vars(module).get("_compiled_call_impl"))


def call_instead(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let a call of a module run `call` instead of its hooks and `forward`; None: them."""
    if call is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        vars(module)["_compiled_call_impl"] = call


def call_plainly(module: nn.Module, compiled: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Run a module's hooks and `forward`, whatever `call_instead` has put there; compiled, if they have been."""
    return (compiled or module._call_impl)(*args, **kwargs)


def is_profiling() -> bool:
    """Whether torch's profiler records now."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def in_backward() -> bool:
    """Whether this thread runs a backward pass just now."""
    return torch._C._current_graph_task_id() != -1


def in_backward_of_an_operator() -> bool:
    """Whether this thread runs the backward of one operator just now, or its hooks: not what comes at the end of a pass."""
    return torch._C._current_autograd_node() is not None


def graph_task() -> int:
    """The number of the backward pass that this thread runs just now; one nested in another has its own."""
    return torch._C._current_graph_task_id()


def in_function_transform() -> bool:
    """Whether `torch.func.grad`, `vmap`, `jvp` or another of them runs its function just now."""
    return bool(torch._C._are_functorch_transforms_active())


CALLERS_OF_BACKWARD = (torch.autograd, torch.autograd.graph)
"""The modules through which programs run a backward, each with its own name for the function `RUN_BACKWARD`."""
RUN_BACKWARD = "_engine_run_backward"


def backward_is_for_all(*args: Any, **kwargs: Any) -> bool:
    """Whether `RUN_BACKWARD`, called with these, gives gradients to all leaves that it reaches."""
    inputs = args[4] if len(args) > 4 else kwargs.get("inputs", ())
    return not inputs and bool(kwargs.get("accumulate_grad"))


def carry_into_backward(key: str, value: object) -> None:
    """Let every thread that works for a backward that this thread begins from now on find `value` under `key`."""
    if _loses_a_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


@functools.cache
def _loses_a_reference() -> bool:
    """Whether torch gives back a reference to what it has carried that it never took: 2.11 does."""
    carried = [object()] * 2
    before = sys.getrefcount(carried[0])
    for each in (carried[0], None):
        torch._C._stash_obj_in_tls("hf_zero.probe", each)
    loses = sys.getrefcount(carried[0]) < before
    if loses:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(carried[0]))
    return loses


def carried_by_backward(key: str) -> object:
    """What `carry_into_backward` has given to the backward that this thread works for; None if nothing."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


# Public since torch 2.15, where it is the same.
_queue_callback: Any = getattr(torch.autograd.graph, "queue_callback", None) or (
    torch.autograd.Variable._execution_engine.queue_callback
)


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward pass is complete; never, if it raises."""
    _queue_callback(callback)
