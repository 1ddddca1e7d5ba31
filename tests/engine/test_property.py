"""The engine against the unsharded model: random small models, random schedules, released memory filled with NaN.

A seed decides everything: the model, the configuration, the optimizer, the schedule, and every rank's data. Each rank
also runs the unsharded model on *all* ranks' data, and compares losses, gradients, weights, and what is at rest
afterwards. A failing seed is replayed by the line that its error names.
"""

import contextlib
import copy
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils.checkpoint import checkpoint

from hf_zero import GatheredParameters, UsageError, ZeroEngine, mark_dirty, shard_model
from tests.ranks import run_ranks

_VOCABULARY, _TOKENS = 11, (2, 3)
_EDITS = ("in place", "data", "foreach", "assign", "gathered", "mark_dirty")  # ways to change parameters by hand
# Ranks add the same numbers in another order than one process does. float32 is looser where Adam divides small ones.
_TOLERANCES = {"float64": (1e-9, 1e-11), "float32": (1e-4, 1e-5), "mixed": (1e-4, 1e-5), "bfloat16": (5e-2, 3e-1)}
_MADE_IN = {"float64": torch.float64, "float32": torch.float32, "mixed": torch.float64, "bfloat16": torch.float32}
_COMPUTE = {"mixed": torch.float32, "bfloat16": torch.bfloat16}


class _Broken(Exception):
    """What a schedule raises on purpose."""


class _Brief:
    """Shows only the fields that are not as usual."""

    def __repr__(self) -> str:
        shown = [f for f in fields(self) if f.default is MISSING or getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


# --- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Visit(_Brief):
    """One call of a block: which block, and what happens in it.

    `inner` is a checkpoint inside its forward: of all of it, of a part, or of two parts; `breaks` says when it raises.
    """

    block: int
    takes_branch: bool = False
    inner: str = ""
    is_reentrant: bool = False
    breaks: str = ""


@dataclass(frozen=True, repr=False)
class Segment(_Brief):
    """Calls in a row, in a checkpoint around them or not."""

    visits: tuple[Visit, ...]
    checkpoint: str = ""


@dataclass(frozen=True)
class Shape:
    """What a model is made of."""

    width: int
    hidden: tuple[int, ...]  # one block each
    is_tied: bool
    has_root_parameters: bool
    dropout: float
    has_unused_module: bool
    reads_elsewhere: bool  # parameters of modules that are not being called
    frozen: frozenset[int]  # positions of parameters


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise _Broken("backward")


class Block(nn.Module):
    """Odd sizes, a scalar, one dimension, fewer rows than ranks, a parameter never used, a branch."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=hidden % 2 == 0)
        self.down = nn.Linear(hidden, width)
        self.side = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.randn(()))
        self.shift = nn.Parameter(torch.randn(width))
        self.row = nn.Parameter(torch.randn(1, width))
        self.never = nn.Parameter(torch.randn(3, 2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, visit: Visit) -> Tensor:
        if visit.inner == "all":
            return checkpoint(self._compute, x, visit, use_reentrant=visit.is_reentrant)
        return self._compute(x, visit)

    def _compute(self, x: Tensor, visit: Visit) -> Tensor:
        run: Callable[..., Tensor] = lambda part, *args: part(*args)  # noqa: E731
        if visit.inner in ("part", "parts"):
            run = partial(checkpoint, use_reentrant=visit.is_reentrant)
        h = run(self._mlp, self.norm(x) * self.row)
        if visit.breaks == "forward":
            raise _Broken("forward")
        if visit.breaks == "interrupt":
            raise KeyboardInterrupt
        if visit.breaks == "backward":
            h = _RaiseInBackward.apply(h)
        if visit.takes_branch:
            h = (run if visit.inner == "parts" else lambda part, *args: part(*args))(self._branch, h)
        return x + h * self.scale + self.shift

    def _mlp(self, h: Tensor) -> Tensor:
        return self.down(self.dropout(torch.tanh(self.up(h))))

    def _branch(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.side(h))


class Net(nn.Module):
    """Embedding, blocks, norm, head (tied or not), and parameters of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, hidden, shape.dropout) for hidden in shape.hidden)
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, _VOCABULARY, bias=False)
        if shape.is_tied:
            self.head.weight = self.embed.weight
        if shape.has_root_parameters:
            self.gain = nn.Parameter(torch.randn(_VOCABULARY))
        if shape.has_unused_module:
            self.unused = nn.Linear(3, 5)
        self.reads_elsewhere = shape.reads_elsewhere
        for position, param in enumerate(self.parameters()):
            param.requires_grad_(position not in shape.frozen)

    def forward(self, tokens: Tensor, x: Tensor, path: tuple[Segment, ...]) -> tuple[Tensor, list[Tensor]]:
        h = self.embed(tokens) + x
        if self.reads_elsewhere:
            h = h + torch.tanh(self.norm.weight + self.head.weight.mean(0)) * self.blocks[0].row
        hidden = [h]
        for segment in path:
            if not segment.visits:
                continue
            if segment.checkpoint:
                h = checkpoint(self._run, segment, h, use_reentrant=segment.checkpoint == "reentrant")
            else:
                h = self._run(segment, h)
            hidden.append(h)
        logits = self.head(self.norm(h))
        return (logits * self.gain if hasattr(self, "gain") else logits), hidden

    def _run(self, segment: Segment, h: Tensor) -> Tensor:
        for visit in segment.visits:
            h = self.blocks[visit.block](h, visit)
        return h


