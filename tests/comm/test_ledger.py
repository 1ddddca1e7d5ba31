"""The ledger: sums of entries, and that every stage moves the bytes that it should, to the byte.

Of `P` bytes, padded to equal rows a rank, a rank receives `P * (N - 1) / N` in a gather, in a reduce-scatter and in reductions
to each owner, and twice that in an all-reduce.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.comm.ledger import Ledger
from hf_zero.layout import place
from tests.engine.twins import SHARDED, STAGES
from tests.models import CASES, Stack, make_model, stack_batch
from tests.ranks import alone, on_ranks, run_ranks

NUM_STEPS = 2
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


Units = dict[str, dict[str, tuple[int, ...]]]
"""The shapes of each unit's parameters."""


def counts_of_training(
    config: dict[str, Any],
    model_name: str = "stack",
    num_micros: int = 1,
    uses_no_sync: bool = False,
    change: Callable[[nn.Module], object] = lambda model: None,
) -> tuple[Counts, Units]:
    """What `NUM_STEPS` steps of this rank move."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model: nn.Module = Stack() if model_name == "stack" else make_model(CASES[model_name])
    change(model)
    engine = hf_zero.shard_model(model, {"prefetch_bytes": 0, "reshard_after_forward": True, **config})
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


MICROS = [(1, False), (2, False), (2, True)]  # micro-batches, and whether all but the last are under `no_sync`


@on_ranks(2, 3, stage=SHARDED, micros=MICROS)
def test_stage_moves_the_bytes_of_its_units_exactly(stage: int, micros: tuple[int, bool]) -> None:
    (num_micros, uses_no_sync), num_ranks = micros, dist.get_world_size()
    counts, units = counts_of_training({"stage": stage}, "stack", num_micros, uses_no_sync)
    num_reductions = NUM_STEPS * (1 if uses_no_sync and stage == 1 else num_micros)
    expected = {}
    for unit, shapes in units.items():
        received = sum(4 * numel(shape) for shape in shapes.values()) * (num_ranks - 1) // num_ranks
        num_gathers = NUM_STEPS * gathers_of_step(stage, unit, num_micros)
        expected["gather", unit] = num_gathers, num_gathers * received
        expected["reduce_scatter", unit] = num_reductions, num_reductions * received
    assert counts == expected


@on_ranks(2, 3, micros=MICROS)
def test_stage_0_all_reduces_twice_the_bytes_once_a_synchronised_micro_batch(micros: tuple[int, bool]) -> None:
    (num_micros, uses_no_sync), num_ranks = micros, dist.get_world_size()
    total = sum(4 * p.numel() for p in Stack().parameters())
    counts, units = counts_of_training({"stage": 0}, "stack", num_micros, uses_no_sync)
    assert units == {}
    calls = NUM_STEPS * (1 if uses_no_sync else num_micros)
    assert counts == {("all_reduce", "gradients"): (calls, calls * 2 * total * (num_ranks - 1) // num_ranks)}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_bf16_gathers_two_bytes_an_element_and_reduces_two_or_four(num_ranks: int) -> None:
    run_ranks(bytes_in_bf16, num_ranks)


def bytes_in_bf16() -> None:
    num_ranks = dist.get_world_size()
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
        by_kind: Counter[str] = Counter()
        for (kind, _), (_, num_bytes) in counts_of_training({"compute_dtype": "bfloat16", **config})[0].items():
            by_kind[kind] += num_bytes
        assert by_kind == {kind: NUM_STEPS * num_bytes for kind, num_bytes in expected.items()}, config


@on_ranks(2)
def test_units_that_backward_needs_first_are_gathered_once() -> None:
    block = place([4 * p.numel() for p in Stack().blocks[0].parameters()])[1]
    counts, units = counts_of_training({"stage": 3, "prefetch_bytes": 2 * block})
    gathers = {unit: counts["gather", unit][0] for unit in units}
    assert gathers == {unit: NUM_STEPS * (2 if unit in ("blocks.0", "blocks.1") else 1) for unit in units}
    assert len(gathers) == 5


def uneven_bytes(shape: tuple[int, ...], collectives: str) -> tuple[int, int]:
    """Bytes that this rank receives in a gather and in a reduce-scatter of one fp32 parameter."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    own = [numel(tuple(chunk.shape)) for chunk in torch.empty(shape).chunk(num_ranks)] + [0] * num_ranks
    if collectives == "native":
        return 4 * own[0] * (num_ranks - 1), 4 * own[0] * (num_ranks - 1)
    return 4 * (numel(shape) - own[rank]), 4 * own[rank] * (num_ranks - 1)


