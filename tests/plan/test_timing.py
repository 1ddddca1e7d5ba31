"""The time of a step in the plan: what is counted, how it is played, and that it is the engine's schedule that is played."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

import hf_zero
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.plan.memory import Setting
from hf_zero.plan.shapes import meta_model, shapes_of
from hf_zero.plan.timing.machines import Exchange, Links, Measured, stated
from hf_zero.plan.timing.predicting import Counted, time_of
from hf_zero.plan.timing.schedule import Part, Step, UnitCosts, play
from hf_zero.plan.timing.speeds import speed
from tests.models import CASES, make_model
from tests.ranks import run_ranks

_TOKENS = 64
_KINDS = ("gather", "reduce_scatter")


def _counted(name: str) -> tuple[Any, Any, Counted]:
    model = meta_model(name)
    shape = shapes_of(model)
    model.config.use_cache = False  # type: ignore[union-attr]
    tokens = torch.zeros(2, _TOKENS // 2, dtype=torch.long, device="meta")
    return model, shape, Counted.of(model, shape, {"input_ids": tokens, "labels": tokens})


# ---- what is counted -------------------------------------------------------------------------------------------------


def test_operations_are_those_of_the_matrices_and_of_attention() -> None:
    model, _, counted = _counted("llama-10m")
    config = model.config
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    scores = 2 * config.num_hidden_layers * 2 * _TOKENS * (_TOKENS // 2) * config.hidden_size
    forward = 2 * matrices * _TOKENS + scores
    assert sum(stretch.work.operations for stretch in counted.done.forward) == forward
    # The backward makes two products of each; a fused attention makes its scores once more.
    assert counted.operations == forward + 2 * 2 * matrices * _TOKENS + 2.5 * scores


def test_what_computes_belongs_to_its_unit() -> None:
    _, shape, counted = _counted("llama-10m")
    layers = [number for number, unit in enumerate(shape.units) if "layers" in unit.name]
    by_unit = dict.fromkeys(range(len(shape.units)), 0.0)
    for stretch in (*counted.done.forward, *counted.done.backward):
        assert len(stretch.units) <= 1
        for number in stretch.units:
            by_unit[number] += stretch.work.operations
    assert len({by_unit[number] for number in layers}) == 1
    assert sum(by_unit.values()) == counted.operations
    assert counted.blocks == set(layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_computes_with_its_experts(dtype: torch.dtype) -> None:
    config = MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        tokens = torch.zeros(2, _TOKENS // 2, dtype=torch.long)
    counted = Counted.of(model, shapes_of(model), {"input_ids": tokens, "labels": tokens})
    experts = 2 * _TOKENS * 2 * 3 * 64 * 128 * 2  # two layers, two experts a token, three matrices
    others = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 4 * 64) + 64 * 100  # queries, outputs, keys, values, router; head
    scores = 2 * 2 * 2 * _TOKENS * (_TOKENS // 2) * 64
    forward = sum(stretch.work.operations for stretch in counted.done.forward)
    assert forward == experts + 2 * _TOKENS * others + scores
    assert counted.operations == pytest.approx(3 * forward, rel=0.02)


# ---- how it is played ------------------------------------------------------------------------------------------------

_UNITS = (0, 1, 2)


def _step(**changes: Any) -> Step:
    """Three units, each gathered in 2 s and reduced in 3 s; a forward of 1 s each, a backward of 2 s each."""
    costs = UnitCosts(100, Exchange(2.0), Exchange(3.0), 100)
    values: dict[str, Any] = {
        "forward": [Part(frozenset([number]), 1.0) for number in _UNITS],
        "backward": [Part(frozenset([number]), 2.0) for number in reversed(_UNITS)],
        "units": [costs] * 3,
        "comes_and_goes": True,
        "kept": frozenset(),
        "prefetch_bytes": 0,
        "bucket_bytes": 1000,
        "update": 0.5,
    }
    return Step(**values | changes)


def test_without_exchanges_a_step_is_what_it_computes() -> None:
    nothing = [UnitCosts(100, None, None, 0)] * 3
    played = play(_step(units=nothing))
    assert (played.total, played.computing, played.updating, played.waiting) == (9.5, 9.0, 0.5, 0.0)


def test_nothing_ahead_means_that_every_gather_is_waited_for() -> None:
    played = play(_step(units=[UnitCosts(100, Exchange(2.0), None, 0)] * 3))
    assert played.waiting == 2.0 * 6
    assert played.gathered == (0, 1, 2, 2, 1, 0)


def test_one_ahead_hides_what_the_compute_beside_it_takes() -> None:
    # Forward: 2 to begin with, then 2 behind 1, twice. Backward: 2, then 2 behind 2, twice.
    units = [UnitCosts(100, Exchange(2.0), None, 0)] * 3
    assert play(_step(units=units, prefetch_bytes=100)).waiting == pytest.approx(2 + 1 + 1 + 2)


def test_what_is_kept_is_gathered_once() -> None:
    played = play(_step(kept=frozenset([2])))
    assert played.gathered == (0, 1, 2, 1, 0)


def test_what_a_backward_does_not_read_is_gathered_once() -> None:
    costs = UnitCosts(100, Exchange(2.0), Exchange(3.0), 100)
    units = [UnitCosts(100, Exchange(2.0), Exchange(3.0), 100, reads=0), costs, costs]
    played = play(_step(units=units))
    assert (played.gathered, played.reduced) == ((0, 1, 2, 2, 1), (2, 1, 0))


def test_reductions_wait_for_each_other_and_for_their_room() -> None:
    units = [UnitCosts(100, None, Exchange(3.0), 100)] * 3
    step = _step(units=units, comes_and_goes=False)
    assert play(step).waiting == pytest.approx(3 * 3 - 2 * 2)  # three of 3 s behind two backwards of 2 s
    assert play(Step(**vars(step) | {"bucket_bytes": 100})).waiting == pytest.approx(3 * 3 - 2 * 2)
    in_turn = Step(**vars(step) | {"is_background": False})
    assert play(in_turn).waiting == 9.0


def test_gathers_of_the_next_forward_begin_after_the_step() -> None:
    units = [UnitCosts(100, Exchange(2.0), None, 0)] * 3
    assert play(_step(units=units, comes_and_goes=False)).waiting == pytest.approx(2 + 1 + 1)


def test_what_an_exchange_takes_from_computing_is_never_hidden() -> None:
    units = [UnitCosts(100, None, Exchange(3.0, busy=1.0), 100)] * 3
    assert play(_step(units=units, comes_and_goes=False)).waiting == pytest.approx(3 + 2)


# ---- rates -----------------------------------------------------------------------------------------------------------


def test_measured_exchanges_are_taken_between_sizes() -> None:
    measured = Measured((100, 200), (1.0, 3.0), (0.5, 1.0))
    assert measured.of(50) == Exchange(1.0, 0.5)
    assert measured.of(150) == Exchange(2.0, 0.75)
    assert measured.of(400) == Exchange(6.0, 2.0)


def test_the_slowest_link_counts() -> None:
    inside = Links(8, 8, 100.0, 10.0).of(800).seconds
    assert inside == pytest.approx(7.0, rel=1e-3)
    assert Links(16, 8, 100.0, 10.0).of(1600).seconds == pytest.approx(150.0, rel=1e-3)
    assert Links(1, 8, 100.0, 10.0).of(800).seconds == 0.0


@pytest.mark.parametrize(
    ("text", "bytes_s"), [("400gbit", 50e9), ("100 Gb/s", 12.5e9), ("50GB/s", 50e9), ("10Gbps", 1.25e9)]
)
def test_speeds_are_read_as_people_write_them(text: str, bytes_s: float) -> None:
    assert speed(text) == bytes_s


@pytest.mark.parametrize("text", ["fast", "0gbit", "10", "-1gbit"])
def test_other_words_are_no_speed(text: str) -> None:
    with pytest.raises(ValueError, match="write for example 400gbit"):
        speed(text)


def test_ranks_of_a_host_share_what_it_receives_of_other_replicas() -> None:
    replicas = stated("h100", 80.0, 16, 8, 8, False).between_replicas
    assert replicas.of(160).seconds == pytest.approx(160 / 2 / (0.8 * 80 / 8), rel=1e-3)


def test_a_card_that_nobody_knows_and_hosts_without_a_network_are_errors() -> None:
    with pytest.raises(ConfigError, match="--gpu z9 is not known: give one of a10, l4"):
        stated("z9", None, 8, 8, 8, False)
    with pytest.raises(ConfigError, match="16 ranks are on 2 hosts of 8: give --network"):
        stated("h100", None, 16, 16, 8, False)


# ---- the engine's own schedule ---------------------------------------------------------------------------------------

_CASES = {
    "stage 1": {"stage": 1},
    "stage 2, small buckets": {"stage": 2, "bucket_bytes": 2**10},
    "stage 3": {"stage": 3, "reshard_after_forward": True},
    "stage 3, nothing ahead": {"stage": 3, "prefetch_bytes": 0, "reshard_after_forward": True},
    "stage 3, a little ahead": {"stage": 3, "prefetch_bytes": 60_000, "reshard_after_forward": True},
    "stage 3, some kept": {"stage": 3, "prefetch_bytes": 0, "reshard_after_forward": 60_000},
    "stage 3, all kept": {"stage": 3, "reshard_after_forward": False},
}


def _exchanged(case: str, names: list[str]) -> dict[str, Counter[str]]:
    """Gathers and reductions of the third step, by unit."""
    found = {}
    for name in names:
        config = _CASES[name]
        model = make_model(CASES[case])
        engine = hf_zero.shard_model(model, {"collectives": "pairwise", **config})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            engine.world.ledger.reset()
            model(**CASES[case].batch(0, 0)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = Counter(
            {
                f"{kind} {unit}": line.calls
                for (kind, unit), line in engine.world.ledger.entries.items()
                if kind in _KINDS
            }
        )
        model(**CASES[case].batch(0, 0))  # waits for what the last step has begun to gather
    return found


@pytest.mark.parametrize(
    ("case", "names"), [("llama", list(_CASES)), ("gpt2", ["stage 3", "stage 3, some kept"])], ids=["llama", "gpt2"]
)
def test_what_is_exchanged_in_a_played_step_is_what_the_engine_exchanges(case: str, names: list[str]) -> None:
    model, batch = make_model(CASES[case]), CASES[case].batch(0, 0)
    shape = shapes_of(model)
    counted = Counted.of(model, shape, batch)
    machine = stated("h100", None, 2, 2, 8, True)
    expected = {}
    for name in names:
        setting = Setting(ZeroConfig(collectives="pairwise", **_CASES[name]), 2)
        played = time_of(shape, setting, counted, False, machine)
        assert played is not None
        exchanges = [("gather", number) for number in played.gathered]
        exchanges += [("reduce_scatter", number) for number in played.reduced]
        expected[name] = Counter(f"{kind} {shape.units[number].name}" for kind, number in exchanges)
    assert run_ranks(_exchanged, 2, case, names)[0] == expected


def test_predictions_have_the_order_that_one_expects() -> None:
    _, shape, counted = _counted("llama-10m")
    slow = stated("h100", speed("1gbit"), 16, 16, 8, True)

    def seconds(machine: Any, checkpoints: bool = False, **config: Any) -> float:
        setting = Setting(ZeroConfig(collectives="native", **config), 16)
        played = time_of(shape, setting, counted, checkpoints, machine)
        assert played is not None
        return played.total

    stages = [seconds(slow, stage=stage) for stage in (1, 2, 3)]
    assert stages[0] == stages[1] < stages[2]  # the parameters of stage 3 travel twice
    packed = seconds(slow, stage=3, wire={"gather": "int8", "reduce": "int4"})
    assert packed < 0.5 * stages[2]
    fast = stated("h100", None, 8, 8, 8, True)
    assert seconds(fast, stage=3, checkpoints=True) > seconds(fast, stage=3)


def test_a_disk_has_no_rate() -> None:
    _, shape, counted = _counted("llama-10m")
    config = ZeroConfig(stage=3, offload={"optimizer": "disk", "path": "/tmp"}, collectives="pairwise")
    assert time_of(shape, Setting(config, 2), counted, False, stated("h100", None, 2, 2, 8, True)) is None