# --- schedules --------------------------------------------------------------------------------------------------------

Paths = tuple[tuple[tuple[Segment, ...], ...], ...]  # by rank, then by model


@dataclass(frozen=True, repr=False)
class Micro(_Brief):
    """One or more forwards, and what is done with their graphs (`kind`)."""

    paths: Paths
    kind: str
    data: int
    forwards: int = 1
    no_sync: bool = False
    x_has_grad: bool = True
    infers_between: bool = False
    bypasses_root: bool = False
    partial: int = 0


@dataclass(frozen=True, repr=False)
class Infer(_Brief):
    """A forward without a graph."""

    paths: Paths
    mode: str
    data: int


@dataclass(frozen=True, repr=False)
class Crash(_Brief):
    """All ranks raise in a forward or in a backward; then, unless only a forward was lost, gradients are cleared."""

    paths: Paths
    data: int
    where: str
    mode: str


@dataclass(frozen=True, repr=False)
class Step(_Brief):
    """An optimizer step, with clipping or not."""

    clip: float | None
    set_to_none: bool
    holds_graph: str = ""  # "": no; "drop" or "use" what a forward before the step has left
    paths: Paths = ()


@dataclass(frozen=True, repr=False)
class Flip(_Brief):
    """Other parameters are trained from now on."""

    positions: frozenset[int]


@dataclass(frozen=True, repr=False)
class Load(_Brief):
    """A whole state dict is loaded."""

    data: int


@dataclass(frozen=True, repr=False)
class Reset(_Brief):
    """Gradients are cleared before the step."""

    set_to_none: bool


@dataclass(frozen=True, repr=False)
class Edit(_Brief):
    """Parameters are changed by hand, in one of the ways in which users do."""

    how: str
    positions: frozenset[int]


@dataclass(frozen=True, repr=False)
class HookGradient(_Brief):
    """A parameter gets a hook that scales its gradient, or loses it."""

    position: int


Op = Micro | Infer | Crash | Step | Flip | Load | Reset | Edit | HookGradient


@dataclass(frozen=True)
class Case:
    """All that a seed decides."""

    seed: int
    num_ranks: int
    config: dict[str, Any]
    precision: str
    shapes: tuple[Shape, ...]
    optimizer: tuple[str, dict[str, Any]]
    ops: tuple[Op, ...] = field(repr=False)

    def describe(self) -> str:
        """The case in words that a person can read."""
        lines = [f"  {index}: {op}" for index, op in enumerate(self.ops)]
        return "\n".join([repr(self), *lines])


