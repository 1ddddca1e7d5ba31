"""Units that stay whole from their forward to their backward: which, within how many bytes, and what a step gathers then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hf_zero as zero
from hf_zero.engine.parameters.records import is_trainable
from hf_zero.engine.units import keeping
from hf_zero.engine.units.keeping import UNLIMITED, Budget, Candidate, Kept, choose
from hf_zero.engine.units.storage.residency import Residency
from hf_zero.plan.memory import Setting, predict
from hf_zero.plan.shapes import shapes_of
from hf_zero.plan.summary import model_states, summary
from hf_zero.torch_compat import local_of
from tests.engine.twins import EXCHANGES, Net, Twins, batch, square_loss
from tests.models import Stack, stack_batch
from tests.ranks import alone, by_hand, on_ranks

_NUM_UNITS = 5  # enter, three blocks, head


# --- which ----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=8),
    st.integers(0, 60),
    st.integers(0, 60) | st.just(0),
)
def test_chosen_units_fit_and_none_before_them_would(
    units: list[tuple[int, bool]], num_bytes: int, prefetch_bytes: int
) -> None:
    order = [Candidate(index, size, saves) for index, (size, saves) in enumerate(units)]
    kept = choose(order, num_bytes, prefetch_bytes)
    assert all(units[index][1] for index in kept.by_budget) and not kept.by_budget & kept.ahead
    left = num_bytes
    for index, (size, saves) in enumerate(units):  # in the order of the backward: the model's end comes first
        assert (index in kept.by_budget) == (saves and size <= left)
        left -= size if index in kept.by_budget else 0
    begun = {index for index in range(len(units)) if sum(size for size, _ in units[: index + 1]) <= prefetch_bytes}
    assert kept.all == kept.by_budget | begun | set(range(min(len(units), 1 if prefetch_bytes else 0)))
    assert choose(order, UNLIMITED, prefetch_bytes).by_budget == set(range(len(units)))


# --- what a step gathers, and holds -----------------------------------------------------------------------------------


def _gathers(engine: zero.ZeroEngine) -> dict[str, int]:
    entries = engine.world.ledger.entries.items()
    return {unit: entry.calls for (kind, unit), entry in entries if kind == "gather"}


def _trained(model: nn.Module, engine: zero.ZeroEngine, num_micros: int) -> tuple[dict[str, int], int]:
    """What the third step gathers, and the most that it holds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        engine.world.ledger.reset()
        engine.memory.reset_peak()
        for micro in range(num_micros):
            model(**stack_batch(num_micros * step + micro, dist.get_rank())).backward()
            assert engine.memory.bytes == 0
        optimizer.step()
        optimizer.zero_grad()
    return _gathers(engine), engine.memory.peak_bytes


def _checkpoint(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]


def test_a_tied_head_which_a_backward_begins_with_comes_first() -> None:
    """Though its gradients wait for those of the embedding, so that the backward is done with it last."""
    order = [Candidate(0, 4, True), Candidate(1, 8, True), Candidate(2, 100, True, is_tied=True)]
    assert choose(order, 0, 1) == Kept(frozenset(), frozenset({2}))
    assert choose(order, 104, 0) == Kept(frozenset({0, 2}), frozenset())
    assert choose(order, 12, 1) == Kept(frozenset({0, 1}), frozenset({2}))


@on_ranks(
    2,
    3,
    kept=[0, 1, *by_hand(2), 4, *by_hand(6)],
    num_micros=[1, 2],
    collectives=["pairwise", "native"],
    is_checkpointed=[False, True],
)
def test_a_unit_that_stays_is_gathered_once_a_micro_batch_and_nothing_else_changes(
    kept: int, num_micros: int, collectives: str, is_checkpointed: bool
) -> None:
    rows = []
    for num_kept in (0, kept):
        torch.manual_seed(0)
        model = Stack(num_blocks=4)
        for block in model.blocks if is_checkpointed else ():
            _checkpoint(block)
        shape = shapes_of(model)
        sizes = [unit.buffer_nbytes for unit in zero.shard_model(Stack(num_blocks=4), {"stage": 3}).units]
        # The embedding, the first, is never kept: its backward reads no weight.
        budget = sum(sizes[-num_kept:]) if num_kept else True
        config = {"stage": 3, "prefetch_bytes": 0, "reshard_after_forward": budget, "collectives": collectives}
        engine = zero.shard_model(model, config)
        assert [unit.buffer_nbytes for unit in engine.units] == sizes and len(sizes) == 6
        found, peak = _trained(model, engine, num_micros)
        stays = set(range(6)[6 - num_kept :]) - {0}
        assert engine.gathering.kept.by_budget == stays
        expected = [num_micros * (1 if index in stays or index == 0 else 2) for index in range(6)]
        assert found == dict(zip([unit.name for unit in engine.units], expected, strict=True))
        planned = predict(shape, Setting(zero.ZeroConfig(**config), dist.get_world_size()), rank=dist.get_rank())
        assert peak == planned.gathered
        assert planned.in_replica == pytest.approx(model_states(engine).traffic, abs=100)
        rows.append([local_of(param.detach()).clone() for param in model.parameters()])
    assert all(map(torch.equal, *rows))


