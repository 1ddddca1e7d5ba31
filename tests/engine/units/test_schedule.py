"""The orders: whatever each rank's backward does, all ranks reduce alike; a gather order foretells what it has seen."""

from collections import Counter
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import hf_zero as zero
from hf_zero.comm.exchange import Exchange
from hf_zero.engine.units.schedule import GatherSchedule, ReductionSchedule, first_uses
from hf_zero.engine.units.unit import Unit
from hf_zero.plan.models import config_of
from tests.ranks import on_ranks

_EXPECTED = st.lists(st.integers(0, 5), max_size=8)
_READY = st.lists(st.integers(0, 5), max_size=10)


def _run(expected: list[int], ready: list[int]) -> tuple[list[int], ReductionSchedule]:
    order = ReductionSchedule(list(expected))
    issued = [unit for event in ready for unit in order.ready(event)]
    return issued + order.rest(), order


@given(_EXPECTED, st.lists(_READY, min_size=2, max_size=4))
def test_all_ranks_issue_the_same_reductions_whatever_is_ready(expected, ready_by_rank):
    assert all(_run(expected, ready)[0] == expected for ready in ready_by_rank)


@given(_EXPECTED, _READY)
def test_every_gradient_is_reduced_or_left_over_once(expected, ready):
    _, order = _run(expected, ready)
    assert Counter(order.waiting) == Counter(ready) - Counter(expected)
    assert order.seen == ready


@given(_EXPECTED, st.data())
def test_gradients_in_the_expected_order_are_issued_at_once(expected, data):
    order = ReductionSchedule(list(expected))
    for unit in expected:
        assert order.ready(unit) == [unit]
    assert order.rest() == order.waiting == []
    assert not order.is_unexpected()


@given(_EXPECTED, st.data())
def test_skipped_units_are_expected_and_reduced_at_the_end(expected, data):
    keeps = data.draw(st.lists(st.booleans(), min_size=len(expected), max_size=len(expected)))
    ready = [unit for unit, is_kept in zip(expected, keeps, strict=True) if is_kept]
    issued, order = _run(expected, ready)
    assert issued == expected
    assert not order.waiting
    assert not order.is_unexpected()


@given(_EXPECTED, _READY)
def test_nothing_is_issued_before_its_turn(expected, ready):
    order = ReductionSchedule(list(expected))
    issued: list[int] = []
    for position, unit in enumerate(ready, start=1):
        issued += order.ready(unit)
        assert issued == expected[: len(issued)]
        assert not Counter(issued) - Counter(ready[:position])


@given(_EXPECTED, _READY)
def test_unexpected_means_no_subsequence_of_the_expected_order(expected, ready):
    _, order = _run(expected, ready)
    position, is_subsequence = 0, True
    for unit in ready:
        while position < len(expected) and expected[position] != unit:
            position += 1
        is_subsequence = is_subsequence and position < len(expected)
        position += 1
    assert order.is_unexpected() is not is_subsequence


@given(_READY, _READY)
def test_gather_order_foretells_the_recorded_pass_until_it_is_left(recorded, now):
    order = GatherSchedule()
    order.begin("forward")
    for unit in recorded:
        assert list(order.use(unit)) == []
    order.end()
    order.begin("forward")
    follows = True
    for position, unit in enumerate(now):
        follows = follows and position < len(recorded) and recorded[position] == unit
        assert list(order.use(unit)) == (recorded[position + 1 :] if follows else [])


@given(_READY.filter(bool), _READY)
def test_broken_pass_and_other_kinds_leave_the_record_alone(recorded, other):
    order = GatherSchedule()
    order.begin("forward")
    for unit in recorded:
        order.use(unit)
    order.end()
    for kind, finish in (("forward", order.abandon), ("backward", order.end)):
        order.begin(kind)
        for unit in other:
            order.use(unit)
        finish()
    assert order.recorded["forward"] == recorded
    assert list(order.use(recorded[0])) == []
    order.begin("forward")
    assert list(order.use(recorded[0])) == recorded[1:]


def test_first_uses_are_the_reductions_from_the_last_to_the_first() -> None:
    assert first_uses([3, 2, 1, 0]) == [0, 1, 2, 3]
    assert first_uses([0, 3, 1, 0, 2]) == [2, 0, 1, 3]


@on_ranks(2, timeout_s=240)
def test_every_gather_of_a_micro_step_but_the_first_has_compute_beside_it() -> None:
    """With the default configuration, on blocks of the shapes of a 1B model, each larger than `prefetch_bytes`."""
    config = config_of("llama-1b")
    config.num_hidden_layers, config.vocab_size = 3, 512
    with zero.Init({"stage": 3, "compute_dtype": "bfloat16", "collectives": "pairwise"}):
        model = AutoModelForCausalLM.from_config(config)
    engine = zero.shard_model(model)
    assert max(unit.buffer_nbytes for unit in engine.units) > engine.world.config.prefetch_bytes
    for kind in ("gather", "reduce_scatter"):
        setattr(engine.world.shards, kind, lambda *_: Exchange("nothing", 0.0))  # nothing is sent
    steps: list[list[tuple[str, int]]] = []
    start, acquire = Unit.start_gather, Unit.acquire

    def note_start(self: Unit, *args: object) -> None:
        steps[-1].append(("start", self.index))
        start(self, *args)

    def note_wait(self: Unit) -> object:
        steps[-1].append(("wait", self.index))
        return acquire(self)

    ids = torch.zeros(1, 4, dtype=torch.int64)
    with mock.patch.object(Unit, "start_gather", note_start), mock.patch.object(Unit, "acquire", note_wait):
        for _ in range(5):
            steps.append([])
            model(input_ids=ids, labels=ids).loss.backward()
    for events in steps[1:]:  # the first has no recorded order
        exposed = []
        for place, (kind, unit) in enumerate(events):
            if kind == "start":
                until = events.index(("wait", unit), place)
                if all(other != "wait" for other, _ in events[place:until]):  # nothing else is used meanwhile
                    exposed.append(unit)
        gathers = [unit for kind, unit in events if kind == "start"]
        assert exposed == gathers[:1] and len(gathers) > len(engine.units)