class _Draw:
    """Draws a case from its seed."""

    def __init__(self, seed: int, num_ranks: int) -> None:
        self.rng = random.Random(seed)
        self.seed, self.num_ranks = seed, num_ranks
        self.data = 0
        self.is_simple = self.maybe(0.25)  # the kind in which bits must agree, and gathered memory has its bound

    def maybe(self, probability: float) -> bool:
        return self.rng.random() < probability

    def case(self) -> Case:
        rng = self.rng
        self.stage = rng.choice([0, 1, 1, 2, 2, 3, 3, 3, 3])
        has_second_copy = self.seed >= 3000
        if has_second_copy:
            self.stage = 3
        self.precision = rng.choices(["float64", "float32", "mixed", "bfloat16"], [12, 2, 3, 1])[0]
        config: dict[str, Any] = {
            "stage": self.stage,
            "collectives": rng.choice(["native", "pairwise"]),
            "prefetch_bytes": rng.choice([0, 800, 2**20]),
            "bucket_bytes": rng.choice([1, 700, 2**20]),
            "keep_whole_numel": rng.choice([0, 0, 7]),
            "compute_dtype": {"mixed": "float32", "bfloat16": "bfloat16"}.get(self.precision, "auto"),
            "timeout_s": 20.0,
        }
        if has_second_copy:
            config["wire"] = {"secondary": 2}
        elif self.seed % 3 == 0:
            config["collectives"] = "host"
        if self.stage:
            config["reduce_scatter"] = (True, False, True, "to_owner")[self.seed % 4]
            config["replicate"] = 2 if self.num_ranks == 4 and not has_second_copy else 1
        if self.maybe(0.15):
            config["units"] = {"min_numel": rng.choice([1, 60, 100_000])}
        if self.stage == 3:
            config["reshard_after_forward"] = self.maybe(0.7)
        width = rng.choice([4, 5])
        self.shapes = tuple(self.shape(width) for _ in range(2 if self.maybe(0.2) else 1))
        # In stage 3 every rank must gather the same units, and small ones may lie in a branch; so with two engines.
        self.has_blocks = "units" not in config and all(len(shape.hidden) > 1 for shape in self.shapes)
        self.can_be_uneven = (self.has_blocks or self.stage < 3) and len(self.shapes) == 1
        # Positions run through all models; every rank's loss must reach a trained parameter: the embedding is in each.
        self.frozen_now = set(self.shapes[0].frozen)
        self.calls_twice = not self.is_simple and self.maybe(0.3)
        self.checkpoints = not self.is_simple and self.maybe(0.5)
        self.checkpoints_inside = self.checkpoints or (self.is_simple and self.maybe(0.3))
        kinds: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
        if self.maybe(0.5):
            optimizer = ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01} | rng.choice(kinds[:2]))
        else:
            eps = 1e-6 if self.precision == "float64" else 1e-2
            optimizer = ("AdamW", {"lr": 0.02, "weight_decay": 0.1, "eps": eps} | rng.choice(kinds))
        ops = tuple(op for _ in range(rng.choice([2, 3])) for op in self.step())
        return Case(self.seed, self.num_ranks, config, self.precision, self.shapes, optimizer, ops)

    def shape(self, width: int) -> Shape:
        rng = self.rng
        num_blocks = rng.choice([1, 2, 2, 3])
        shape = Shape(
            width,
            tuple(rng.choice([1, 3, 4]) for _ in range(num_blocks)),
            is_tied=self.maybe(0.3) and not self.is_simple,
            has_root_parameters=self.maybe(0.3),
            dropout=0.3 if self.maybe(0.2) else 0.0,
            has_unused_module=self.maybe(0.2),
            reads_elsewhere=self.maybe(0.25) and not self.is_simple,
            frozen=frozenset(),
        )
        is_frozen = self.maybe(0.35) and not self.is_simple
        return replace(shape, frozen=self.frozen(shape) if is_frozen else frozenset())

    def frozen(self, shape: Shape) -> frozenset[int]:
        """Some parameters, a whole block, or all but one block."""
        with torch.random.fork_rng([]):
            names = [name for name, _ in Net(shape).named_parameters()]
        block = f"blocks.{self.rng.randrange(len(shape.hidden))}."
        how = self.rng.choice(["some", "block", "others"])
        if how == "some":
            return frozenset(i for i in range(len(names)) if self.maybe(0.3))
        return frozenset(i for i, name in enumerate(names) if name.startswith(block) == (how == "block"))

    def step(self) -> Iterator[Op]:
        rng = self.rng
        if self.maybe(0.3):
            yield Infer(self.paths(), rng.choice(["no_grad", "inference"]), self.next_data())
        # The last backward exchanges what the ones before have accumulated, so it must reach a trained parameter.
        syncs_last = self.maybe(0.5) and int(self.shapes[0].has_root_parameters) not in self.frozen_now
        count = 1 if self.is_simple else rng.choice([1, 1, 1, 2, 3])
        if count > 1 and self.maybe(0.15):
            yield self.micro(no_sync=syncs_last, is_last=False)
            yield Reset(self.maybe(0.6))
        for index in range(count):
            if self.maybe(0.15):
                where = rng.choice(["forward", "forward", "interrupt", "backward", "backward", "backward"])
                mode = rng.choice(["", "", "no_grad", "inference"]) if where != "backward" else ""
                yield Crash(self.paths(breaks=where), self.next_data(), where, mode)
            skips = syncs_last and index < count - 1 and self.maybe(0.7)  # any order of those that are exchanged or not
            yield self.micro(no_sync=skips, is_last=index == count - 1)
        held = rng.choice(["drop", "use"]) if self.maybe(0.1) else ""
        clip = 0.05 if self.maybe(0.25) else None
        yield Step(clip, self.maybe(0.7), held, self.paths() if held else ())
        if self.maybe(0.2):
            total = sum(1 for shape in self.shapes for _ in Net(shape).parameters())
            flip = Flip(frozenset(i for i in range(total) if self.maybe(0.15)))
            self.frozen_now ^= flip.positions
            yield flip
        if self.maybe(0.12):
            yield Load(self.next_data())
        total = sum(1 for shape in self.shapes for _ in Net(shape).parameters())
        for _ in range(rng.choice([0, 0, 1, 1, 2]) if not self.is_simple else 0):
            yield Edit(rng.choice(_EDITS), frozenset(i for i in range(total) if self.maybe(0.3)))
        if self.maybe(0.2) and not self.is_simple:
            yield HookGradient(rng.randrange(total))

    def micro(self, no_sync: bool, is_last: bool) -> Micro:
        rng = self.rng
        kinds = ["plain"] * 4 + ["separate", "retain", "partial_full"]
        if not (is_last and self.stage < 2):  # there the last backward exchanges what `no_sync` has accumulated
            kinds += ["partial", "drop"]
        paths = self.paths()
        if not any(_is_reentrant(segment) for path in paths for model in path for segment in model):
            kinds += ["grad", "grad"] if is_last and self.stage < 2 else ["grad", "grad_only"]
        kind = "plain" if self.is_simple else rng.choice(kinds)
        return Micro(
            paths,
            kind,
            self.next_data(),
            forwards=2 if kind == "separate" or (kind == "plain" and not self.is_simple and self.maybe(0.25)) else 1,
            no_sync=no_sync,
            x_has_grad="grad" in kind or self.has_uneven_paths or self.maybe(0.5),
            infers_between=self.maybe(0.15),
            bypasses_root=self.has_blocks
            and not any(s.has_root_parameters or s.reads_elsewhere for s in self.shapes)
            and self.maybe(0.1),
            partial=rng.randrange(3),
        )

    def next_data(self) -> int:
        self.data += 1
        return self.data

    def paths(self, breaks: str = "") -> Paths:
        """A path through each model for each rank; the same units on all ranks where they have to be gathered."""
        self.has_uneven_paths = False
        by_model = [self.model_paths(shape, breaks if index == 0 else "") for index, shape in enumerate(self.shapes)]
        return tuple(tuple(paths[rank] for paths in by_model) for rank in range(self.num_ranks))

    def model_paths(self, shape: Shape, breaks: str) -> list[tuple[Segment, ...]]:
        rng = self.rng
        order = list(range(len(shape.hidden)))
        if self.calls_twice:
            order.insert(rng.randrange(len(order) + 1), rng.choice(order))
        if len(order) > 1 and self.maybe(0.15):
            order.pop(rng.randrange(len(order)))
        if self.maybe(0.1):
            rng.shuffle(order)
        visits = [self.visit_by_rank(block, self.has_blocks or not breaks) for block in order]
        if breaks:
            place = rng.randrange(len(visits))
            visits[place] = [replace(visit, breaks=breaks) for visit in visits[place]]
        present = [[True] * len(visits) for _ in range(self.num_ranks)]
        embedding = int(shape.has_root_parameters)
        can_skip = self.stage < 3 and not breaks and len(self.shapes) == 1 and embedding not in self.frozen_now
        if self.maybe(0.3) and can_skip:
            self.has_uneven_paths = True
            for _ in range(rng.choice([1, 2])):
                present[rng.randrange(self.num_ranks)][rng.randrange(len(visits))] = False
        cuts = [0, *sorted(rng.sample(range(1, len(visits)), rng.randrange(len(visits)))), len(visits)]
        modes = [self.checkpoint_mode() for _ in cuts[1:]]
        return [
            tuple(
                Segment(tuple(visits[i][rank] for i in range(start, stop) if present[rank][i]), mode)
                for start, stop, mode in zip(cuts, cuts[1:], modes, strict=False)
            )
            for rank in range(self.num_ranks)
        ]

    def checkpoint_mode(self) -> str:
        return self.rng.choice(["", "reentrant", "non-reentrant"]) if self.checkpoints else ""

    def visit_by_rank(self, block: int, can_differ: bool) -> list[Visit]:
        inner = self.rng.choice(["", "", "all", "part", "parts"]) if self.checkpoints_inside else ""
        base = Visit(block, inner=inner, is_reentrant=bool(inner) and self.maybe(0.5))
        branches = self.rng.choice(["none", "all", "all", "one" if can_differ and self.can_be_uneven else "all"])
        only = self.rng.randrange(self.num_ranks)
        return [
            replace(base, takes_branch=branches == "all" or (branches == "one" and rank == only))
            for rank in range(self.num_ranks)
        ]