@on_ranks(2, num_kept=[0, 1, 3])
def test_units_stay_from_the_models_end_backwards_beside_what_is_gathered_ahead(num_kept: int) -> None:
    sizes = [unit.buffer_nbytes for unit in Twins(3).engine.units]
    budget = sum(sizes[_NUM_UNITS - num_kept :]) if num_kept else True
    twins = Twins(3, reshard_after_forward=budget, prefetch_bytes=sizes[1])
    for _ in range(3):
        twins.engine.memory.reset_peak()
        loss = square_loss(twins.model, twins.own())
        stays = [unit.residency is Residency.KEPT for unit in twins.engine.units]
        assert stays == [index >= _NUM_UNITS - max(num_kept, 1) for index in range(_NUM_UNITS)]
        loss.backward()
        assert twins.engine.memory.bytes == 0
        twins.backward_reference()
        twins.update()
    beside = sum(sizes[_NUM_UNITS - num_kept :])
    assert twins.engine.memory.peak_bytes <= beside + 2 * max(sizes)


def _micros(model: nn.Module, engine: zero.ZeroEngine, step: int, num_micros: int) -> dict[str, int]:
    """What a step's micro-batches gather, all but the last under `no_sync`."""
    engine.world.ledger.reset()
    for micro in range(num_micros):
        with engine.no_sync() if micro < num_micros - 1 else nullcontext():
            model(**stack_batch(num_micros * step + micro, dist.get_rank())).backward()
    return _gathers(engine)


@on_ranks(
    2,
    3,
    case=[(1, "last two"), (3, "all"), (3, "size of all"), *by_hand((3, "last two"), (1, "all"))],
    num_frozen=[0, 3],
    collectives=["pairwise", "native"],
)
def test_what_is_kept_stays_until_its_parameters_change(
    case: tuple[int, str], num_frozen: int, collectives: str
) -> None:
    num_micros, kept = case
    rows, num_kept = [], 2 if kept == "last two" else 6
    for keeps in (False, True):
        torch.manual_seed(0)
        model = Stack(num_blocks=4)
        sizes = [unit.buffer_nbytes for unit in zero.shard_model(Stack(num_blocks=4), {"stage": 3}).units]
        for block in model.blocks[4 - num_frozen :]:
            block.requires_grad_(False)
        budget: int | bool = (False if kept == "all" else sum(sizes[-num_kept:])) if keeps else True
        config = {"stage": 3, "prefetch_bytes": 0, "reshard_after_forward": budget, "collectives": collectives}
        engine = zero.shard_model(model, config)
        engine.memory.poison = True
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        frozen = set(range(5 - num_frozen, 5))  # the embedding comes before, the head after
        stays = set(range(6 - num_kept, 6)) if keeps else set()
        for step in range(4):
            found = list(_micros(model, engine, step, num_micros).items())
            assert engine.memory.bytes == sum(sizes[index] for index in stays & frozen)
            for index, unit in enumerate(engine.units):
                once = 1 if index in stays or index == 0 else 2  # the embedding's backward reads no weight
                expected = (
                    (once if index in stays else once * num_micros) if index not in stays & frozen or not step else 0
                )
                if keeps and index == 0 and kept == "size of all" and num_micros > 1 and not step:
                    expected = 2  # a size has room for it once there are several micro-batches
                if step != 3 or index not in frozen:
                    assert dict(found).get(unit.name, 0) == expected, (step, index)
            if num_micros == 1 and step:
                moved = sum(engine.world.ledger.total(kind).bytes for kind in ("gather", "reduce_scatter"))
                assert model_states(engine).traffic == pytest.approx(moved, abs=100) or step == 3
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:  # an edit by hand is seen
                with torch.no_grad():
                    for param in model.blocks[3].parameters():
                        param.mul_(0.5)
        rows.append([local_of(param.detach()).clone() for param in model.parameters()])
    assert all(map(torch.equal, *rows))


