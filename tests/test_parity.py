"""Training under every stage, against the unsharded model: losses, gradients, gradient norms, weights.

The oracle is one process that accumulates the gradients of all ranks' batches; for some models DDP too. Each rank runs it
for itself and compares its own rows, so the comparison needs no exchange. See [Note: equal bits] for what must be equal to
the bit, and TOLERANCE for the rest.

[Note: equal bits] Two floating-point numbers add up to the same bits in either order, and halving is exact. So on two ranks
with one micro-batch, gradients have the oracle's bits whatever adds them up, if each parameter is reduced once; and so have
the weights, if the optimizer's arithmetic does not depend on where a tensor begins and ends (for-loop and foreach do not,
fused does) and nothing mixes in a norm, whose sum over all elements depends on how they are split (clipping). On three
ranks, `pairwise` adds in rank order and divides once, so it has the bits of an oracle that does that too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hf_zero
from hf_zero.comm import exchange
from hf_zero.comm.backends import pairwise
from hf_zero.engine.backward import accumulation, reduction
from hf_zero.engine.ranks import world
from hf_zero.engine.units import unit
from tests.models import CASES, Case, Stack, make_model, stack_batch
from tests.ranks import EVERY_TURN, run_alone, run_ranks, turns_of

NUM_STEPS = 10 if os.environ.get(EVERY_TURN) else 3  # the first records orders, the next two follow them
STAGES, TWO_WAYS = (0, 1, 2, 3), ("native", "pairwise")
# Far above the rounding error of a gradient that should be zero (a key bias under softmax): AdamW's first steps would
# otherwise blow such noise up to a full learning rate, differently in every order of additions.
EPS = 1e-4


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, sharded or not.

    Attributes:
        optimizer: "adamw", "adamw_foreach", "adamw_fused" or "sgd".
        num_micros: micro-batches a step.
        uses_no_sync: whether all micro-batches of a step but the last run under `model.no_sync()`.
        max_norm: clip gradients to this norm.
        checkpointing: `use_reentrant` of transformers' gradient checkpointing; None: without it.
        oracle: "halved" divides each rank's loss by the number of ranks; "summed" adds the ranks' gradients up and then
            divides, as an exchange does; "ddp" is DistributedDataParallel.
        bf16: compute in bfloat16, with fp32 masters and fp32 sums ("summed" only).
        num_steps: optimizer steps.
    """

    optimizer: str = "adamw"
    num_micros: int = 1
    uses_no_sync: bool = False
    max_norm: float | None = None
    checkpointing: bool | None = None
    oracle: str = "halved"
    bf16: bool = False
    num_steps: int = NUM_STEPS

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)
        # Without a word, AdamW would be fused where parameters are partitioned, with other last bits.
        kinds = {"adamw": {"foreach": False}, "adamw_foreach": {"foreach": True}, "adamw_fused": {"fused": True}}
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=EPS, **kinds[self.optimizer])