def _is_reentrant(segment: Segment) -> bool:
    return segment.checkpoint == "reentrant" or any(visit.is_reentrant for visit in segment.visits)


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass
class _Outcome:
    """What a forward has computed."""

    loss: Tensor
    partial: Tensor
    x: Tensor


def _forward(models: Sequence[nn.Module], op: Any, rank: int, dtype: torch.dtype, nth: int = 0) -> _Outcome:
    """Run rank `rank`'s forward: of one model, or of two where the second continues from the first."""
    generator = torch.Generator().manual_seed(op.data * 1000 + nth * 100 + rank)
    torch.manual_seed(op.data * 1000 + nth * 100 + rank)  # for dropout
    width = models[0].embed.embedding_dim
    tokens = torch.randint(0, _VOCABULARY, _TOKENS, generator=generator)
    x = torch.randn(*_TOKENS, width, generator=generator, dtype=torch.float64).to(dtype)
    x.requires_grad_(getattr(op, "x_has_grad", True))
    weights = torch.randn(*_TOKENS, _VOCABULARY, generator=generator, dtype=torch.float64).to(dtype)
    loss, partial_loss, h = torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype), x
    for model, path in zip(models, op.paths[rank], strict=True):
        call = partial(Net.forward, model) if getattr(op, "bypasses_root", False) else model
        logits, hidden = call(tokens, h, path)
        loss = loss + (logits * weights).sum() + (logits**2).mean()
        h = hidden[-1]
        chosen = hidden[getattr(op, "partial", 0) % len(hidden)]
        partial_loss = partial_loss + (chosen * weights[..., :width]).sum()
    return _Outcome(loss, partial_loss, x)