@on_ranks(2, 3, collectives=["pairwise", "native"], compute_dtype=["auto", "bfloat16"], num_micros=[1, 2])
def test_of_a_block_with_adapters_only_these_are_gathered_after_a_step(
    collectives: str, compute_dtype: str, num_micros: int
) -> None:
    rows = []
    for keeps in (True, False):
        torch.manual_seed(0)
        model = Stack(num_blocks=4)
        for block in model.blocks:
            block.up.weight.requires_grad_(False)
            block.down.weight.requires_grad_(False)
        model.embedding.requires_grad_(False)
        config = {"stage": 3, "prefetch_bytes": 2**20, "reshard_after_forward": not keeps, "keep_whole_numel": 0}
        engine = zero.shard_model(model, config | {"collectives": collectives, "compute_dtype": compute_dtype})
        engine.memory.poison = True
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        blocks = [unit for unit in engine.units if unit.name.startswith("blocks")]
        for step in range(4):
            found = _micros(model, engine, step, num_micros)
            assert len(blocks) == 4 and all(unit.stays == keeps for unit in blocks)
            assert not (keeps and step and any(unit.name in found for unit in blocks))
            moved = sum(engine.world.ledger.total(kind).bytes for kind in ("gather", "reduce_scatter"))
            engine.world.ledger.reset()
            optimizer.step()
            optimizer.zero_grad()
            after = engine.world.ledger.total("gather").bytes
            assert after < 0.3 * sum(unit.buffer_nbytes for unit in blocks) if keeps else not after
            if keeps and step and num_micros == 1:
                assert model_states(engine).traffic == pytest.approx(moved + after, rel=0.01, abs=200)
        with torch.no_grad():
            assert model(**stack_batch(0, dist.get_rank())).isfinite()
        rows.append([local_of(param.detach()).clone() for param in model.parameters()])
    assert all(map(torch.equal, *rows))


@on_ranks(2, has_failed=[False, True])
def test_nothing_stays_where_ranks_have_not_kept_the_same(has_failed: bool) -> None:
    """Whatever one rank lets go of, or leaves undone, all ranks gather alike."""
    twins = Twins(3, reshard_after_forward=False, timeout_s=10)
    for param in twins.model.blocks[1].parameters():
        param.requires_grad_(False)
    for param in twins.reference.blocks[1].parameters():
        param.requires_grad_(False)
    unit = next(unit for unit in twins.engine.units if not any(map(is_trainable, unit.parameters)))
    twins.step(2)
    assert unit.stays and unit.residency is Residency.KEPT
    if has_failed:
        *_, last = twins.model.children()
        handle = last.register_forward_hook(lambda *_: 1 / (1 - twins.rank))
        with pytest.raises(ZeroDivisionError) if twins.rank else nullcontext():
            twins.model(twins.own())
        handle.remove()
        twins.step()
        assert unit.stays
    else:
        unit.stays = False
        loss = square_loss(twins.model, twins.own())
        if twins.rank:
            unit.stop_keeping()
        loss.backward()
        twins.backward_reference()
        assert not unit.stays and unit.residency is Residency.RELEASED
        twins.update()
        twins.step()
        assert unit.stays


