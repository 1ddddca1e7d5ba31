"""The ledger: sums of entries, and that every stage moves the bytes that it should, to the byte.

Of `P` bytes, padded to equal rows a rank, a rank receives `P * (N - 1) / N` in a gather, in a reduce-scatter and in reductions
to each owner, and twice that in an all-reduce.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.comm.ledger import Ledger
from tests.models import CASES, Stack, make_model, stack_batch
from tests.ranks import run_alone, run_ranks

NUM_STEPS = 3
Counts = dict[tuple[str, str], tuple[int, int]]
"""Calls and bytes by kind of exchange and unit."""


# --- the ledger itself ----------------------------------------------------------------------------------------------


def test_total_sums_over_units_of_one_kind_or_of_all() -> None:
    ledger = Ledger()
    ledger.add("gather", "a", 10).seconds += 0.5
    ledger.add("gather", "a", 10)
    ledger.add("gather", "b", 1)
    ledger.add("agree", "b", 100)
    assert (ledger.total("gather").calls, ledger.total("gather").bytes, ledger.total("gather").seconds) == (3, 21, 0.5)
    assert (ledger.total().calls, ledger.total().bytes) == (4, 121)
    assert ledger.total("broadcast").calls == 0
    assert ledger.kinds() == ("agree", "gather")


def test_reset_forgets_everything() -> None:
    ledger = Ledger()
    ledger.add("gather", "a", 10)
    ledger.reset()
    assert ledger.total().bytes == 0
    assert ledger.kinds() == ()


def test_table_has_a_line_for_each_kind() -> None:
    ledger = Ledger()
    ledger.add("gather", "a", 3 * 2**20)
    ledger.add("reduce_scatter", "a", 2**20)
    header, *lines = ledger.table().splitlines()
    assert header.split() == ["exchange", "calls", "MiB", "wait", "s"]
    assert [line.split()[:3] for line in lines] == [["gather", "1", "3.00"], ["reduce_scatter", "1", "1.00"]]


# --- what the stages move -------------------------------------------------------------------------------------------


def counts_of_training(
    config: dict[str, Any], model_name: str = "stack", num_micros: int = 1, uses_no_sync: bool = False
) -> tuple[Counts, dict[str, dict[str, tuple[int, ...]]]]:
    """Runs on a rank: counts of `NUM_STEPS` steps, and each unit's parameters with their shapes."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model: nn.Module
    if model_name == "stack":
        torch.manual_seed(0)
        model = Stack()
    else:
        model = make_model(CASES[model_name])
    engine = hf_zero.shard_model(model, {"prefetch_bytes": 0, **config})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    units = {unit.name: {p.name: tuple(p.param.shape) for p in unit.parameters} for unit in engine.units}
    engine.world.ledger.reset()  # what the start took is not a step's traffic
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for micro in range(num_micros):
            waits = uses_no_sync and micro < num_micros - 1
            with model.no_sync() if waits else contextlib.nullcontext():
                if model_name == "stack":
                    loss = model(**stack_batch(step, rank))
                else:
                    loss = CASES[model_name].loss(model, CASES[model_name].batch(step, rank, micro))
                loss.backward()
        optimizer.step()
    entries = engine.world.ledger.entries
    return {key: (entry.calls, entry.bytes) for key, entry in entries.items() if key[0] != "agree"}, units


def numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def gathers_of_step(stage: int, unit: str, num_micros: int = 1) -> int:
    """How often a unit is gathered: in stage 3 for each forward, and for each backward that reads its parameters."""
    return num_micros * (1 if unit == "embedding" else 2) if stage == 3 else 1


