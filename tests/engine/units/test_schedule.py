"""The orders: whatever each rank's backward does, all ranks reduce alike; a gather order foretells what it has seen."""

from collections import Counter
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_zero as zero
from hf_zero.comm.exchange import Exchange
from hf_zero.engine.units.schedule import GatherSchedule, ReductionOrder, ReductionSchedule, Turn, first_uses
from hf_zero.engine.units.unit import Unit
from tests.ranks import on_ranks

_UNITS = st.lists(st.integers(0, 5), max_size=8)
_READY = st.lists(st.integers(0, 5), max_size=10)
_WAIT = -1  # of what a rank does in its backward: else a unit whose gradients are ready
_MOST_WAITS = 6


@st.composite
def _turns(draw: st.DrawFn) -> list[Turn]:
    units = draw(_UNITS)
    after = sorted(draw(st.lists(st.integers(0, _MOST_WAITS), min_size=len(units), max_size=len(units))))
    return [Turn(*pair) for pair in zip(units, after, strict=True)]


def _with_waits(draw: st.DrawFn, ready: list[int], num_waits: int) -> list[int]:
    """What a rank does: `ready` in this order, and waits among it."""
    places = sorted(draw(st.lists(st.integers(0, len(ready)), min_size=num_waits, max_size=num_waits)))
    for place in reversed(places):
        ready = [*ready[:place], _WAIT, *ready[place:]]
    return ready


@st.composite
def _ranks(draw: st.DrawFn) -> list[list[int]]:
    """What two to four ranks do, which all wait for the same gathers."""
    num_waits = draw(st.integers(0, _MOST_WAITS))
    return [_with_waits(draw, draw(_READY), num_waits) for _ in range(draw(st.integers(2, 4)))]


def _run(expected: list[Turn], events: list[int]) -> tuple[list[int], ReductionSchedule]:
    """What is begun before the end, with the waits, and the order after its end."""
    order = ReductionSchedule(list(expected))
    begun: list[int] = []
    for event in events:
        begun += [*order.before_wait(), _WAIT] if event == _WAIT else order.ready(event)
    return begun, order


@given(_turns(), _ranks())
def test_all_ranks_begin_the_same_reductions_between_the_same_waits(expected, ranks):
    begun = [(begun := _run(expected, events))[0] + begun[1].rest() for events in ranks]
    assert all(each == begun[0] for each in begun)
    assert [unit for unit in begun[0] if unit != _WAIT] == [unit for unit, _ in expected]


@given(_turns(), _ranks())
def test_every_gradient_is_reduced_or_left_over_once(expected, ranks):
    for events in ranks:
        _, order = _run(expected, events)
        order.rest()
        seen = Counter(unit for unit, _ in order.seen)
        assert seen == Counter(event for event in events if event != _WAIT)
        assert not Counter(order.waiting) - seen
        assert not (seen - Counter(unit for unit, _ in expected)) - Counter(order.waiting)


@given(_turns(), _ranks())
def test_every_turn_is_between_its_waits(expected, ranks):
    for events in ranks:
        begun, _ = _run(expected, events)
        waits_before = [begun[:place].count(_WAIT) for place, unit in enumerate(begun) if unit != _WAIT]
        assert all(after <= waits for (_, after), waits in zip(expected, waits_before, strict=False))
        assert all(after >= begun.count(_WAIT) for _, after in expected[len(waits_before) :])


@given(_ranks())
def test_after_a_change_nothing_is_late_and_one_rank_alone_never_waits(ranks):
    order = ReductionOrder([])
    order.change([_run([], events)[1].seen for events in ranks], has_leftover=True)
    assert not any(_late(order.turns, events) for events in ranks)
    alone = ReductionOrder([])
    alone.change([_run([], ranks[0])[1].seen], has_leftover=False)
    assert not _late(alone.turns, ranks[0])
    assert not _run(alone.turns, ranks[0])[1].has_held


def _late(expected: list[Turn], events: list[int]) -> list[int]:
    """What is left over at the end."""
    order = _run(expected, events)[1]
    order.rest()
    return order.waiting


@given(_ranks(), _ranks())
def test_an_order_gets_later_at_once_and_earlier_with_patience(first, second):
    order = ReductionOrder([])
    for ranks in (first, second):
        order.change([_run([], events)[1].seen for events in ranks], has_leftover=True)
    for ranks in (first, second):
        assert not any(_late(order.turns, events) for events in ranks)
    assert [order.is_to_change(has_leftover=False, has_held=True) for _ in range(4)] == [False, False, False, True]
    assert not order.is_to_change(has_leftover=False, has_held=False)
    assert order.is_to_change(has_leftover=True, has_held=False)
    seen = [_run([], events)[1].seen for events in first]
    order.change(seen, has_leftover=False)
    assert {turn.unit for turn in order.turns} == {unit for rank in (*first, *second) for unit in rank if unit != _WAIT}
    assert all(turn.after is None or any(turn in of_rank for of_rank in seen) for turn in order.turns)


def test_what_nobody_has_seen_is_reduced_after_its_last_call() -> None:
    over: set[int] = set()
    schedule = ReductionSchedule([Turn(2, None), Turn(1, None), Turn(0, 0)], over.__contains__)
    assert schedule.ready(2) == []  # another call is still to come
    over.add(2)
    assert schedule.before_wait() == [2]
    over.add(1)
    assert schedule.ready(1) == [1]
    assert schedule.before_wait() == [0]


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


@on_ranks(2)
def test_every_gather_of_a_micro_step_but_the_first_has_compute_beside_it() -> None:
    """Each block is larger than `prefetch_bytes`, and the head is not: so it is with a 1B model's, by default."""
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=88, num_hidden_layers=3, num_attention_heads=2
    )
    with zero.Init({"stage": 3, "compute_dtype": "bfloat16", "collectives": "pairwise", "prefetch_bytes": 10_000}):
        model = AutoModelForCausalLM.from_config(config)
    engine = zero.shard_model(model)
    sizes = {unit.name: unit.buffer_nbytes for unit in engine.units}
    assert min(size for name, size in sizes.items() if "layers" in name) > 10_000 > sizes["lm_head"]
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
