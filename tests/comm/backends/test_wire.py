"""Wire formats: how far values are off, how many bytes travel, and that all ranks compute with the same weights."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hf_zero as zero
from hf_zero.comm.backends import wire
from hf_zero.comm.exchange import Exchange
from hf_zero.engine.units.unit import Unit
from hf_zero.plan.summary import model_states
from tests.models import CASES, make_model
from tests.ranks import by_hand, on_ranks, run_ranks

_STEPS = {"int8": 254, "int4": 14}


@given(
    numel=st.integers(1, 2000),
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([1e-20, 1.0, 1e30]),
    name=st.sampled_from(["int8", "int4"]),
    more=st.integers(0, 700),
)
@settings(max_examples=60, deadline=None)
@mock.patch.object(wire, "_CACHED_BLOCKS", 2)
def test_a_value_is_off_by_half_a_step_of_its_block(numel: int, seed: int, scale: float, name: str, more: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale
    packed = wire.pack(name, values)
    assert packed.dtype == torch.uint8 and len(packed) == wire.num_bytes(name, numel)
    found = torch.empty(numel)
    wire.unpack(name, packed, found)
    for block, got in zip(values.split(wire.BLOCK), found.split(wire.BLOCK), strict=True):
        limit = float(block.abs().max()) / _STEPS[name]
        assert float((block - got).abs().max()) <= limit * 1.0001
    again = torch.empty(numel)
    wire.unpack(name, wire.pack(name, found), again)
    assert torch.allclose(again, found, rtol=1e-5, atol=0)
    longer = torch.empty(numel + more)
    wire.unpack(
        name, wire.pack(name, values, torch.full((wire.num_bytes(name, numel + more),), 255, dtype=torch.uint8)), longer
    )
    assert torch.equal(longer[:numel], found) and not bool(longer[numel:].any())


def test_nothing_is_no_bytes() -> None:
    for name in ("int8", "int4", "bfloat16"):
        assert len(wire.pack(name, torch.empty(0))) == wire.num_bytes(name, 0) == 0
        wire.unpack(name, torch.empty(0, dtype=torch.uint8), torch.empty(0))


def test_zeros_are_exact_and_what_is_not_finite_stays_so() -> None:
    for name in ("int8", "int4", "bfloat16"):
        values, found = torch.zeros(600), torch.ones(600)
        wire.unpack(name, wire.pack(name, values), found)
        assert torch.equal(found, values)
        for bad in (float("inf"), float("nan")):
            values[300] = bad
            wire.unpack(name, wire.pack(name, values), found)
            assert not bool(torch.isfinite(found[300])) and bool(torch.isfinite(found[:256]).all())


def test_the_greatest_and_the_least_of_floats_keep_their_signs_and_stay_finite() -> None:
    limits = torch.finfo(torch.float32)
    for name in ("int8", "int4"):
        for greatest in (limits.max, limits.min, 3e-43):
            values, found = torch.linspace(-1, 1, 256) * greatest, torch.empty(256)
            wire.unpack(name, wire.pack(name, values), found)
            assert bool(torch.isfinite(found).all()) and bool((values * found >= 0).all())


def test_a_sum_that_was_interrupted_is_made_again() -> None:
    done: list[int] = []

    def finish() -> None:
        done.append(len(done))
        if len(done) == 1:
            raise KeyboardInterrupt

    exchange = wire._Then(Exchange("nothing", 1.0), finish)
    with pytest.raises(KeyboardInterrupt):
        exchange.wait()
    exchange.wait()
    exchange.wait()
    assert done == [0, 1]


def test_bytes_are_those_of_the_formats() -> None:
    assert wire.num_bytes("int8", 2**20) / 2**22 == pytest.approx(0.254, abs=5e-4)
    assert wire.num_bytes("int4", 2**20) / 2**22 == pytest.approx(0.129, abs=5e-4)
    assert wire.num_bytes("bfloat16", 2**20) / 2**22 == 0.5


class Net(nn.Module):
    """Rows that do not divide, fewer rows than ranks, a vector below a block, and integers that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1001, 64)
        self.body = nn.Linear(64, 333)
        self.few = nn.Linear(333, 2)
        self.table = nn.Parameter(torch.arange(1024), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.few(torch.tanh(self.body(self.embed(ids)))).float().pow(2).mean() + 0 * self.table[0]


def _seen(stage: int, formats: dict[str, str], exchange: str) -> tuple[list[float], list[torch.Tensor], dict[str, int]]:
    """Losses, the weights that modules compute with at the end, and the bytes received by kind."""
    torch.manual_seed(0)
    model = Net()
    config = {
        "stage": stage,
        "collectives": exchange,
        "wire": formats,
        "prefetch_bytes": 0,
        "reshard_after_forward": True,
    }
    engine = zero.shard_model(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights: list[torch.Tensor] = []
    handles = [
        m.register_forward_pre_hook(lambda m, *_: weights.append(m.weight.detach().clone())) for m in model.children()
    ]
    losses = []
    for step in range(4):
        weights.clear()
        loss = model((torch.arange(12).view(3, 4) * (step + 3) + dist.get_rank()) % 1001)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    for handle in handles:
        handle.remove()
    ledger = engine.world.ledger
    ledger.reset()
    model(torch.zeros(3, 4, dtype=torch.long)).backward()
    optimizer.step()
    in_step = ledger.total().bytes
    model(torch.zeros(3, 4, dtype=torch.long))
    in_step = ledger.total().bytes if stage < 3 else in_step  # the next forward waits for what a step has changed
    assert in_step == pytest.approx(model_states(engine).traffic, rel=0.03)
    found = {kind: ledger.total(kind).bytes for kind in ("gather", "reduce_scatter")}
    exact = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in model.parameters()]
    assert all(bool(torch.isfinite(p.float()).all()) for p in exact)
    return losses, weights[-3:], found


@pytest.mark.parametrize(("num_ranks", "exchange"), [(2, "pairwise"), (3, "pairwise"), (2, "native")])
def test_training_in_each_format_is_near_and_alike_on_all_ranks(num_ranks: int, exchange: str) -> None:
    for stage in (1, 3, *by_hand(2)):
        exact = run_ranks(_seen, num_ranks, stage, {}, exchange)
        for formats in ({"gather": "bfloat16", "reduce": "bfloat16"}, {"gather": "int8", "reduce": "int4"}):
            found = run_ranks(_seen, num_ranks, stage, formats, exchange)
            for (losses, weights, moved), (expected, _, before) in zip(found, exact, strict=True):
                assert losses != expected
                assert losses == pytest.approx(expected, rel=0.05)
                assert all(torch.equal(w, first) for w, first in zip(weights, found[0][1], strict=True))
                part = 0.5 if formats["gather"] == "bfloat16" else 0.254
                assert moved["gather"] / before["gather"] == pytest.approx(part, rel=0.15)
                part = 0.5 if formats["reduce"] == "bfloat16" else 0.129
                assert moved["reduce_scatter"] / before["reduce_scatter"] == pytest.approx(part, rel=0.15)


def _with_second_copy(secondary: int, exchange: str, formats: dict[str, str]) -> tuple[list[float], int, int, int]:
    """Losses; bytes received in the last step from all ranks and within the host; what the summary promises of both."""
    torch.manual_seed(0)
    case = CASES["llama"]
    model = make_model(case)
    wire_config = {"secondary": secondary, **formats}
    config = {"stage": 3, "collectives": exchange, "wire": wire_config, "prefetch_bytes": 0}
    engine = zero.shard_model(model, config | {"reshard_after_forward": True})
    assert (engine.world.wired is engine.world.shards) == (not formats)  # nothing in between where nothing is packed
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(2):
        engine.world.ledger.reset()
        for micro in range(1 + (step < 1)):
            loss = model(**case.batch(2 * step + micro, dist.get_rank())).loss
            loss.backward()
            losses.append(float(loss.detach()))
        with torch.no_grad():
            losses.append(float(model(**case.batch(0, 0)).loss) if step < 1 else 0.0)
        optimizer.step()
        optimizer.zero_grad()
    entries = engine.world.ledger.entries.items()
    near = sum(entry.bytes for (kind, unit), entry in entries if kind == "gather" and "second copy" in unit)
    far = engine.world.ledger.total("gather").bytes - near
    return losses, far, near, model_states(engine).traffic - engine.world.ledger.total("reduce_scatter").bytes


@pytest.mark.parametrize("formats", [{}, {"gather": "int8"}], ids=["exact", "int8"])
@pytest.mark.parametrize("exchange", ["pairwise", "native"])
def test_second_copy_keeps_the_bits_and_gathers_within_the_host(exchange: str, formats: dict[str, str]) -> None:
    plain = run_ranks(_with_second_copy, 4, 1, exchange, formats)
    for (losses, far, near, expected), (before, all_of_it, none, _) in zip(
        run_ranks(_with_second_copy, 4, 2, exchange, formats), plain, strict=True
    ):
        assert losses == before and none == 0 < near
        assert far < 0.65 * all_of_it  # the embedding is gathered once a step anyway
        assert far + near == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", ["changed", "gather"])
@on_ranks(4)
def test_second_copy_is_not_made_of_what_broke_off(name: str) -> None:
    """Every unit's news, and every start of a gather, is interrupted once, on all ranks alike."""
    torch.manual_seed(0)
    model = Small()
    plain = copy.deepcopy(model)
    engine = zero.shard_model(
        model, {"stage": 3, "collectives": "pairwise", "wire": {"secondary": 2}, "units": {"min_numel": 1}}
    )
    where: Any = {"changed": Unit, "gather": engine.world.wired}[name]
    x, original = torch.randn(4, 64), getattr(where, name)
    with torch.no_grad():
        for at in range(6):
            assert float(model(x)) == float(plain(x))
            for each in (model, plain):
                for param in each.parameters():
                    param.mul_(1.1)
            calls = itertools.count()

            def interrupted(*args: Any, calls: Any = calls, at: int = at) -> Any:
                if next(calls) == at:
                    raise KeyboardInterrupt
                return original(*args)

            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                patch.setattr(where, name, interrupted)
                model(x)
            assert float(model(x)) == float(plain(x))


def test_second_copy_that_does_not_divide_the_ranks_is_an_error() -> None:
    for failure in run_ranks(_with_second_copy, 3, 2, "pairwise", {}, expect_failure=True):
        assert "wire.secondary is 2, which does not divide the 3 ranks" in failure.message


@on_ranks(2)
def test_masters_are_exact() -> None:
    """What is gathered is rounded, and what the optimizer updates is not."""
    for stage in (1, 3):
        torch.manual_seed(0)
        model = make_model(CASES["llama"])
        batch = CASES["llama"].batch(0, 0)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        zero.shard_model(model, {"stage": stage, "collectives": "pairwise", "wire": {"gather": "int8"}})
        model(**batch)
        for name, param in model.named_parameters():
            assert torch.equal(param.full_tensor(), before[name])  # type: ignore[attr-defined]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x)))) @ self.third.weight  # outside its module's call
        return self.third(x).pow(2).mean()


def _rounded(model: nn.Module, num_ranks: int) -> nn.Module:
    """A copy with what bfloat16 leaves of parameters of which a rank has a block."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for param in rounded.parameters():
            if -(-param.shape[0] // num_ranks) * (param.numel() // param.shape[0]) >= wire.BLOCK:
                param.copy_(param.bfloat16().float())
    return rounded


def _follow(stage: int, replicate: int) -> None:
    """Edits, gathered parameters, accumulation and loading beside a plain model that is rounded before each forward."""
    num_ranks = dist.get_world_size() // replicate
    torch.manual_seed(0)
    model = Small()
    plain: Any = copy.deepcopy(model)
    config = {"stage": stage, "collectives": "pairwise", "replicate": replicate, "wire": {"gather": "bfloat16"}}
    zero.shard_model(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 64)

    def check() -> None:
        with torch.no_grad():
            assert float(model(x)) == float(_rounded(plain, num_ranks)(x))

    check()
    with torch.no_grad():
        model.first.weight.mul_(1.3)
        plain.first.weight.mul_(1.3)
    check()
    with zero.GatheredParameters([model.third.weight], modifier_rank=0):
        if dist.get_rank() == 0:
            model.third.weight.data.mul_(0.7)
    plain.third.weight.data.mul_(0.7)
    check()
    for _ in range(2):
        rounded = _rounded(plain, num_ranks)
        rounded(x).backward()
        with model.no_sync():  # type: ignore[operator]
            model(x).backward()
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param, other in zip(plain.parameters(), rounded.parameters(), strict=True):
                param.sub_(0.1 * 2 * other.grad)
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(param.full_tensor(), expected, atol=1e-6)  # type: ignore[attr-defined]
    model.load_state_dict({name: value.clone() for name, value in plain.state_dict().items()})
    check()


@pytest.mark.parametrize(("num_ranks", "replicate", "stages"), [(2, 1, (1, 2, 3)), (3, 1, (3,)), (4, 2, (2,))])
def test_modules_compute_with_rounded_weights_and_nothing_else_is_rounded(
    num_ranks: int, replicate: int, stages: tuple[int, ...]
) -> None:
    for stage in {*stages, *by_hand(1, 2, 3)}:
        run_ranks(_follow, num_ranks, stage, replicate)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"stage": 0, "wire": {"gather": "int8"}}, "has no effect in stage 0"),
        ({"collectives": "host", "wire": {"gather": "bf16"}}, "has no effect with collectives: host"),
        ({"reduce_scatter": False, "wire": {"reduce": "int4"}}, "cannot be had with wire.reduce"),
        ({"wire": {"gather": "int4"}}, "use float32, bfloat16, int8"),
        ({"wire": {"reduce": "int8"}}, "use float32, bfloat16, int4"),
        ({"wire": {"gathers": "int8"}}, "'gathers' is not one of its keys"),
        ({"wire": "int8"}, "use exact, or"),
        ({"wire": {"secondary": 0}}, "wire.secondary"),
        ({"stage": 2, "wire": {"secondary": 2}}, "has no effect in stages 1 and 2"),
        ({"collectives": "host", "wire": {"secondary": 2}}, "has no effect with collectives: host"),
    ],
)
def test_bad_values_are_named(config: dict[str, Any], error: str) -> None:
    with pytest.raises(zero.ConfigError, match=error):
        zero.ZeroConfig.from_dict(config)


def test_a_config_is_written_and_read_back() -> None:
    config = zero.ZeroConfig.from_dict({"wire": {"gather": "bf16", "reduce": "int4"}})
    assert config.to_dict()["wire"] == {"gather": "bfloat16", "reduce": "int4", "secondary": 1}
    assert zero.ZeroConfig.from_dict(config.to_dict()) == config