@pytest.mark.parametrize(("num_micros", "uses_no_sync"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stage_moves_the_bytes_of_its_units_exactly(
    stage: int, num_ranks: int, num_micros: int, uses_no_sync: bool
) -> None:
    by_rank = run_ranks(counts_of_training, num_ranks, {"stage": stage}, "stack", num_micros, uses_no_sync)
    num_reductions = NUM_STEPS * (1 if uses_no_sync and stage == 1 else num_micros)
    for counts, units in by_rank:
        expected = {}
        for unit, shapes in units.items():
            received = sum(4 * numel(shape) for shape in shapes.values()) * (num_ranks - 1) // num_ranks
            num_gathers = NUM_STEPS * gathers_of_step(stage, unit, num_micros)
            expected["gather", unit] = num_gathers, num_gathers * received
            expected["reduce_scatter", unit] = num_reductions, num_reductions * received
        assert counts == expected


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_stage_0_all_reduces_twice_the_bytes_once_a_synchronised_micro_batch(num_ranks: int) -> None:
    total = sum(4 * p.numel() for p in Stack().parameters())
    received = 2 * total * (num_ranks - 1) // num_ranks
    for num_micros, uses_no_sync, num_reductions in ((1, False, 1), (2, False, 2), (2, True, 1)):
        for counts, units in run_ranks(counts_of_training, num_ranks, {"stage": 0}, "stack", num_micros, uses_no_sync):
            assert units == {}
            calls = NUM_STEPS * num_reductions
            assert counts == {("all_reduce", "gradients"): (calls, calls * received)}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_bf16_gathers_two_bytes_an_element_and_reduces_two_or_four(num_ranks: int) -> None:
    numel_of_model = sum(p.numel() for p in Stack().parameters())
    received = numel_of_model * (num_ranks - 1) // num_ranks
    twice = 2 * received - Stack().embedding.weight.numel() * (num_ranks - 1) // num_ranks  # backward needs it not
    scatters_two, scatters_four = {"reduce_scatter": 2 * received}, {"reduce_scatter": 4 * received}
    cases: list[tuple[dict[str, Any], dict[str, int]]] = [
        ({"stage": 0}, {"all_reduce": 2 * 4 * received}),
        # Micro-batches are added up before they are sent: that sum is float32.
        ({"stage": 1}, {"gather": 2 * received, **scatters_four}),
        # Gradients travel as autograd made them, and are added up where they arrive.
        ({"stage": 2}, {"gather": 2 * received, **scatters_two}),
        ({"stage": 3}, {"gather": 2 * twice, **scatters_two}),
        # The transport adds, so it is given float32.
        ({"stage": 3, "collectives": "native"}, {"gather": 2 * twice, **scatters_four}),
        ({"stage": 2, "reduce_scatter": "to_owner"}, {"gather": 2 * received, "reduce": 4 * received}),
        ({"stage": 2, "reduce_scatter": False}, {"gather": 2 * received, "all_reduce": 2 * 4 * received}),
        ({"stage": 1, "reduce_dtype": "bfloat16"}, {"gather": 2 * received, **scatters_two}),
        # A sum in fewer bits is made of terms in fewer bits.
        (
            {"stage": 2, "compute_dtype": "float32", "reduce_dtype": "bfloat16"},
            {"gather": 4 * received, **scatters_two},
        ),
    ]
    for config, expected in cases:
        for counts, _ in run_ranks(counts_of_training, num_ranks, {"compute_dtype": "bfloat16", **config}):
            by_kind: dict[str, int] = {}
            for (kind, _), (_, num_bytes) in counts.items():
                by_kind[kind] = by_kind.get(kind, 0) + num_bytes
            assert by_kind == {kind: NUM_STEPS * num_bytes for kind, num_bytes in expected.items()}, config


def test_units_that_backward_needs_first_are_gathered_once() -> None:
    block = 4 * sum(p.numel() for p in Stack().blocks[0].parameters())
    for counts, units in run_ranks(counts_of_training, 2, {"stage": 3, "prefetch_bytes": 2 * block}):
        gathers = {unit: counts["gather", unit][0] for unit in units}
        assert gathers == {"embedding": 3, "blocks.0": 6, "blocks.1": 6, "blocks.2": 3, "head": 3}


def uneven_bytes(shape: tuple[int, ...], rank: int, num_ranks: int, collectives: str) -> tuple[int, int]:
    """Bytes that `rank` receives in a gather and in a reduce-scatter of one fp32 parameter."""
    own = [numel(tuple(chunk.shape)) for chunk in torch.empty(shape).chunk(num_ranks)] + [0] * num_ranks
    if collectives == "native":
        return 4 * own[0] * (num_ranks - 1), 4 * own[0] * (num_ranks - 1)
    return 4 * (numel(shape) - own[rank]), 4 * own[rank] * (num_ranks - 1)


@pytest.mark.parametrize("collectives", ["native", "pairwise"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_uneven_rows_are_padded_by_native_collectives_only(num_ranks: int, collectives: str) -> None:
    for stage in (1, 2, 3):
        config = {"stage": stage, "collectives": collectives}
        for rank, (counts, units) in enumerate(run_ranks(counts_of_training, num_ranks, config, "bert")):
            is_uneven = False
            for unit, shapes in units.items():
                received = [uneven_bytes(shape, rank, num_ranks, collectives) for shape in shapes.values()]
                gathered, reduced = (sum(column) for column in zip(*received, strict=True))
                is_uneven |= any(shape[0] % num_ranks for shape in shapes.values())
                num_gathers = NUM_STEPS * gathers_of_step(stage, unit)
                assert counts["gather", unit] == (num_gathers, num_gathers * gathered)
                assert counts["reduce_scatter", unit] == (NUM_STEPS, NUM_STEPS * reduced)
            assert is_uneven


def bytes_of_choice(choice: bool | str, shapes: list[tuple[int, ...]], rank: int, num_ranks: int) -> tuple[str, int]:
    """The kind of exchange that `reduce_scatter: choice` asks for, and the bytes that `rank` then receives (fp32)."""
    own = sum(uneven_bytes(shape, rank, num_ranks, "pairwise")[1] for shape in shapes)
    return {
        True: ("reduce_scatter", own),
        False: ("all_reduce", 2 * 4 * sum(map(numel, shapes)) * (num_ranks - 1) // num_ranks),
        "to_owner": ("reduce", own),
    }[choice]


@pytest.mark.parametrize("choice", [True, False, "to_owner"])
def test_reduce_scatter_runs_the_exchange_that_was_asked_for(choice: bool | str) -> None:
    for num_ranks, model_name in ((2, "bert"), (3, "stack")):
        for stage in (1, 2, 3):
            config = {"stage": stage, "reduce_scatter": choice}
            for rank, (counts, units) in enumerate(run_ranks(counts_of_training, num_ranks, config, model_name)):
                assert {kind for kind, _ in counts} == {"gather", bytes_of_choice(choice, [], 0, num_ranks)[0]}
                for unit, shapes in units.items():
                    kind, received = bytes_of_choice(choice, list(shapes.values()), rank, num_ranks)
                    assert counts[kind, unit] == (NUM_STEPS, NUM_STEPS * received)


def test_reduction_to_owners_runs_with_native_collectives_too() -> None:
    config = {"stage": 2, "reduce_scatter": "to_owner", "collectives": "native"}
    for counts, _ in run_ranks(counts_of_training, 2, config):
        assert {kind for kind, _ in counts} == {"gather", "reduce"}


def test_frozen_parameters_are_gathered_but_not_reduced() -> None:
    for counts, units in run_ranks(counts_of_frozen_head, 2):
        head = 4 * sum(numel(shape) for shape in units["head"].values()) // 2
        assert counts["gather", "head"] == (2 * NUM_STEPS, 2 * NUM_STEPS * head)
        assert ("reduce_scatter", "head") not in counts


def counts_of_frozen_head() -> tuple[Counts, dict[str, dict[str, tuple[int, ...]]]]:
    torch.manual_seed(0)
    model = Stack()
    model.head.requires_grad_(False)
    engine = hf_zero.shard_model(model, {"stage": 3, "prefetch_bytes": 0})
    units = {unit.name: {p.name: tuple(p.param.shape) for p in unit.parameters} for unit in engine.units}
    engine.world.ledger.reset()
    for step in range(NUM_STEPS):
        model(**stack_batch(step, dist.get_rank())).backward()
    return {key: (entry.calls, entry.bytes) for key, entry in engine.world.ledger.entries.items()}, units


def test_world_of_one_moves_nothing() -> None:
    for stage in range(4):
        counts, _ = run_alone(counts_of_training, {"stage": stage})
        assert counts == {}


def bytes_of_agreements(width: int) -> tuple[int, int]:
    """Runs on a rank: calls and bytes of agreements of one micro-batch."""
    torch.manual_seed(0)
    model = Stack(width)
    engine = hf_zero.shard_model(model, {"stage": 3})
    engine.world.ledger.reset()
    model(**stack_batch(0, dist.get_rank(), width)).backward()
    sums = engine.world.ledger.total("agree")
    return sums.calls, sums.bytes


def test_agreements_do_not_grow_with_the_parameters() -> None:
    small, large = run_ranks(bytes_of_agreements, 2, 12), run_ranks(bytes_of_agreements, 2, 48)
    assert small == large
    assert all(0 < num_bytes < 4096 for _, num_bytes in small)