def _run_micro(models: Sequence[nn.Module], op: Micro, rank: int, dtype: torch.dtype, scale: float) -> list[Tensor]:
    """Run one micro-batch on either side; returns what both sides must agree on."""
    outcomes = [_forward(models, op, rank, dtype, nth) for nth in range(op.forwards)]
    seen = [outcome.loss.detach() for outcome in outcomes]
    if op.infers_between:
        with torch.no_grad():
            seen.append(_forward(models, op, rank, dtype, 7).loss)
    first = outcomes[0]
    seen.append(torch.tensor(float(first.loss.requires_grad)))
    if op.kind == "drop":
        return seen
    if op.kind in ("grad", "grad_only"):
        seen += torch.autograd.grad(first.loss, first.x, retain_graph=op.kind == "grad")
    if op.kind in ("partial", "partial_full") and first.partial.requires_grad:
        (first.partial * scale).backward(retain_graph=op.kind == "partial_full")
    if not first.loss.requires_grad or op.kind in ("grad_only", "partial"):
        return seen
    if op.kind == "separate":
        for outcome in reversed(outcomes):
            (outcome.loss * scale).backward()
    else:
        loss = sum((outcome.loss for outcome in outcomes), torch.zeros((), dtype=dtype)) * scale
        if op.kind == "retain":
            loss.backward(retain_graph=True)
        loss.backward()
    if first.x.grad is not None:
        seen.append(first.x.grad / scale)
    return seen


class _Reference:
    """The unsharded models: one process, all ranks' data; masters and compute copies where the dtypes differ."""

    def __init__(self, models: list[Net], num_ranks: int, compute: torch.dtype | None) -> None:
        self.num_ranks = num_ranks
        self.masters = models
        self.models = models if compute is None else [copy.deepcopy(model).to(compute) for model in models]
        self.params = [p for model in self.masters for p in model.parameters()]
        self._copies = [p for model in self.models for p in model.parameters()]

    def micro(self, op: Micro, dtype: torch.dtype) -> list[list[Tensor]]:
        seen = []
        for rank in range(self.num_ranks):
            seen.append(_run_micro(self.models, op, rank, dtype, 1 / self.num_ranks))
            self._move_gradients()
        return seen

    def leaf(self, position: int) -> Tensor:
        """What autograd sees of a parameter."""
        return self._copies[position]

    def _move_gradients(self) -> None:
        for master, p in zip(self.params, self._copies, strict=True):
            if master is not p and p.grad is not None:
                grad = p.grad.to(master.dtype)
                master.grad = grad if master.grad is None else master.grad + grad
                p.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """The masters have changed."""
        for master, p in zip(self.params, self._copies, strict=True):
            p.requires_grad_(master.requires_grad)
            if master is not p:
                p.copy_(master)