@dataclass
class Trace:
    """What a run leaves behind on one rank; gradients and weights are this rank's rows, by parameter name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float = math.nan


@dataclass(frozen=True)
class Distance:
    """The greatest difference between two runs; 0: the same bits; infinite: None, NaN or another shape on one side.

    Attributes:
        losses: of this rank's micro-batches, and of an evaluation after the last step.
        gradients: elements of a step's gradients, relative to that step's norm.
        norms: relative.
        weights: elements, after the last step.
    """

    losses: float
    gradients: float
    norms: float
    weights: float
    evaluation: float = 1e-6  # without a graph, torch takes other kernels, whose last bit may hang on addresses

    def within(self, tolerance: Distance) -> bool:
        """Whether no difference is greater than that of `tolerance`."""
        return all(getattr(self, f.name) <= getattr(tolerance, f.name) for f in fields(self))


# Norms are never required to have equal bits: they sum over all elements, split differently.
EQUAL = Distance(losses=0.0, gradients=0.0, norms=1e-6, weights=0.0)
# Another order of additions changes an element of a gradient by some ulps (6e-8 of it) in every step, and a weight, which
# ten steps of AdamW with learning rate 1e-2 move by up to 0.1, by about as much of that. Three times what was measured.
TOLERANCE = Distance(losses=2e-6, gradients=3e-6, norms=2e-6, weights=2e-6, evaluation=2e-6)


def own_rows(whole: Tensor, rank: int, num_ranks: int, is_sharded: bool) -> Tensor:
    """What `rank` holds of a whole tensor; torch.chunk cuts as `Shard(0)` does."""
    if not is_sharded or not whole.ndim:
        return whole
    chunks = whole.chunk(num_ranks)
    return chunks[rank] if rank < len(chunks) else whole[:0]


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def item(tensor: Tensor) -> float:
    return float(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def compare(run: Trace, oracle: Trace, rank: int, num_ranks: int, is_sharded: bool) -> Distance:
    """The distance of a run from an oracle that holds whole tensors."""
    cut = functools.partial(own_rows, rank=rank, num_ranks=num_ranks, is_sharded=is_sharded)
    gradients = 0.0
    for ours, theirs, norm in zip(run.gradients, oracle.gradients, oracle.norms, strict=True):
        assert ours.keys() == theirs.keys()
        for name, grad in theirs.items():
            distance = _distance(ours[name], None if grad is None else cut(grad))
            gradients = max(gradients, distance / norm)
    return Distance(
        losses=max(map(_gap, run.losses, oracle.losses)),
        evaluation=_gap(run.evaluation, oracle.evaluation),
        gradients=gradients,
        norms=max(_gap(a, b) / b for a, b in zip(run.norms, oracle.norms, strict=True)),
        weights=max(_distance(run.weights[name], cut(whole)) for name, whole in oracle.weights.items()),
    )


def _gap(a: float, b: float) -> float:
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if torch.equal(a, b):
        return 0.0
    return _gap(float((a.double() - b.double()).abs().max()), 0.0)


def finish_step(trace: Trace, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Record gradients and their norm, clip, step."""
    trace.gradients.append({n: None if p.grad is None else local(p.grad) for n, p in model.named_parameters()})
    parameters = [p for p in model.parameters() if p.grad is not None]
    limit = math.inf if recipe.max_norm is None else recipe.max_norm
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit) if recipe.max_norm is not None else _norm(parameters)
    trace.norms.append(item(norm))
    optimizer.step()


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def finish_run(trace: Trace, model: nn.Module, case: Case, rank: int) -> Trace:
    trace.weights = {name: local(p) for name, p in model.named_parameters()}
    model.eval()
    # torch.nn.TransformerEncoderLayer has another kernel for inference, which it does not use where it sees hooks.
    with torch.no_grad(), mock.patch("torch.backends.mha.get_fastpath_enabled", return_value=False):
        trace.evaluation = float(case.loss(model, case.batch(NUM_STEPS, rank)))
    return trace


def checkpoint(model: nn.Module, recipe: Recipe) -> None:
    if recipe.checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recipe.checkpointing})


def train_sharded(model: nn.Module, case: Case, recipe: Recipe, config: dict[str, Any], rank: int) -> Trace:
    """Train under hf_zero; `model` is rank 0's, other ranks must get its values."""
    model = copy.deepcopy(model)
    if rank:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
    if recipe.bf16:
        # The models cast what they compute with; a target of a loss stays as it is, as in the oracle.
        dtypes = {"compute_dtype": "bfloat16", "master_dtype": "float32", "reduce_dtype": "float32"}
        config = {**dtypes, "cast_forward_inputs": False, **config}
    engine = hf_zero.shard_model(model, config)
    checkpoint(model, recipe)
    trace = train_own(model, model, case, recipe, rank)
    if engine.world.config.stage and engine.world.num_ranks > 1:
        assert all(isinstance(p, DTensor) for p in model.parameters())
    engine.close()
    return trace


def train_own(called: nn.Module, model: nn.Module, case: Case, recipe: Recipe, rank: int) -> Trace:
    """Train `model`, or what wraps it, on this rank's batches."""
    optimizer = recipe.make_optimizer(model)
    trace = Trace()
    for step in range(recipe.num_steps):
        optimizer.zero_grad()
        for micro in range(recipe.num_micros):
            waits = recipe.uses_no_sync and micro < recipe.num_micros - 1
            with called.no_sync() if waits else contextlib.nullcontext():
                loss = case.loss(called, case.batch(step, rank, micro))
                (loss / recipe.num_micros).backward()
            trace.losses.append(float(loss))
        finish_step(trace, model, optimizer, recipe)
    return finish_run(trace, model, case, rank)