@on_ranks(2, 3, collectives=["native", "pairwise"], stage=SHARDED)
def test_uneven_rows_are_padded_by_native_collectives_only(stage: int, collectives: str) -> None:
    counts, units = counts_of_training({"stage": stage, "collectives": collectives}, "bert")
    for unit, shapes in units.items():
        received = [uneven_bytes(shape, collectives) for shape in shapes.values()]
        gathered, reduced = (sum(column) for column in zip(*received, strict=True))
        num_gathers = NUM_STEPS * gathers_of_step(stage, unit)
        assert counts["gather", unit] == (num_gathers, num_gathers * gathered)
        assert counts["reduce_scatter", unit] == (NUM_STEPS, NUM_STEPS * reduced)
    assert any(shape[0] % dist.get_world_size() for shapes in units.values() for shape in shapes.values())


def bytes_of_choice(choice: bool | str, shapes: list[tuple[int, ...]]) -> tuple[str, int]:
    """The kind of exchange that `reduce_scatter: choice` asks for, and the bytes that this rank then receives (fp32)."""
    own, num_ranks = sum(uneven_bytes(shape, "pairwise")[1] for shape in shapes), dist.get_world_size()
    return {
        True: ("reduce_scatter", own),
        False: ("all_reduce", 2 * 4 * sum(map(numel, shapes)) * (num_ranks - 1) // num_ranks),
        "to_owner": ("reduce", own),
    }[choice]


@on_ranks(2, 3, choice=[True, False, "to_owner"], stage=SHARDED)
def test_reduce_scatter_runs_the_exchange_that_was_asked_for(stage: int, choice: bool | str) -> None:
    model_name = "bert" if dist.get_world_size() == 2 else "stack"
    counts, units = counts_of_training({"stage": stage, "reduce_scatter": choice}, model_name)
    assert {kind for kind, _ in counts} == {"gather", bytes_of_choice(choice, [])[0]}
    for unit, shapes in units.items():
        kind, received = bytes_of_choice(choice, list(shapes.values()))
        assert counts[kind, unit] == (NUM_STEPS, NUM_STEPS * received)


@on_ranks(2)
def test_reduction_to_owners_runs_with_native_collectives_too() -> None:
    counts, _ = counts_of_training({"stage": 2, "reduce_scatter": "to_owner", "collectives": "native"})
    assert {kind for kind, _ in counts} == {"gather", "reduce"}


@on_ranks(2)
def test_frozen_parameters_are_gathered_but_not_reduced() -> None:
    counts, units = counts_of_training({"stage": 3}, change=lambda model: model.head.requires_grad_(False))
    head = 4 * sum(numel(shape) for shape in units["head"].values()) // 2
    assert counts["gather", "head"] == (2 * NUM_STEPS, 2 * NUM_STEPS * head)
    assert ("reduce_scatter", "head") not in counts


@alone(stage=STAGES)
def test_world_of_one_moves_nothing(stage: int) -> None:
    assert counts_of_training({"stage": stage})[0] == {}


@on_ranks(2)
def test_agreements_do_not_grow_with_the_parameters() -> None:
    """Of one micro-batch."""
    found = []
    for width in (12, 48):
        torch.manual_seed(0)
        model = Stack(width)
        ledger = hf_zero.shard_model(model, {"stage": 3}).world.ledger
        ledger.reset()
        model(**stack_batch(0, dist.get_rank(), width)).backward()
        found.append((ledger.total("agree").calls, ledger.total("agree").bytes))
    assert found[0] == found[1]
    assert 0 < found[0][1] < 4096
