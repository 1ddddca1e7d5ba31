"""Samples of torch's own operators, run on tensors at rest in many ways, beside the same on whole tensors."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import hf_zero as zero
from hf_zero.engine.parameters import partitioned_tensor
from hf_zero.engine.parameters.partitioned_tensor import PartitionedTensor
from hf_zero.engine.ranks.world import World

_BFLOAT16 = {"rtol": 1.6e-2, "atol": 5e-2}  # torch's kernels round otherwise where vectors end, so on rows
_SAMPLES = 4  # of each operator, those that torch gives first
# What they give depends on memory that they do not fill: only that they run, and the shape, is compared.
_NOT_FILLED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}


@dataclass(frozen=True)
class Way:
    """How an operator meets tensors at rest.

    Attributes:
        kind: what its operands are: parameters, gradients, views of parameters.
        in_graph: whether they require gradients.
        no_grad: whether the operator runs under `torch.no_grad()`.
        in_place: whether its in-place form is taken.
        out: what `out=` gets, of a kind; None where it is not given.
        puts: which operands are at rest, the others plain: all, the first, or the others.
        writes_result: whether what it gives is changed in place afterwards: a view changes what it is a view of.
        in_backward: whether a backward runs meanwhile.
        in_inference: whether the operator runs under `torch.inference_mode()`, where plain operands were made, too.
        dtype: of the samples.
    """

    kind: str = "parameter"
    in_graph: bool = False
    no_grad: bool = False
    in_place: bool = False
    out: str | None = None
    puts: str = "all"
    writes_result: bool = False
    in_backward: bool = False
    in_inference: bool = False
    dtype: torch.dtype = torch.float32


WAYS = {
    "parameters": Way(),
    "gradients": Way("gradient"),
    "views": Way("view"),
    "columns": Way("columns"),
    "graph": Way(in_graph=True),
    "graph, views": Way("view", in_graph=True),
    "graph, the first": Way(in_graph=True, puts="first"),
    "graph, the others": Way(in_graph=True, puts="others"),
    "no_grad": Way(in_graph=True, no_grad=True),
    "the first": Way("gradient", puts="first"),
    "the others": Way("gradient", puts="others"),
    "in place": Way(in_place=True),
    "in place, gradients": Way("gradient", in_place=True),
    "in place, views": Way("view", in_place=True),
    "in place, columns": Way("columns", in_place=True),
    "in place, the first": Way(in_graph=True, no_grad=True, in_place=True, puts="first"),
    "in place, the others": Way(in_place=True, puts="others"),
    "out": Way(out="parameter"),
    "out, a view": Way(out="columns"),
    "out, plain": Way(out="plain"),
    "out alone": Way(out="gradient", puts="none"),
    "result written": Way(writes_result=True),
    "result of gradients written": Way("gradient", writes_result=True),
    "in a backward": Way("gradient", in_backward=True),
    "in a backward, the first": Way("gradient", in_backward=True, puts="first"),
    "inference": Way(in_graph=True, in_inference=True),
    "inference, views": Way("view", in_inference=True),
    "inference, the first": Way(in_inference=True, puts="first"),
    "inference, the others": Way("gradient", in_inference=True, puts="others"),
    "inference, in place": Way(in_inference=True, in_place=True),
    "inference, in place, columns": Way("columns", in_inference=True, in_place=True),
    "inference, in place, the others": Way(in_inference=True, in_place=True, puts="others"),
    "inference, out, plain": Way(in_inference=True, out="plain"),
    "inference, result written": Way(in_inference=True, writes_result=True),
    "bfloat16": Way(dtype=torch.bfloat16),
    "bfloat16, graph": Way(in_graph=True, dtype=torch.bfloat16),
    "bfloat16, in place": Way(in_place=True, dtype=torch.bfloat16),
    "float64, in place": Way("gradient", in_place=True, dtype=torch.float64),
}


@dataclass
class Survey:
    """What came of samples.

    Attributes:
        counts: how many, by way and outcome.
        reached: the operators of aten that met a tensor at rest.
        refused: what ended in an error of ours.
        failures: what is not as it should be.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    reached: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    failures: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        by_outcome: Counter[str] = Counter()
        for (_, outcome), number in self.counts.items():
            by_outcome[outcome] += number
        return f"{len(self.reached)} operators of aten; {dict(by_outcome)}"


