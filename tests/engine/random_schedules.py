"""Random schedules of forwards, backwards, steps and edits, drawn from a seed that decides everything."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.engine.random_models import Brief, RandomNet, Segment, Shape, Visit

EDITS = ("in place", "data", "foreach", "assign", "gathered", "mark_dirty")  # ways to change parameters by hand


Paths = tuple[tuple[tuple[Segment, ...], ...], ...]  # by rank, then by model


@dataclass(frozen=True, repr=False)
class Micro(Brief):
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
class Infer(Brief):
    """A forward without a graph."""

    paths: Paths
    mode: str
    data: int


@dataclass(frozen=True, repr=False)
class Crash(Brief):
    """All ranks raise in a forward or in a backward; then, unless only a forward was lost, gradients are cleared."""

    paths: Paths
    data: int
    where: str
    mode: str


@dataclass(frozen=True, repr=False)
class Step(Brief):
    """An optimizer step, with clipping or not."""

    clip: float | None
    set_to_none: bool
    holds_graph: str = ""  # "": no; "drop" or "use" what a forward before the step has left
    paths: Paths = ()


@dataclass(frozen=True, repr=False)
class Flip(Brief):
    """Other parameters are trained from now on."""

    positions: frozenset[int]


@dataclass(frozen=True, repr=False)
class Load(Brief):
    """A whole state dict is loaded."""

    data: int


@dataclass(frozen=True, repr=False)
class Reset(Brief):
    """Gradients are cleared before the step."""

    set_to_none: bool


@dataclass(frozen=True, repr=False)
class Edit(Brief):
    """Parameters are changed by hand, in one of the ways in which users do."""

    how: str
    positions: frozenset[int]


@dataclass(frozen=True, repr=False)
class HookGradient(Brief):
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


class Draw:
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
        has_second_copy = 3000 <= self.seed < 90_000 and not 4000 <= self.seed < 10_000
        self.has_whole_blocks = self.seed >= 90_000  # in stage 3
        if has_second_copy or self.has_whole_blocks:
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
        if self.has_whole_blocks:
            config["units"] = {"whole": ["blocks"]}
        elif self.maybe(0.15):
            config["units"] = {"min_numel": rng.choice([1, 60, 100_000])}
        if self.stage == 3:
            # What is kept is drawn beside the rest, so that seeds which once failed are what they were.
            kept = random.Random(self.seed).choice([True, True, "auto", 700, 3000])
            config["reshard_after_forward"] = kept if self.maybe(0.7) else False
        width = rng.choice([4, 5])
        self.shapes = tuple(self.shape(width) for _ in range(2 if self.maybe(0.2) else 1))
        # In stage 3 every rank must gather the same units, and small ones may lie in a branch; so with two engines.
        self.has_blocks = (self.has_whole_blocks or "units" not in config) and all(
            len(shape.hidden) > 1 for shape in self.shapes
        )
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
            names = [name for name, _ in RandomNet(shape).named_parameters()]
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
            total = sum(1 for shape in self.shapes for _ in RandomNet(shape).parameters())
            flip = Flip(frozenset(i for i in range(total) if self.maybe(0.15)))
            self.frozen_now ^= flip.positions
            yield flip
        if self.maybe(0.12):
            yield Load(self.next_data())
        total = sum(1 for shape in self.shapes for _ in RandomNet(shape).parameters())
        for _ in range(rng.choice([0, 0, 1, 1, 2]) if not self.is_simple else 0):
            yield Edit(rng.choice(EDITS), frozenset(i for i in range(total) if self.maybe(0.3)))
        if self.maybe(0.2) and not self.is_simple:
            yield HookGradient(rng.randrange(total))

    def micro(self, no_sync: bool, is_last: bool) -> Micro:
        rng = self.rng
        kinds = ["plain"] * 4 + ["separate", "retain", "partial_full"]
        if not (is_last and self.stage < 2):  # there the last backward exchanges what `no_sync` has accumulated
            kinds += ["partial", "drop"]
        paths = self.paths()
        if not any(is_reentrant(segment) for path in paths for model in path for segment in model):
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
        can_skip = (
            (self.stage < 3 or self.has_whole_blocks)
            and not breaks
            and len(self.shapes) == 1
            and embedding not in self.frozen_now
        )
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


def is_reentrant(segment: Segment) -> bool:
    return segment.checkpoint == "reentrant" or any(visit.is_reentrant for visit in segment.visits)
