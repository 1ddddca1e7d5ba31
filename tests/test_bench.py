"""The benchmark runs, and says what it measured."""

from unittest import mock

import pytest

from hf_zero.bench import checkpoint
from hf_zero.bench.processes import BenchError, Sample, anonymous_bytes, measure

_TINY = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def test_checkpoint_bench_measures_every_operation() -> None:
    with mock.patch.dict(checkpoint.MODELS, tiny=_TINY):
        lines = checkpoint.run("tiny", 2, 1, ["hf_zero"]).splitlines()
    assert lines[0].split("  ")[-1].strip() == "stall of save 2"
    assert lines[1].startswith("hf_zero") and lines[1].count(" s (") == 5


def test_table_shows_the_median_and_the_range() -> None:
    rounds = [{"save": Sample(seconds, 2**20)} for seconds in (3.0, 1.0, 2.0)]
    assert "2.000 s (1.000-3.000) 1 MiB" in checkpoint.table({"plain": rounds})


@pytest.mark.parametrize(("model", "engine"), [("llama-92m", "other"), ("other", "plain")])
def test_unknown_names_list_the_known(model: str, engine: str) -> None:
    with pytest.raises(BenchError, match="choose from"):
        checkpoint.run(model, 2, 1, [engine])


def test_memory_peak_is_over_what_was_there_before() -> None:
    kept: list[bytearray] = []
    sample = measure(lambda: kept.append(bytearray(b"1") * 40_000_000), lambda: None)
    assert 38_000_000 < sample.extra_bytes < 80_000_000
    assert anonymous_bytes() > 40_000_000