def train_oracle(model: nn.Module, case: Case, recipe: Recipe, rank: int, num_ranks: int) -> Trace:
    """Train unsharded, in one process, on all ranks' batches."""
    model = copy.deepcopy(model)
    checkpoint(model, recipe)
    worker = model
    if recipe.bf16:
        worker = copy.deepcopy(model)
        for p in worker.parameters():
            p.data = p.data.bfloat16()
    optimizer = recipe.make_optimizer(model)
    is_summed = recipe.oracle == "summed"
    trace = Trace()
    for step in range(recipe.num_steps):
        optimizer.zero_grad()
        for other in range(num_ranks):
            worker.zero_grad() if worker is not model else None
            for micro in range(recipe.num_micros):
                loss = case.loss(worker, case.batch(step, other, micro))
                (loss / recipe.num_micros / (1 if is_summed else num_ranks)).backward()
                if other == rank:
                    trace.losses.append(float(loss))
            if worker is not model:
                _add_gradients(model, worker)
        if is_summed:
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad / num_ranks
        finish_step(trace, model, optimizer, recipe)
        if worker is not model:
            for p, master in zip(worker.parameters(), model.parameters(), strict=True):
                p.data.copy_(master.data)
    worker.train(False)
    finish_run(trace, model, case, rank)
    if worker is not model:
        trace.evaluation = finish_run(Trace(), worker, case, rank).evaluation
    return trace


def _add_gradients(model: nn.Module, worker: nn.Module) -> None:
    for master, p in zip(model.parameters(), worker.parameters(), strict=True):
        if p.grad is not None:
            grad = p.grad.to(master.dtype)
            master.grad = grad if master.grad is None else master.grad + grad


def train_ddp(model: nn.Module, case: Case, recipe: Recipe, rank: int) -> Trace:
    """Train under torch's DistributedDataParallel; parameters that no rank used get no gradient there either."""
    model = copy.deepcopy(model)
    return train_own(
        DistributedDataParallel(model, find_unused_parameters=case.name == "mlp"), model, case, recipe, rank
    )


def distances(name: str, recipe: Recipe, configs: list[dict[str, Any]], damage: str = "") -> list[Distance]:
    """Runs on a rank: the distance of a run under each config from the oracle; `damage` names an entry of DAMAGES."""
    case, rank = CASES[name], dist.get_rank() if dist.is_initialized() else 0
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    model = make_model(case)
    if recipe.oracle == "ddp":
        oracle = train_ddp(model, case, recipe, rank)
    else:
        oracle = train_oracle(model, case, recipe, rank, num_ranks)
    found = []
    for config in configs:
        with DAMAGES[damage]() if damage else contextlib.nullcontext():
            trace = train_sharded(model, case, recipe, config, rank)
        is_sharded = num_ranks > 1 and config["stage"] > 0
        num_shards = num_ranks // config.get("replicate", 1)
        found.append(compare(trace, oracle, rank % num_shards, num_shards, is_sharded))
    return found


def check(
    name: str,
    recipe: Recipe,
    num_ranks: int,
    tolerance_of: Callable[[dict[str, Any]], Distance],
    configs: list[dict[str, Any]] | None = None,
) -> None:
    """Train a model under each config (every stage by default), and compare on each rank."""
    chosen = [{"stage": stage} for stage in STAGES] if configs is None else configs
    by_rank = run_ranks(distances, num_ranks, name, recipe, chosen, timeout_s=120)
    failures = []
    for rank, found in enumerate(by_rank):
        for config, distance in zip(chosen, found, strict=True):
            print(name, recipe, num_ranks, config, rank, distance)
            if not distance.within(tolerance_of(config)):
                failures.append(f"rank {rank}, {config}: {distance}, allowed {tolerance_of(config)}")
    assert not failures, "\n".join(failures)