class _Run:
    """One case on this rank."""

    def __init__(self, case: Case) -> None:
        self.case, self.rank = case, dist.get_rank()
        made_in = _MADE_IN[case.precision]
        self.dtype = _COMPUTE.get(case.precision, made_in)
        self.tolerance = _TOLERANCES[case.precision]
        torch.manual_seed(case.seed)
        models = [Net(shape).to(made_in) for shape in case.shapes]
        self.reference = _Reference(
            [copy.deepcopy(model) for model in models], case.num_ranks, _COMPUTE.get(case.precision)
        )
        self.models = models
        self.engines = [shard_model(model, case.config) for model in models]
        for engine in self.engines:
            engine.memory.poison = True
        self.params = [p for model in models for p in model.parameters()]
        self.names = [f"{i}.{name}" for i, model in enumerate(models) for name, _ in model.named_parameters()]
        self.places = [
            (module, name, p) for m in models for module in m.modules() for name, p in module._parameters.items()
        ]
        kind, arguments = case.optimizer
        self.optimizer = getattr(torch.optim, kind)(self.params, **arguments)
        self.reference_optimizer = getattr(torch.optim, kind)(self.reference.params, **arguments)
        self.has_run_inexactly = case.num_ranks != 2 or case.precision in _COMPUTE or "fused" in arguments
        self.hooks: dict[int, list[Any]] = {}
        self.num_backwards = 0
        self.is_unsynced = False
        self.may_keep_units = False  # where they stay whole after a forward, since its backward may never come
        self.was_interrupted = False  # and no forward has run since
        self.peaks_checked = 0
        self.exact_checked = 0

    # --- operations

    def run(self, op: Op) -> None:
        if isinstance(op, (Micro, Infer, Crash)):
            self.was_interrupted = False
        {
            Micro: self.micro,
            Infer: self.infer,
            Crash: self.crash,
            Step: self.step,
            Flip: self.flip,
            Load: self.load,
            Reset: lambda op: self.zero_grad(op.set_to_none),
            Edit: self.edit,
            HookGradient: self.hook_gradient,
        }[type(op)](op)
        self.check_at_rest(isinstance(op, Step))

    def micro(self, op: Micro) -> None:
        self.note_exactness(op)
        for engine in self.engines:
            engine.memory.reset_peak()
        with contextlib.ExitStack() as stack:
            if op.no_sync:
                for model in self.models:
                    stack.enter_context(model.no_sync())
            seen = _run_micro(self.models, op, self.rank, self.dtype, 1.0)
        expected = self.reference.micro(op, self.dtype)[self.rank]
        assert len(seen) == len(expected)
        for index, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
            self.compare(f"value {index} of the micro-batch", ours, theirs)
        if op.kind not in ("drop", "grad_only"):
            self.is_unsynced = op.no_sync and self.case.config["stage"] < 2
        if not self.is_unsynced:
            self.check_gradients()
        self.check_peak(op)

    def infer(self, op: Infer) -> None:
        with torch.no_grad() if op.mode == "no_grad" else torch.inference_mode():
            ours = _forward(self.models, op, self.rank, self.dtype)
            theirs = _forward(self.reference.models, op, self.rank, self.dtype)
        self.compare("inferred loss", ours.loss, theirs.loss)

    def crash(self, op: Crash) -> None:
        self.may_keep_units = True
        self.was_interrupted = op.where == "interrupt"
        modes = {"": contextlib.nullcontext(), "no_grad": torch.no_grad(), "inference": torch.inference_mode()}
        try:
            with modes[op.mode]:
                outcome = _forward(self.models, op, self.rank, self.dtype)
            if outcome.loss.requires_grad:
                outcome.loss.backward()
        except (_Broken, KeyboardInterrupt):
            for model in self.models:
                assert all(type(param) is not Tensor for param in model.parameters())  # at rest to whoever asks
        if op.where == "backward":
            self.zero_grad(True)

    def step(self, op: Step) -> None:
        held = None
        if op.holds_graph:
            forward = Micro(op.paths, "drop", 77)
            held = _forward(self.models, forward, self.rank, self.dtype)
        assert not self.is_unsynced
        if op.clip is not None:
            self.has_run_inexactly = True
            ours = torch.nn.utils.clip_grad_norm_(self.params, op.clip)
            theirs = torch.nn.utils.clip_grad_norm_(self.reference.params, op.clip)
            self.compare("norm", ours.full_tensor() if isinstance(ours, DTensor) else ours, theirs)
        self.optimizer.step()
        self.reference_optimizer.step()
        self.reference.refresh()
        self.check_weights()
        self.zero_grad(op.set_to_none)
        self.may_keep_units = False
        # What a reentrant checkpoint has left out is computed anew, with the new weights, in torch too.
        is_recomputed = all(s.checkpoint == "reentrant" for paths in op.paths for path in paths for s in path)
        if held is not None and op.holds_graph == "use" and self.engines[0].units and not is_recomputed:
            with pytest.raises(UsageError, match="after the forward"):
                held.loss.backward()
            self.zero_grad(True)

    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none)
        self.reference_optimizer.zero_grad(set_to_none)
        self.num_backwards = 0
        self.is_unsynced = False

    def flip(self, op: Flip) -> None:
        for position in op.positions:
            is_trained = not self.params[position].requires_grad
            self.params[position].requires_grad_(is_trained)
            self.reference.params[position].requires_grad_(is_trained)
        self.reference.refresh()

    @torch.no_grad()
    def edit(self, op: Edit) -> None:
        for params in (self.params, self.reference.params):
            chosen = [p for i, p in enumerate(params) if i in op.positions]
            if op.how == "in place":
                for p in chosen:
                    p.mul_(0.9).add_(0.01)
            elif op.how == "data":
                for p in chosen:
                    p.data.mul_(0.9)
            elif op.how == "foreach" and chosen:
                torch._foreach_mul_(chosen, 0.9)
            elif op.how == "assign":
                for p in chosen:
                    whole = p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone()
                    p.data = whole.flip(0) if whole.ndim else whole * 0.9
            elif op.how == "gathered":
                with GatheredParameters(chosen):
                    for p in chosen:
                        p.data.mul_(0.9)
            elif op.how == "mark_dirty":
                for p in chosen:
                    (p.to_local() if isinstance(p, DTensor) else p.data).mul_(0.9)
        if op.how == "mark_dirty":
            for model in self.models:
                mark_dirty(model)
        self.reference.refresh()
        self.check_weights()

    def hook_gradient(self, op: HookGradient) -> None:
        if op.position in self.hooks:
            for handle in self.hooks.pop(op.position):
                handle.remove()
            return
        params = (self.params[op.position], self.reference.leaf(op.position))
        if all(p.requires_grad for p in params):
            self.hooks[op.position] = [p.register_hook(lambda gradient: gradient * 0.5) for p in params]

    def load(self, op: Load) -> None:
        for model, master in zip(self.models, self.reference.masters, strict=True):
            torch.manual_seed(op.data)
            state = {name: torch.randn_like(value) for name, value in master.state_dict().items()}
            for alias, name in (("head.weight", "embed.weight"),):
                if getattr(master, "head").weight is master.embed.weight:
                    state[alias] = state[name]
            model.load_state_dict(state)
            master.load_state_dict(state)
        self.reference.refresh()
        self.check_weights()

    # --- comparing

    def note_exactness(self, op: Micro) -> None:
        """Bits must agree where every gradient is one sum of two ranks' numbers."""
        self.num_backwards += 1
        calls = [Counter(v.block for s in model for v in s.visits) for rank in op.paths for model in rank]
        is_exact = op.kind == "plain" and op.forwards == 1 and self.num_backwards == 1
        is_exact = is_exact and all(count == 1 for counter in calls for count in counter.values())
        is_exact = is_exact and not any(shape.is_tied or shape.reads_elsewhere for shape in self.case.shapes)
        is_exact = is_exact and not any(_is_reentrant(s) for rank in op.paths for model in rank for s in model)
        if not is_exact and op.kind not in ("drop", "grad_only"):
            self.has_run_inexactly = True

    def compare(self, what: str, ours: Tensor, theirs: Tensor, *, is_exact: bool = False) -> None:
        assert ours.shape == theirs.shape, f"{what}: {ours.shape} against {theirs.shape}"
        if is_exact:
            self.exact_checked += 1
            assert torch.equal(ours, theirs), f"{what}: not bit-equal by {(ours - theirs).abs().max()}"
            return
        rtol, atol = self.tolerance
        torch.testing.assert_close(
            ours,
            theirs.to(ours.dtype),
            rtol=rtol,
            atol=atol * self.size_of(theirs),
            msg=lambda text: f"{what}: {text}\n{ours}\n{theirs}",
        )

    @staticmethod
    def size_of(tensor: Tensor) -> float:
        """What an absolute error is compared with: where great numbers cancel, the rest has their error."""
        return max(1.0, float(tensor.detach().abs().max())) if tensor.numel() else 1.0

    def own_rows(self, whole: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """What `like` holds here, and the same part of `whole`, cut as `torch.chunk` cuts."""
        if not isinstance(like, DTensor):
            return like, whole
        local = like.to_local()
        if not any(placement.is_shard() for placement in like.placements):
            return local, whole
        num_shards = self.case.num_ranks // self.case.config["replicate"]
        dim = like.placements[0].dim  # type: ignore[attr-defined]
        chunks, shard = whole.chunk(num_shards, dim), self.rank % num_shards
        return local, chunks[shard] if shard < len(chunks) else whole.narrow(dim, 0, 0)

    def check_gradients(self) -> None:
        for name, ours, theirs in zip(self.names, self.params, self.reference.params, strict=True):
            has = (ours.grad is not None, theirs.grad is not None)
            assert has[0] == has[1], f"gradient of {name}: {'not ' * (not has[0])}there, reference {has[1]}"
            if ours.grad is not None:
                assert isinstance(ours.grad, DTensor) == isinstance(ours, DTensor)
                own, expected = self.own_rows(theirs.grad, ours.grad)
                self.compare(f"gradient of {name}", own, expected, is_exact=not self.has_run_inexactly)

    def check_weights(self) -> None:
        for name, ours, theirs in zip(self.names, self.params, self.reference.params, strict=True):
            own, expected = self.own_rows(theirs.detach(), ours.detach())
            self.compare(f"weight {name}", own, expected, is_exact=not self.has_run_inexactly)

    def check_at_rest(self, has_stepped: bool) -> None:
        for module, name, p in self.places:
            assert module._parameters[name] is p, f"{name} of {type(module).__name__} is not at rest"
        for engine in self.engines:
            assert engine.backward.session is None
            engine.settle()  # torch has not told of an interrupted forward
            assert engine._roots == []
            for unit in engine.units:
                assert not unit.is_leased, f"{unit.name} is leased"
                may_stay = unit.keeps_whole or unit.is_shared or unit.index in engine.kept_for_backward
                may_stay = may_stay or self.was_interrupted  # until the next forward, which all ranks share
                assert may_stay or unit.residency.value == "released", f"{unit.name} is {unit.residency}"
            for p in engine.parameters:
                assert not p._seen, f"{p.name} is still seen by a call"
            kept = 0 if has_stepped else sum(engine.units[index].buffer_nbytes for index in engine.kept_for_backward)
            assert engine.memory.bytes <= kept or self.was_interrupted

    def check_peak(self, op: Micro) -> None:
        """Gathered memory is that of the modules being called, and what may be prefetched; none is left behind."""
        config, is_plain = self.case.config, op.kind == "plain" and not op.infers_between
        segments = [s for rank in op.paths for model in rank for s in model]
        is_plain = is_plain and not any(s.checkpoint for s in segments) and all(p.requires_grad for p in self.params)
        # Where units are smaller than blocks, recomputing a part of a block gathers others of them.
        has_blocks = "units" not in config and all(len(shape.hidden) > 1 for shape in self.case.shapes)
        is_plain = is_plain and (has_blocks or not any(visit.inner for s in segments for visit in s.visits))
        self.may_keep_units = self.may_keep_units or not is_plain
        if not self.may_keep_units:
            assert all(engine.memory.bytes == 0 for engine in self.engines)
        if not (is_plain and op.forwards == 1 and config.get("reshard_after_forward")):
            return
        if config["collectives"] == "host":
            return  # nothing is gathered: the whole parameters lie in memory that the ranks share
        for engine in self.engines:
            needed, ahead = max(_bytes_needed(engine)), config["prefetch_bytes"]
            if ahead:
                ahead = max(ahead, *(unit.buffer_nbytes for unit in engine.units))  # one unit at least
            assert 0 < engine.memory.peak_bytes <= needed + ahead, (
                f"peak {engine.memory.peak_bytes}, {needed} needed at once, {ahead} prefetched"
            )
            self.peaks_checked += 1


def _bytes_needed(engine: ZeroEngine) -> Iterator[int]:
    """For each module that needs units: their bytes, and those of the modules around it."""
    around: dict[int, set[int]] = {}
    for unit in engine.units:
        for entry in unit.entries:
            for module in entry.modules():
                around.setdefault(id(module), set()).add(unit.index)
    return (sum(engine.units[index].buffer_nbytes for index in indices) for indices in around.values())


def _agree(error: str) -> None:
    """Raise on all ranks together, so that none waits for one that has found a difference."""
    flag = torch.tensor(int(bool(error)))
    dist.all_reduce(flag)
    if error or flag:
        raise AssertionError(error or "another rank has found a difference")


def _run_case(case: Case) -> Counter[str]:
    place = "start"
    try:
        run = _Run(case)
        for index, op in enumerate(case.ops):
            place = f"operation {index} ({type(op).__name__})"
            error = ""
            try:
                run.run(op)
            except Exception:
                error = traceback.format_exc()
            _agree(error)
        return Counter(exact=run.exact_checked, peaks=run.peaks_checked, ops=len(case.ops))
    except Exception as error:
        line = f'python -c "from tests.engine.test_property import replay as r; r({case.seed}, {case.num_ranks})"'
        raise AssertionError(f"seed {case.seed}, {place}; replay: {line}\n{case.describe()}\n{error}") from error


def _run_seeds(seeds: Sequence[int]) -> Counter[str]:
    _clear_sharding_prop_cache()  # it refers to the groups of earlier jobs in this process
    total: Counter[str] = Counter()
    for seed in seeds:
        total += _run_case(_Draw(seed, dist.get_world_size()).case())
    return total


def replay(seed: int, num_ranks: int) -> None:
    """Run one seed again, on ranks of its own."""
    print(run_ranks(_run_seeds, num_ranks, [seed])[0])


def _jobs() -> list[tuple[int, range]]:
    """(ranks, seeds) of each test: on 4 ranks in two replicas, from 3000 on with a second copy. The last once failed."""
    four = [2000, 2001, 3000, 3001, 2006]
    return [(2, [*range(9), 330, 395, 752]), (3, [*range(1006, 1012), 1100]), (4, four)]


@pytest.mark.parametrize(("num_ranks", "seeds"), _jobs(), ids=lambda value: str(value).replace(" ", ""))
def test_engine_agrees_with_unsharded_model_on_random_schedules(num_ranks, seeds):
    counts = run_ranks(_run_seeds, num_ranks, seeds, timeout_s=240)[0]
    assert num_ranks == 4 or counts["peaks"] > 0
    assert num_ranks != 2 or counts["exact"] > 0