def operators() -> list[Any]:
    """Torch's functions with samples."""
    from torch.testing._internal import common_methods_invocations as torch_cases  # seconds, and needs `expecttest`

    lists = ("unary", "binary", "pointwise", "reduce", "other")
    foreach = [op for name in lists for op in getattr(torch_cases, f"foreach_{name}_op_db")]
    return [op for op in torch_cases.op_db if torch.float32 in op.dtypes and not op.name.startswith("_refs")] + foreach


def survey(part: int, parts: int, world: World, ways: dict[str, Way] = WAYS) -> Survey:
    """Run a part of the operators in all ways; called by all ranks together."""
    result = Survey()
    run = partitioned_tensor.run

    def recorded(func: Any, args: Any, kwargs: Any) -> Any:
        result.reached.add(str(func))
        return run(func, args, kwargs)

    with mock.patch.object(partitioned_tensor, "run", recorded), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in operators()[part::parts]:
            samples = {dtype: _a_few_of(op, dtype) for dtype in {way.dtype for way in ways.values()}}
            for name, way in ways.items():
                for sample in samples[way.dtype]:
                    outcome, what = _outcome(op, sample, world, way)
                    result.counts[name, outcome] += 1
                    case = f"{op.name}/{op.variant_test_name} ({name})"
                    if outcome == "refused":
                        result.refused.add(case)
                    if outcome == "failed":
                        result.failures.add(f"{case}: {what}")
    return result