# --- every model, every stage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_stage_has_the_bits_of_one_process_on_two_ranks(name: str) -> None:
    def tolerance_of(config: dict[str, Any]) -> Distance:
        return TOLERANCE if CASES[name].reuses_weights and config["stage"] >= 2 else EQUAL

    check(name, Recipe(), 2, tolerance_of)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ("t5", "bert", "vit") else name for name in CASES]
)  # others that reuse weights, or have no decoder, stay
def test_every_stage_has_the_bits_of_gradients_summed_in_rank_order_on_three_ranks(name: str) -> None:
    def tolerance_of(config: dict[str, Any]) -> Distance:
        # gloo's all-reduce is a ring, which adds in another order for every part of a tensor: stage 0, and scalars.
        is_ring = config["stage"] == 0 or name == "mlp"
        return TOLERANCE if is_ring or (CASES[name].reuses_weights and config["stage"] >= 2) else EQUAL

    check(name, Recipe(oracle="summed"), 3, tolerance_of)


# On two ranks all of these have the oracle's bits; on three, a ring adds in another order, and a third is not exact.


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", ["llama", "mlp"])
def test_every_stage_matches_ddp(name: str, num_ranks: int) -> None:
    check(name, Recipe(oracle="ddp"), num_ranks, lambda _: EQUAL if num_ranks == 2 else TOLERANCE)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", ["llama", "mlp"])
def test_native_collectives_match_one_process(name: str, num_ranks: int) -> None:
    configs = [{"stage": stage, "collectives": "native"} for stage in STAGES]
    check(name, Recipe(), num_ranks, lambda _: EQUAL if num_ranks == 2 else TOLERANCE, configs)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mlp"])
def test_shared_memory_has_the_bits_of_gradients_summed_in_rank_order(name: str, num_ranks: int) -> None:
    def tolerance_of(config: dict[str, Any]) -> Distance:
        is_ring = num_ranks == 3 and name == "mlp"  # a scalar, which gloo reduces
        return TOLERANCE if is_ring or (CASES[name].reuses_weights and config["stage"] >= 2) else EQUAL

    configs = [{"stage": stage, "collectives": "host"} for stage in (1, 2, 3)]
    check(name, Recipe(oracle="summed"), num_ranks, tolerance_of, configs)


@pytest.mark.parametrize(
    "variant", ["accumulation", "accumulation_no_sync", "checkpointing", "checkpointing_reentrant", "bf16_mlp"]
)
def test_shared_memory_matches_one_process_with_other_recipes(variant: str) -> None:
    if variant not in VARIANTS:
        pytest.skip("torch itself fails with this one")
    name, recipe, tolerance = VARIANTS[variant]
    configs = [{"stage": stage, "collectives": "host"} for stage in (1, 2, 3)]
    check(name, recipe, 2, lambda _: tolerance, configs)


# --- other ways to train --------------------------------------------------------------------------------------------

ACCUMULATED = Recipe(num_micros=2)