class Tied(Net):
    """Its last block is its first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


@on_ranks(2, reshards=[True, "1MB", "auto", False])
def test_shared_weights_stay_right(reshards: bool | str) -> None:
    twins = Twins(3, Tied, reshard_after_forward=reshards, prefetch_bytes=0)
    twins.engine.memory.poison = True
    twins.step(3)
    twins.assert_same_output()


@on_ranks(2, reshards=["1MB", "auto"])
def test_nothing_stays_for_a_forward_without_a_graph(reshards: str) -> None:
    twins = Twins(3, reshard_after_forward=reshards)
    twins.step(2)
    assert twins.engine.gathering.kept.by_budget == set(range(_NUM_UNITS))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            twins.model(twins.own())
        assert twins.engine.memory.bytes == 0
    twins.step()


# --- what memory allows -----------------------------------------------------------------------------------------------


@contextmanager
def _free(room: Callable[[], int | None]) -> Iterator[pytest.MonkeyPatch]:
    """Within: so much is free at the peak, as this rank measures it, at every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping, "room_at_peak", lambda device, num_sharing: room())
        patch.setattr(keeping, "_EVERY", 1)
        patch.setattr(keeping, "_measuring", set())
        yield patch


def _names(kept: frozenset[int]) -> list[list[int]]:
    """On every rank."""
    found: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, sorted(kept))
    return found


@on_ranks(2, 3)
def test_ranks_with_other_memory_keep_the_same_units_as_the_one_with_least() -> None:
    twins = Twins(3, prefetch_bytes=0)
    gathering, sizes = twins.engine.gathering, [unit.buffer_nbytes for unit in twins.engine.units]
    assert not gathering.budget.is_known and "kept for backward   what memory has room for" in summary(twins.engine)
    free = 2 * (sizes[4] + sizes[3]) + 1
    with _free(lambda: free if twins.rank == 1 else 100 * free):
        twins.step()
        assert gathering.kept.by_budget == set()  # nothing is known before a whole step
        twins.step(2)
        assert _names(gathering.kept.by_budget) == [[3, 4]] * dist.get_world_size()
        assert gathering.budget.num_bytes == free // 2
    assert "2 of 5 units" in summary(twins.engine) and "half of what was free" in summary(twins.engine)
    ledger = twins.engine.world.ledger
    ledger.reset()
    twins.step()
    assert list(_gathers(twins.engine).values()) == [2, 2, 2, 1, 1]


@on_ranks(2)
def test_the_budget_shrinks_with_what_is_free_and_never_grows() -> None:
    twins = Twins(3, prefetch_bytes=0)
    gathering, sizes = twins.engine.gathering, [unit.buffer_nbytes for unit in twins.engine.units]
    free = [10**6]

    def room() -> int:  # at a peak at which what is kept was there
        return max(0, free[0] - gathering.budget.kept_bytes)

    with _free(room):
        twins.step(2)
        assert gathering.kept.by_budget == set(range(_NUM_UNITS))
        twins.step(3)
        assert gathering.kept.by_budget == set(range(_NUM_UNITS)) and gathering.budget.num_bytes == 5 * 10**5
        free[0] = 2 * sizes[4] + (100 if twins.rank else 10**6)  # on one rank
        twins.step(6)  # where nothing is left, the budget is halved
        assert _names(gathering.kept.by_budget) == [[4]] * 2
        free[0] = 10**6
        twins.step(2)
        assert gathering.kept.by_budget == {4}


@on_ranks(2)
def test_where_memory_is_not_known_nothing_stays() -> None:
    twins = Twins(3, prefetch_bytes=0)
    with _free(lambda: None):
        twins.step(3)
    assert twins.engine.gathering.kept.all == set() and twins.engine.gathering.budget.is_known


@on_ranks(
    2, config=[{"collectives": "host"}, {"stage": 2}, {"reshard_after_forward": True}, {"reshard_after_forward": 10}]
)
def test_memory_is_asked_for_only_where_it_decides(config: dict[str, Any]) -> None:
    def never() -> int:
        raise AssertionError("asked")

    twins = Twins(**({"stage": 3} | config))
    with _free(never):
        twins.step(3)
    assert twins.engine.gathering.kept.by_budget == set()


@on_ranks(2)
def test_two_models_share_what_is_free() -> None:
    first, second = Twins(3), Twins(3)
    with _free(lambda: 1000):
        for twins in (first, first, second, second):
            twins.step()
    assert [each.engine.gathering.budget.num_bytes for each in (first, second)] == [500, 250]


@alone()
def test_offers_come_at_their_steps() -> None:
    budget = Budget(zero.shard_model(Net(), {"stage": 3}).world)
    budget.is_measured, budget.is_known = True, False
    with _free(lambda: 10) as patch:
        patch.setattr(keeping, "_EVERY", 8)
        offers = []
        for step in range(12):
            offers.append(budget.offer(step))
            assert budget.take(offers[-1], step) == (step == 1)
            assert budget.offer(step) == UNLIMITED  # of other micro-batches
    assert [step for step, offer in enumerate(offers) if offer != UNLIMITED] == [1, 9]