def _a_few_of(op: Any, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(5)
    if dtype not in op.dtypes:
        return []
    try:
        samples: Iterator[Any] = op.sample_inputs("cpu", dtype)
        return [sample for _, sample in zip(range(_SAMPLES), samples, strict=False)]
    except Exception:
        return []  # torch's own samples need what is not there, such as SciPy


def _outcome(op: Any, sample: Any, world: World, way: Way) -> tuple[str, str]:
    """What came of one sample, and what was wrong."""
    if not _has_form(op, sample, way):
        return "no such operator", ""
    try:
        expected = _run(op, sample, way, lambda tensor, kind: tensor)
    except Exception as plain_error:
        try:
            _run(op, sample, way, lambda tensor, kind: _at_rest(tensor, world, kind))
        except Exception:
            return "raises as one process does", ""
        return "failed", f"gives something where one process raises {type(plain_error).__name__}: {plain_error}"
    try:
        found = _run(op, sample, way, lambda tensor, kind: _at_rest(tensor, world, kind))
        _compare(op, found, expected)
    except zero.UsageError as error:
        return ("refused", "") if "changes what memory" in str(error) else ("failed", str(error))
    except Exception as error:  # a comparison's as well
        return "failed", f"{type(error).__name__}: {error}"
    return "equal, with gradients" if expected.gradients else "equal", ""


def _has_form(op: Any, sample: Any, way: Way) -> bool:
    if (
        way.in_graph
        and not (way.no_grad or way.in_inference)
        and (op.name, op.variant_test_name) == ("sparse.mm", "reduce")
    ):
        return False  # its backward with "amax" ends a process in which any subclass of `Tensor` sees operators
    if way.in_place and op.inplace_variant is None:
        return False
    if way.out and (not op.supports_out or op.name.startswith("_foreach")):
        return False
    if way.out and op.name == "linalg.matrix_rank":
        return False  # writes nothing into `out` where an operand is of any subclass of `Tensor`
    return way.puts not in ("first", "others") or sum(map(_is_put, pytree.tree_leaves(_operands(sample)))) > 1


@dataclass
class _Run:
    """What an operator has given, what its operands hold afterwards, and gradients."""

    given: Any
    operands: list[Tensor]
    gradients: list[Any]


def _is_put(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided


def _operands(sample: Any) -> tuple[Any, Any, Any]:
    return sample.input, sample.args, sample.kwargs


def _run(op: Any, sample: Any, way: Way, rest: Callable[[Tensor, str], Tensor]) -> _Run:
    """Run an operator once; `rest` puts a whole tensor at rest as a kind."""
    tensors: list[Tensor] = []

    def put(value: Any) -> Any:
        if not _is_put(value):
            return value.detach().clone() if isinstance(value, Tensor) else value
        plain = value.detach().clone(memory_format=torch.contiguous_format)
        is_put = {"all": True, "none": False, "first": not tensors, "others": bool(tensors)}[way.puts]
        if is_put:
            plain = rest(_turned(plain, way.kind), way.kind)
        elif way.in_inference:
            with torch.inference_mode():
                plain = plain.clone()
        made = plain if plain.is_inference() else plain.requires_grad_(way.in_graph)
        tensors.append(made)
        return _shown(made, way.kind) if is_put else made

    subject, args, kwargs = pytree.tree_map(put, _operands(sample))
    func = op.inplace_variant if way.in_place else op.op
    if way.out:
        torch.manual_seed(9)
        copies = pytree.tree_map_only(Tensor, torch.clone, _operands(sample))
        likely = func(copies[0], *copies[1], **copies[2])
        blank = pytree.tree_map_only(
            Tensor, lambda t: torch.full_like(t.detach(), 7, memory_format=torch.contiguous_format), likely
        )
        outs = pytree.tree_map_only(
            Tensor, lambda t: rest(_turned(t, way.out), way.out) if _is_put(t) and way.out != "plain" else t, blank
        )
        tensors += pytree.tree_leaves(outs)
        kwargs = {
            **kwargs,
            "out": pytree.tree_map_only(Tensor, lambda t: _shown(t, way.out) if _is_put(t) else t, outs),
        }
    torch.manual_seed(9)
    given: list[Any] = []

    def call() -> None:
        is_recorded = not (way.no_grad or way.in_backward or way.in_inference or way.out is not None)
        with torch.inference_mode(way.in_inference), torch.set_grad_enabled(is_recorded):
            given.append(func(subject, *args, **kwargs))
            if way.writes_result:
                with torch.no_grad():
                    for each in pytree.tree_leaves(given[0]):
                        if _is_put(each):
                            each.mul_(2)

    _InBackward.call(call) if way.in_backward else call()
    for tensor in pytree.tree_leaves(given[0]):
        assert not isinstance(tensor, DTensor) or isinstance(tensor, PartitionedTensor)
    can_derive = way.in_graph and not (way.no_grad or way.in_inference)
    gradients = _gradients(given[0], tensors) if can_derive else []
    return _Run(_whole(given[0]), _whole(tensors), gradients)


class _InBackward(torch.autograd.Function):
    """Calls a function while a backward runs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, work: Callable[[], None]) -> Tensor:
        ctx.work = work
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.work()
        return gradient, None

    @classmethod
    def call(cls, work: Callable[[], None]) -> None:
        cls.apply(torch.ones((), requires_grad=True), work).backward()


def _turned(whole: Tensor, kind: str) -> Tensor:
    """What `_shown` shows as `whole`."""
    return whole.mT.contiguous() if kind == "columns" and whole.ndim > 1 else whole


def _at_rest(whole: Tensor, world: World, kind: str) -> Tensor:
    cut = world.cut_of(whole)
    rest = PartitionedTensor.over(cut.of(whole).clone(), cut, world)
    if kind == "gradient":
        param = rest.as_parameter(requires_grad=True)
        param.grad = rest.like(rest.rows.clone())
        return param.grad
    return rest.as_parameter(requires_grad=False)


def _shown(rest: Tensor, kind: str) -> Tensor:
    """The tensor that an operator gets: of a parameter, or a view of it."""
    if kind == "view":
        return rest.reshape(1, *rest.shape)[0]
    return rest.mT if kind == "columns" and rest.ndim > 1 else rest


def _whole(value: Any) -> Any:
    def one(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

    return pytree.tree_map(one, value)


def _gradients(outputs: Any, inputs: list[Tensor]) -> list[Any]:
    given = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    total = [t.abs().sum() for t in given]
    return [_whole(each) for each in torch.autograd.grad(total, inputs, allow_unused=True)] if given else []


def _compare(op: Any, found: _Run, expected: _Run) -> None:
    if op.name in _NOT_FILLED:
        for here, there in zip(pytree.tree_leaves(found.given), pytree.tree_leaves(expected.given), strict=True):
            assert (here.shape, here.dtype) == (there.shape, there.dtype)
        return
    for what in ("operands", "given", "gradients"):
        pairs = [pytree.tree_leaves(getattr(run, what)) for run in (found, expected)]
        for here, there in zip(*pairs, strict=True):
            if isinstance(there, Tensor):
                assert isinstance(here, Tensor), f"{what}: {type(here)}"
                near = _BFLOAT16 if there.dtype is torch.bfloat16 else {}
                torch.testing.assert_close(here, there, equal_nan=True, msg=lambda text: f"{what}: {text}", **near)
            else:
                assert here == there or here != here, f"{what}: {here} {there}"
