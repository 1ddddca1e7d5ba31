"""The start-up summary against a computation by hand, and against the tensors that live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero as zero
from hf_zero.layout import ALIGNMENT_BYTES
from hf_zero.plan.summary import Measured, Start, model_states, summary, summary_after
from hf_zero.torch_compat import local_of
from tests.engine.twins import SHARDED, STAGES
from tests.models import CASES, Stack, make_model, stack_batch
from tests.ranks import alone, on_ranks

WIDTH, BLOCKS, RANKS = 12, 3, 2
# Every dimension is even, so two ranks have equal rows without padding.
BLOCK_NUMEL = 2 * WIDTH + (2 * WIDTH * WIDTH + 2 * WIDTH) + (2 * WIDTH * WIDTH + WIDTH)
EMBEDDING_NUMEL, HEAD_NUMEL = 2 * WIDTH * WIDTH, 2 * WIDTH * WIDTH + 2 * WIDTH
NUMEL = EMBEDDING_NUMEL + BLOCKS * BLOCK_NUMEL + HEAD_NUMEL


def by_hand(stage: int, compute_bytes: int) -> dict[str, int]:
    """Bytes on one of two ranks: masters, gradients and states in fp32."""
    whole, half = 4 * NUMEL, 2 * NUMEL
    computes = compute_bytes * NUMEL
    gathered = computes // 2  # received: what the other rank has
    reduced = computes // 2 if stage >= 2 else whole // 2  # stages 0 and 1 add micro-batches up in fp32 first
    if compute_bytes == 4:
        parameters = {0: whole, 1: whole, 2: whole, 3: half}[stage]  # in stages 1 and 2 the rows lie inside the whole
    else:
        parameters = {0: whole + computes, 1: half + computes, 2: half + computes, 3: half}[stage]
    return {
        "parameters": parameters,
        "gradients": {0: whole, 1: whole, 2: half, 3: half}[stage],
        "optimizer": 2 * (whole if stage == 0 else half),
        "traffic": 2 * reduced
        if stage == 0
        else reduced + gathered,  # in stage 3 the forward's last units are kept: all
    }


@dataclass(frozen=True)
class Found:
    """What the summary of a training says, and the bytes of the tensors that live then."""

    states: Any
    rows: int
    gathered: int
    optimizer: int
    gradients: int
    text: str
    measured: Measured
    after: str
    short: str
    short_after: str


def measure(stage: int, compute: str = "float32", **config: Any) -> Found:
    torch.manual_seed(0)
    model = Stack(WIDTH, BLOCKS)
    engine = zero.shard_model(model, {"stage": stage, "compute_dtype": compute, "collectives": "pairwise", **config})
    optimizer = torch.optim.AdamW(model.parameters())
    start = Start.of(engine, 0)
    for step in range(2):
        model(**stack_batch(step, dist.get_rank(), WIDTH)).backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    params = [p.param for p in engine.parameters]
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    measured = Measured.since(start, engine, optimizer.state, 2)
    return Found(
        states=model_states(engine),
        rows=sum(local_of(param.data).nbytes for param in params),
        gathered=sum(unit._storage.nbytes() for unit in engine.units),
        optimizer=sum(local_of(value).nbytes for value in moments),
        gradients=sum(local_of(param.grad).nbytes for param in params),
        text=summary(engine),
        measured=measured,
        after=summary_after(engine, measured),
        short=summary(engine, is_full=False),
        short_after=summary_after(engine, measured, is_full=False),
    )


@on_ranks(RANKS, stage=STAGES, compute=["float32", "bfloat16"])
def test_bytes_are_those_of_a_hand_computation_and_of_live_tensors(stage: int, compute: str) -> None:
    found, compute_bytes = measure(stage, compute), 4 if compute == "float32" else 2
    expected = by_hand(stage, compute_bytes)
    assert {name: getattr(found.states, name) for name in expected} == expected
    assert found.optimizer == found.states.optimizer
    assert found.rows == 4 * NUMEL // (1 if stage == 0 else RANKS)
    if stage in (2, 3):
        assert found.gradients == found.states.gradients
    if stage == 3:
        assert found.rows == found.states.parameters
    computes = 0 if stage == 3 or (stage, compute_bytes) == (0, 4) else compute_bytes * NUMEL
    num_tensors = 2 + 6 * BLOCKS + 1
    assert computes <= found.gathered <= computes + ALIGNMENT_BYTES * num_tensors
    largest = max(BLOCK_NUMEL, EMBEDDING_NUMEL, HEAD_NUMEL) * compute_bytes
    assert largest <= found.states.largest_unit < largest + 6 * ALIGNMENT_BYTES or (stage, compute_bytes) == (0, 4)


@on_ranks(RANKS, choice=[(False, 2), ("to_owner", 1)])
def test_traffic_is_that_of_the_exchange_asked_for(choice: tuple[bool | str, int]) -> None:
    found, (name, share) = measure(2, reduce_scatter=choice[0]), choice
    gathered = reduced = 4 * NUMEL // 2
    assert found.states.traffic == gathered + share * reduced
    assert f"pairwise on gloo, reduce_scatter: {str(name).lower()}" in found.text


@on_ranks(RANKS)
def test_traffic_of_stage_3_counts_what_the_backward_gathers_again() -> None:
    once, resharded = 4 * 2 * NUMEL // 2, 4 * (3 * NUMEL - EMBEDDING_NUMEL) // 2
    assert measure(3, prefetch_bytes=0, reshard_after_forward=True).states.traffic == resharded
    assert measure(3, prefetch_bytes=0, reshard_after_forward=4 * BLOCK_NUMEL + 999).states.traffic in range(
        once, resharded
    )
    assert measure(3, prefetch_bytes=0).states.traffic == once  # two steps have run, and there is room for all


@on_ranks(RANKS, stage=SHARDED, prefetch_bytes=[0, 2**26], reshards=[True, False, "auto", "20KB"])
def test_traffic_of_a_tied_weight_is_that_of_all_its_uses(
    stage: int, prefetch_bytes: int, reshards: bool | str
) -> None:
    if stage < 3:
        if not prefetch_bytes:
            return
        reshards = True
    model = make_model(CASES["t5"])  # a weight for two embeddings and the head
    config = {"stage": stage, "prefetch_bytes": prefetch_bytes, "reshard_after_forward": reshards}
    engine = zero.shard_model(model, config | {"collectives": "pairwise"})
    optimizer, ledger = torch.optim.AdamW(model.parameters()), engine.world.ledger
    for step in range(3):
        ledger.reset()
        model(**CASES["t5"].batch(step, dist.get_rank())).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = sum(ledger.total(kind).bytes for kind in ("gather", "reduce_scatter"))
    assert model_states(engine).traffic == pytest.approx(moved, rel=5e-3)  # one rank has a row more


@on_ranks(RANKS, stage=SHARDED)
def test_parameters_that_ranks_share_count_once_and_do_not_move(stage: int) -> None:
    found = measure(stage, collectives="host")
    assert found.states.parameters == 4 * NUMEL // RANKS
    assert found.states.traffic == 4 * NUMEL // 2
    assert found.gathered >= 4 * NUMEL and "host on gloo" in found.text


@on_ranks(RANKS)
def test_the_text_is_short_and_names_what_counts() -> None:
    text = measure(3, "bfloat16").text
    lines = text.splitlines()
    assert len(lines) <= 15
    assert all(len(line) <= 100 for line in lines)
    assert "stage               3, world size 2" in text
    assert "pairwise on gloo" in text
    assert f"{NUMEL:,} ({NUMEL:,} trainable)" in text
    assert "compute bfloat16, norms too (see keep_fp32); optimizer updates float32" in text


@on_ranks(RANKS, stage=[1, 3])
def test_the_text_at_the_end_has_what_was_measured_beside_what_was_expected(stage: int) -> None:
    found = measure(stage)
    counters = 4 * (2 + 6 * BLOCKS + 1)
    assert found.measured.optimizer == found.states.optimizer + counters
    assert found.measured.traffic >= found.states.traffic // 2
    assert found.after.startswith("hf_zero, after 2 steps\n") and "of the process" in found.after
    peak = next(line for line in found.after.splitlines() if line.startswith("  peak"))
    assert peak.count("MiB") == 1  # nothing is expected of a process that is mostly programs


@on_ranks(RANKS, stage=STAGES)
def test_the_short_text_is_four_lines_and_reads_well_of_a_small_model(stage: int) -> None:
    found = measure(stage)
    assert len(found.short.splitlines()) == 4 and len(found.short_after.splitlines()) == 2
    assert f"hf_zero: stage {stage}, world size 2, exchange pairwise on gloo" in found.short
    assert f"{found.states.parameters / 2**10:.1f} KiB parameters" in found.short
    assert f"{found.states.traffic / 2**10:.1f} KiB received" in found.short
    assert all(len(line) <= 128 for line in [*found.short.splitlines(), *found.short_after.splitlines()])
    assert "expected" not in found.short_after and "0.0" not in found.short


@alone()
def test_one_process_with_frozen_parameters() -> None:
    model = Stack(WIDTH, BLOCKS)
    model.blocks.requires_grad_(False)
    engine = zero.shard_model(model, {"stage": 3})
    states, text, trainable = model_states(engine), summary(engine), EMBEDDING_NUMEL + HEAD_NUMEL
    assert f"{NUMEL:,} ({trainable:,} trainable)" in text
    assert "none (one process)" in text
    assert (states.optimizer, states.traffic) == (2 * 4 * trainable, 0)


def _sizes(replicate: int) -> tuple[int, int, int, str]:
    """Bytes that a rank holds and receives from other replicas, by the formula for hosts and as it is."""
    torch.manual_seed(0)
    model = Stack(20 * WIDTH, BLOCKS)
    engine = zero.shard_model(model, {"stage": 3, "collectives": "pairwise", "replicate": replicate})
    model(**stack_batch(0, dist.get_rank(), 20 * WIDTH)).backward()
    held = model_states(engine)
    object.__setattr__(engine.world, "num_hosts", 2)
    between = engine.world.ledger.total("all_reduce").bytes
    return held.parameters + held.gradients + held.optimizer, held.sharded, between, summary(engine)


@on_ranks(4)
def test_the_text_says_what_replicas_would_save_between_hosts_and_cost() -> None:
    held, sharded, between, text = _sizes(1)
    with_replicas, _, moved, other = _sizes(2)
    assert between == 0 < moved
    assert with_replicas - held == sharded  # by measuring: one more of what was cut
    row = next(line for line in text.splitlines() if "between hosts" in line)
    assert f"with replicate: 2, {moved / 2**20:.1f} MiB and {sharded / 2**20:.1f} MiB more memory a rank" in row
    assert "between hosts" not in other  # it has them


@on_ranks(RANKS)
def test_autocast_is_named_where_it_decides() -> None:
    engine = zero.shard_model(Stack(WIDTH, BLOCKS), zero.ZeroConfig(stage=0))
    assert "compute float32, autocast to bf16 (as DDP); optimizer updates float32" in summary(engine, "bf16")
    assert "autocast" not in summary(engine)