class Hungry(Net):
    """Finds no memory, where told."""

    breaks_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.breaks_in == "forward":
            raise torch.OutOfMemoryError("out of memory")
        if self.breaks_in == "backward":
            y.register_hook(self._run_out)
        return y

    def _run_out(self, gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("out of memory")


@on_ranks(2, where=["forward", "backward"], reshards=["auto", False])
def test_running_out_of_memory_says_what_is_kept_and_ends_it(where: str, reshards: bool | str) -> None:
    twins = Twins(3, Hungry, reshard_after_forward=reshards, prefetch_bytes=0)
    gathering = twins.engine.gathering
    twins.step(3)
    assert len(gathering.kept.by_budget) == _NUM_UNITS
    twins.model.breaks_in = where
    with pytest.raises(torch.OutOfMemoryError) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping, "_budgets", [gathering.budget])  # not those that other tests have left
        square_loss(twins.model, twins.own()).backward()
    twins.model.breaks_in = ""
    (note,) = caught.value.__notes__
    assert "(reshard_after_forward)" in note and f"{gathering.budget.kept_bytes:,} bytes" in note
    twins.optimizers[0].zero_grad()
    twins.step(2)
    assert len(gathering.kept.by_budget) == (0 if reshards == "auto" else _NUM_UNITS)


# --- beside other ways of training ------------------------------------------------------------------------------------


@on_ranks(
    2,
    config=[
        {"wire": {"gather": "bfloat16"}},
        {"wire": {"gather": "int8", "reduce": "int4"}},
        {"offload": {"optimizer": "disk", "parameters": "disk"}},
        {"collectives": "host"},
    ],
)
def test_what_stays_computes_as_what_is_gathered_again(config: dict[str, Any], tmp_path: Any) -> None:
    rows = []
    for reshards in (True, "auto", False):
        torch.manual_seed(0)
        model = Net()
        more = {"path": str(tmp_path)} if "offload" in config else {}
        given = config | ({"offload": config["offload"] | more} if more else {})
        engine = zero.shard_model(model, {"stage": 3, "prefetch_bytes": 0, "reshard_after_forward": reshards, **given})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            square_loss(model, batch(step, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (len(engine.gathering.kept.by_budget) == 0) == (reshards is True or config.get("collectives") == "host")
        rows.append([param.full_tensor().detach() for param in model.parameters()])  # type: ignore[attr-defined]
    assert all(map(torch.equal, rows[0], rows[1])) and all(map(torch.equal, rows[0], rows[2]))


@on_ranks(2, exchange=EXCHANGES)
def test_a_part_called_after_an_edit_computes_with_what_was_edited(exchange: str) -> None:
    twins = Twins(3, collectives=exchange, prefetch_bytes=0, reshard_after_forward=False)
    twins.step(2)
    output = twins.model(batch(9, 9))  # its backward, for which units stay whole, never comes
    for model in (twins.model, twins.reference):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)
    assert output.requires_grad
    torch.testing.assert_close(twins.model.enter(batch(9, 9)), twins.reference.enter(batch(9, 9)))


@on_ranks(4, exchange=EXCHANGES)
def test_replicas_keep_alike(exchange: str) -> None:
    twins = Twins(3, replicate=2, collectives=exchange)
    twins.step(3)
    assert _names(twins.engine.gathering.kept.by_budget) == [[*range(_NUM_UNITS)] if exchange == "pairwise" else []] * 4


@on_ranks(2)
def test_edits_between_micro_batches_are_seen() -> None:
    twins = Twins(3, reshard_after_forward=False)
    twins.step()
    for _ in range(2):
        loss = square_loss(twins.model, twins.own())
        loss.backward()
        twins.backward_reference()
        with torch.no_grad():
            for model in (twins.model, twins.reference):
                model.head.weight.mul_(0.5)
        twins.model(twins.own())  # units stay for a backward that does not come
        with torch.no_grad():
            for model in (twins.model, twins.reference):
                model.blocks[1].up.weight.add_(0.1)
        twins.assert_same_output()
    twins.update()
