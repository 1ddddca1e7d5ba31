"""The engine against the unsharded model: random small models, random schedules, released memory filled with NaN.

A seed decides everything: the model, the configuration, the optimizer, the schedule, and every rank's data. Each rank
also runs the unsharded model on *all* ranks' data, and compares losses, gradients, weights, and what is at rest
afterwards. A failing seed is replayed by the line that its error names.
"""

import contextlib
import copy
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from hf_zero import GatheredParameters, UsageError, ZeroEngine, mark_dirty, shard_model
from tests.engine.random_models import VOCABULARY, Broken, RandomNet
from tests.engine.random_schedules import (
    Case,
    Crash,
    Draw,
    Edit,
    Flip,
    HookGradient,
    Infer,
    Load,
    Micro,
    Op,
    Reset,
    Step,
    is_reentrant,
)
from tests.ranks import by_hand, run_ranks

_TOKENS = (2, 3)
# Ranks add the same numbers in another order than one process does. float32 is looser where Adam divides small ones.
_TOLERANCES = {"float64": (1e-9, 1e-11), "float32": (1e-4, 1e-5), "mixed": (1e-4, 1e-5), "bfloat16": (5e-2, 3e-1)}
_MADE_IN = {"float64": torch.float64, "float32": torch.float32, "mixed": torch.float64, "bfloat16": torch.float32}
_COMPUTE = {"mixed": torch.float32, "bfloat16": torch.bfloat16}


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
    tokens = torch.randint(0, VOCABULARY, _TOKENS, generator=generator)
    x = torch.randn(*_TOKENS, width, generator=generator, dtype=torch.float64).to(dtype)
    x.requires_grad_(getattr(op, "x_has_grad", True))
    weights = torch.randn(*_TOKENS, VOCABULARY, generator=generator, dtype=torch.float64).to(dtype)
    loss, partial_loss, h = torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype), x
    for model, path in zip(models, op.paths[rank], strict=True):
        call = partial(RandomNet.forward, model) if getattr(op, "bypasses_root", False) else model
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

    def __init__(self, models: list[RandomNet], num_ranks: int, compute: torch.dtype | None) -> None:
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
        models = [RandomNet(shape).to(made_in) for shape in case.shapes]
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
            room = 2.0 if self.case.precision == "bfloat16" else 1.0  # sums near 0 of what is rounded to 8 bits
            self.compare(f"value {index} of the micro-batch", ours, theirs, room=room)
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
        except (Broken, KeyboardInterrupt):
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
        # A graph of frozen parameters alone is as new as before.
        is_outdated = not is_recomputed and all(p.requires_grad for p in self.params)
        if held is not None and op.holds_graph == "use" and self.engines[0].units and is_outdated:
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
        is_used_again = any(shape.is_tied for shape in self.case.shapes)
        is_used_again = is_used_again or any(count > 1 for counter in calls for count in counter.values())
        is_exact = is_exact and (
            not is_used_again or self.case.precision not in _COMPUTE
        )  # autograd adds up in its own dtype
        is_exact = is_exact and not any(shape.reads_elsewhere for shape in self.case.shapes)
        is_exact = is_exact and not any(is_reentrant(s) for rank in op.paths for model in rank for s in model)
        if not is_exact and op.kind not in ("drop", "grad_only"):
            self.has_run_inexactly = True

    def compare(self, what: str, ours: Tensor, theirs: Tensor, *, is_exact: bool = False, room: float = 1.0) -> None:
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
            atol=atol * room * self.size_of(theirs),
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
            assert engine._forwards.modules == []
            for unit in engine.units:
                assert not unit.num_leases, f"{unit.name} is leased"
                may_stay = unit.keeps_whole or unit.is_shared or unit.index in engine.gathering.kept.all
                may_stay = may_stay or self.was_interrupted  # until the next forward, which all ranks share
                assert may_stay or unit.residency.value == "released", f"{unit.name} is {unit.residency}"
            for p in engine.parameters:
                assert not p._seen, f"{p.name} is still seen by a call"
            staying = {unit.index for unit in engine.units if unit.stays}
            assert staying <= engine.gathering.kept.by_budget
            kept = sum(engine.units[i].buffer_nbytes for i in (staying if has_stepped else engine.gathering.kept.all))
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
            for engine in self.engines:
                assert engine.memory.bytes == sum(unit.buffer_nbytes for unit in engine.units if unit.stays)
        if not (is_plain and op.forwards == 1 and config.get("reshard_after_forward")):
            return
        if config["collectives"] == "host":
            return  # nothing is gathered: the whole parameters lie in memory that the ranks share
        for engine in self.engines:
            needed, ahead = max(_bytes_needed(engine)), config["prefetch_bytes"]
            if ahead:
                ahead = max(ahead, *(unit.buffer_nbytes for unit in engine.units))  # one unit at least
            kept = engine.gathering.budget.kept_bytes
            assert 0 < engine.memory.peak_bytes <= needed + ahead + kept, (
                f"peak {engine.memory.peak_bytes}, {needed} needed at once, {ahead} prefetched, {kept} kept"
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
        total += _run_case(Draw(seed, dist.get_world_size()).case())
    return total


def replay(seed: int, num_ranks: int) -> None:
    """Run one seed again, on ranks of its own."""
    print(run_ranks(_run_seeds, num_ranks, [seed])[0])


def _jobs() -> list[tuple[int, range]]:
    """(ranks, seeds) of each test: on 4 ranks two replicas, or (3000s, from 10000 on) a second copy. The last once failed."""
    four = [2000, 2001, 3000, 3001, 2006, 40339, 2221, 2394]
    return [
        (
            2,
            [
                *(0, 1, 2, 3, 4, 8, 330, 752, 20003, 4323, 90_003, 90_011),
                *by_hand(5, 6, 7, 395, 4599, 20058, 20290, 20608),
            ],
        ),
        (3, [1007, 1008, 1009, 1011, 90_203, *by_hand(1006, 1010, 1100)]),
        (4, four),
    ]


@pytest.mark.parametrize(("num_ranks", "seeds"), _jobs(), ids=lambda value: str(value).replace(" ", ""))
def test_engine_agrees_with_unsharded_model_on_random_schedules(num_ranks, seeds):
    counts = run_ranks(_run_seeds, num_ranks, seeds, timeout_s=240)[0]
    assert num_ranks == 4 or counts["peaks"] > 0
    assert num_ranks != 2 or counts["exact"] > 0