VARIANTS = {
    # What stages exchange after each micro-batch, one process adds up in another order.
    "accumulation": ("llama", ACCUMULATED, TOLERANCE),
    "accumulation_no_sync": ("llama", replace(ACCUMULATED, uses_no_sync=True), TOLERANCE),
    "accumulation_no_sync_tied": ("gpt2", replace(ACCUMULATED, uses_no_sync=True), TOLERANCE),
    "accumulation_no_sync_ddp": ("mlp", replace(ACCUMULATED, uses_no_sync=True, oracle="ddp"), TOLERANCE),
    # The norm that gradients are divided by is a sum over all elements, split differently.
    "clipping": ("llama", Recipe(max_norm=0.1), TOLERANCE),
    "clipping_mlp": ("mlp", Recipe(max_norm=0.1), TOLERANCE),
    "sgd_momentum": ("llama", Recipe("sgd"), EQUAL),
    "sgd_momentum_mlp": ("mlp", Recipe("sgd"), EQUAL),
    "foreach": ("llama", Recipe("adamw_foreach"), EQUAL),
    # The fused kernel treats the last elements of a tensor apart, and rows end elsewhere than whole tensors.
    "fused": ("llama", Recipe("adamw_fused"), TOLERANCE),
    "checkpointing": ("llama", Recipe(checkpointing=False), EQUAL),
    "checkpointing_reentrant": ("llama", Recipe(checkpointing=True), EQUAL),
    "bf16": ("llama", Recipe(bf16=True, oracle="summed"), EQUAL),
    "bf16_bert": ("bert", Recipe(bf16=True, oracle="summed"), EQUAL),
    "bf16_mlp": ("mlp", Recipe(bf16=True, oracle="summed"), EQUAL),
}
if torch.__version__ < "2.12":  # torch itself fails there, in the backward of a loss of two dtypes
    del VARIANTS["bf16_mlp"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_stage_matches_one_process_with_other_recipes(variant: str) -> None:
    name, recipe, tolerance = VARIANTS[variant]
    check(name, recipe, 2, lambda _: tolerance)


def gradients_in_rounds(bucket_bytes: int) -> tuple[list[Tensor], int]:
    """Runs on a rank: its gradients, and the bytes of the largest message of rows that it received."""
    torch.manual_seed(0)
    model, rank, width = Stack(240), dist.get_rank(), 240
    hf_zero.shard_model(model, {"stage": 2, "bucket_bytes": bucket_bytes})
    sizes = [0]
    receive = pairwise.PairwiseCollectives._receive

    def measured(self: Any, description: str, tensor: Tensor, *args: Any) -> Any:
        sizes.append(tensor.nbytes if description.startswith("reduce_scatter") else 0)
        return receive(self, description, tensor, *args)

    with mock.patch.object(pairwise.PairwiseCollectives, "_receive", measured):
        model(**stack_batch(0, rank, width)).backward()
    return [local(p.grad) for p in model.parameters()], max(sizes)


def test_gradients_larger_than_a_bucket_arrive_in_rounds_with_the_same_bits() -> None:
    found = run_ranks(gradients_in_rounds, 3, 100_000)
    for (gradients, largest), (expected, whole) in zip(found, run_ranks(gradients_in_rounds, 3, 2**26), strict=True):
        assert all(map(torch.equal, gradients, expected))
        assert 50_000 < largest <= 100_000 < whole


@pytest.mark.slow  # tests/engine/ranks/test_mesh.py has replicas every day
@pytest.mark.parametrize("name", ["llama", "mlp"])
def test_replicas_equal_one_process(name: str) -> None:
    recipe = Recipe(num_micros=2, uses_no_sync=True, max_norm=0.5, oracle="summed", num_steps=5)
    settings: list[dict[str, Any]] = [{"stage": stage} for stage in (1, 2, 3)]
    if name == "mlp":
        settings = [{"stage": 3, "collectives": kind} for kind in ("native", "host")]
        settings += [
            {"stage": 2, "reduce_scatter": False, "bucket_bytes": 1},
            {"stage": 1, "reduce_scatter": "to_owner"},
        ]
    check(name, recipe, 4, lambda _: TOLERANCE, [{**each, "replicate": 2} for each in settings])


def test_memory_and_traffic_settings_do_not_change_the_bits() -> None:
    settings = ({"prefetch_bytes": 0}, {"prefetch_bytes": 8000}, {"bucket_bytes": 1}, {"reshard_after_forward": False})
    check("llama", Recipe(), 2, lambda _: EQUAL, [{"stage": 3, **setting} for setting in settings])


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_units_that_stay_for_the_backward_do_not_change_the_bits(num_ranks: int) -> None:
    configs = [
        {"stage": 3, "prefetch_bytes": 0, **turn}
        for turn in turns_of("kept", {"reshard_after_forward": (True, "20KB", False, "auto"), "collectives": TWO_WAYS})
    ]
    check("llama", Recipe(), num_ranks, lambda _: EQUAL if num_ranks == 2 else TOLERANCE, configs)


def test_every_way_to_reduce_has_the_bits_of_one_process() -> None:
    # The model has rows that do not divide, and parameters that one rank or none has used.
    configs = [
        {"stage": turn["to"][1], "reduce_scatter": turn["to"][0], "collectives": turn["collectives"]}
        for turn in turns_of("ways", {"to": list(product((False, "to_owner"), (1, 2, 3))), "collectives": TWO_WAYS})
    ]
    check("mlp", Recipe(), 2, lambda _: EQUAL, configs)


def gradients_by_choice(stage: int, uses_no_sync: bool) -> list[list[dict[str, Tensor | None]]]:
    """Runs on a rank: its rows of the gradients under each way to reduce, over three steps of two micro-batches."""
    case, recipe = CASES["mlp"], Recipe(num_micros=2, uses_no_sync=uses_no_sync, num_steps=3)
    configs = [{"stage": stage, "reduce_scatter": choice} for choice in (True, False, "to_owner")]
    return [train_sharded(make_model(case), case, recipe, config, dist.get_rank()).gradients for config in configs]


@pytest.mark.parametrize("uses_no_sync", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ways_to_reduce_have_equal_bits_under_accumulation(stage: int, uses_no_sync: bool) -> None:
    for scattered, *others in run_ranks(gradients_by_choice, 2, stage, uses_no_sync):
        for other in others:
            for left, right in zip(scattered, other, strict=True):
                assert left.keys() == right.keys()
                assert all(_distance(left[name], right[name]) == 0.0 for name in left)


def test_unit_called_on_one_rank_only_has_the_bits_of_one_process_while_parameters_stay_whole() -> None:
    configs = [{"stage": stage, "units": {"min_numel": 1}} for stage in (0, 1, 2)]
    check("mlp", Recipe(), 2, lambda _: EQUAL, configs)


def norms_before_and_after_a_new_group(folder: str) -> tuple[float, float]:
    """Runs on a rank: the norm of the same gradients under two process groups, one after the other."""
    case, rank, num_ranks = CASES["llama"], dist.get_rank(), dist.get_world_size()
    norms = []
    for stages in ((0, 3), (3,)):
        for stage in stages:
            model = make_model(case)
            hf_zero.shard_model(model, {"stage": stage})
        case.loss(model, case.batch(0, rank)).backward()
        norms.append(item(_norm(list(model.parameters()))))
        del model
        gc.collect()  # else the old group lives on in its models
        dist.destroy_process_group()
        dist.init_process_group("gloo", f"file://{folder}/{len(norms)}", rank=rank, world_size=num_ranks)
    return norms[0], norms[1]


def test_norm_is_taken_over_the_present_group(tmp_path: Path) -> None:
    """torch caches its dispatch by meshes that compare equal, whatever process group they stand for."""
    for before, after in run_ranks(norms_before_and_after_a_new_group, 2, str(tmp_path)):
        assert before == after


# --- one process ----------------------------------------------------------------------------------------------------

ALONE = Distance(losses=0.0, gradients=0.0, norms=0.0, weights=0.0, evaluation=0.0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mlp"])
def test_world_of_one_has_the_bits_of_plain_training(name: str) -> None:
    found = run_alone(distances, name, Recipe(), [{"stage": stage} for stage in STAGES])
    assert found == [ALONE] * len(STAGES)


def test_world_of_one_in_bf16_has_the_bits_of_an_emulation() -> None:
    found = run_alone(distances, "llama", Recipe(bf16=True, oracle="summed"), [{"stage": stage} for stage in STAGES])
    assert found == [ALONE] * len(STAGES)


def traces_of_sharding(stage: int) -> list[str]:
    """Runs in one process: what of a model `shard_model` has changed besides the hooks of the model itself."""
    model = make_model(CASES["llama"])
    before = list(model.parameters())
    engine = hf_zero.shard_model(model, {"stage": stage})
    found = [unit.name for unit in engine.units]
    for path, module in model.named_modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
            if path and getattr(module, kind):
                found.append(f"{path}{kind}")
    for old, (name, new) in zip(before, model.named_parameters(), strict=True):
        if new is not old or isinstance(new, DTensor) or new._post_accumulate_grad_hooks or new._backward_hooks:
            found.append(name)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_world_of_one_leaves_parameters_and_inner_modules_alone(stage: int) -> None:
    assert run_alone(traces_of_sharding, stage) == []


# --- the comparison sees damage -------------------------------------------------------------------------------------


@contextlib.contextmanager
def ascent() -> Iterator[None]:
    """The optimizer steps in the wrong direction."""
    with mock.patch("torch.optim.AdamW", functools.partial(torch.optim.AdamW, maximize=True)):
        yield


@contextlib.contextmanager
def short_steps() -> Iterator[None]:
    """Every step is a thousandth too short."""
    original = torch.optim.AdamW

    def adamw(params: Any, lr: float, **options: Any) -> torch.optim.Optimizer:
        return original(params, lr=lr * 0.999, **options)

    with mock.patch("torch.optim.AdamW", adamw):
        yield


@contextlib.contextmanager
def missed_reduction() -> Iterator[None]:
    """A rank's rows are those of its own gradient only."""

    def reduce_scatter(self: Any, items: Any, outputs: Any, name: str, divisor: int = 1) -> exchange.Exchange:
        for rows, output in zip(items, outputs, strict=True):
            output.copy_(rows.flat[slice(*rows.layout.span(self.rank))] / divisor)
        return exchange.Exchange(name, 1.0)

    with mock.patch.object(pairwise.PairwiseCollectives, "reduce_scatter", reduce_scatter):
        yield


@contextlib.contextmanager
def stale_rows() -> Iterator[None]:
    """After a step, the first unit does not get the rows of the other ranks."""
    original = unit.Unit.changed

    def changed(self: unit.Unit, parameters: Any) -> None:
        original(self, parameters) if self.index else None

    with mock.patch.object(unit.Unit, "changed", changed):
        yield


@contextlib.contextmanager
def gradients_for_unused() -> Iterator[None]:
    """Parameters that no rank has used get zero gradients, with which AdamW decays them."""
    original = reduction.Reducer._agree

    def agree(self: Any, *args: Any) -> Any:
        reports = original(self, *args)
        return replace(reports, highest=replace(reports.highest, used=-1))

    with mock.patch.object(reduction.Reducer, "_agree", agree):
        yield


@contextlib.contextmanager
def forgotten_micro_batch() -> Iterator[None]:
    """The last micro-batch of a step replaces those before it."""
    original = accumulation.Accumulation._take

    def take(self: Any, p: Any, total: Any) -> Tensor | None:
        p.param.grad = None
        return original(self, p, total)

    with mock.patch.object(accumulation.Accumulation, "_take", take):
        yield


@contextlib.contextmanager
def unequal_start() -> Iterator[None]:
    """Ranks start from parameters of their own."""
    with mock.patch.object(world.World, "broadcast", lambda *_: None):
        yield


DAMAGES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    damage.__name__: damage
    for damage in (
        ascent,
        short_steps,
        missed_reduction,
        stale_rows,
        gradients_for_unused,
        forgotten_micro_batch,
        unequal_start,
    )
}


@pytest.mark.parametrize(
    ("damage", "name", "recipe", "configs"),
    [
        ("ascent", "llama", Recipe(), [{"stage": stage} for stage in STAGES]),
        ("short_steps", "llama", Recipe(), [{"stage": 0}, {"stage": 3}]),
        ("missed_reduction", "llama", Recipe(), [{"stage": stage} for stage in (1, 2, 3)]),
        ("stale_rows", "llama", Recipe(), [{"stage": stage} for stage in (1, 2)]),
        ("gradients_for_unused", "mlp", Recipe(), [{"stage": stage} for stage in (1, 2, 3)]),
        ("forgotten_micro_batch", "llama", replace(ACCUMULATED, uses_no_sync=True), [{"stage": 1}]),
        ("unequal_start", "llama", Recipe(), [{"stage": stage} for stage in STAGES]),
        ("", "llama", Recipe(), [{"stage": stage, "gradient_reduction": "sum"} for stage in STAGES]),
    ],
    ids=lambda value: (value or "summed_gradients") if isinstance(value, str) else "",
)
def test_comparison_fails_when_the_engine_is_broken(
    damage: str, name: str, recipe: Recipe, configs: list[dict[str, Any]]
) -> None:
    by_rank = run_ranks(distances, 2, name, recipe, configs, damage, timeout_s=120)
    for config, found in zip(configs, zip(*by_rank, strict=True), strict=True):
        print(damage, config, found)
        assert not all(distance.within(TOLERANCE) for distance in found), f"{config}: not seen: {found}"
