"""The benchmark runs, and says what it measured."""

import json
import mmap
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from transformers import GPT2Config

from hf_zero.bench.checkpoint import run as checkpoint
from hf_zero.bench.processes import (
    BenchError,
    MemoryPeak,
    Sample,
    anonymous_bytes,
    measure,
    options,
    private_bytes,
    report,
)
from hf_zero.errors import UsageError
from hf_zero.plan.models import SIZES, config_of

_TINY = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


@pytest.mark.slow
def test_checkpoint_bench_measures_every_operation() -> None:
    with mock.patch.dict(SIZES, tiny=_TINY):
        lines = checkpoint.run("tiny", 2, 1, ["hf_zero"]).splitlines()
    assert lines[0].split("  ")[-1].strip() == "stall of save 2"
    assert lines[1].startswith("hf_zero") and lines[1].count(" s, ") == 5


def test_ended_benchmark_leaves_no_process_behind(tmp_path: Path) -> None:
    """`python -m code` stands for a rank: it waits for input, which the benchmark's own open pipe never gives."""
    lines = (
        "import sys, pathlib",
        "from hf_zero.bench.processes import run_ranks",
        "run_ranks('code', 2, {}, pathlib.Path(sys.argv[1]))",
    )
    command = [sys.executable, "-c", "\n".join(lines), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as bench:
        ranks: list[str] = []
        while len(ranks) < 2 and bench.poll() is None:
            ranks = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()
            time.sleep(0.05)
        bench.terminate()
        assert bench.wait(20) == 128 + signal.SIGTERM
    assert len(ranks) == 2 and not any(Path("/proc", pid).exists() for pid in ranks)


def test_table_shows_the_median_and_the_range() -> None:
    rounds = [{"save": Sample(seconds, 2**20)} for seconds in (3.0, 1.0, 2.0)]
    assert "2.000 (1.000-3.000) s, 1 MiB" in checkpoint.table({"plain": rounds})


@pytest.mark.parametrize(("model", "engine"), [("llama-92m", "other"), ("other", "plain")])
def test_unknown_names_list_the_known(model: str, engine: str) -> None:
    with pytest.raises(BenchError, match="choose from"):
        checkpoint.run(model, 2, 1, [engine])


def test_config_of_a_name_is_a_llama_with_a_head_of_its_own() -> None:
    config = config_of("llama-1b")
    assert (config.model_type, config.num_key_value_heads, config.tie_word_embeddings) == ("llama", 4, False)


def test_config_of_a_folder_is_the_one_in_it(tmp_path: Path) -> None:
    GPT2Config(n_embd=24).save_pretrained(tmp_path)
    assert config_of(str(tmp_path)).n_embd == 24


def test_config_of_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"'llama-2m' is not known.*llama-10m, llama-34m"):
        config_of("llama-2m")


def test_memory_peak_is_over_what_was_there_before() -> None:
    # Pages of its own: malloc may give what an earlier test has left in the process.
    with mmap.mmap(-1, 40_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        sample = measure(lambda: [memory.write(b"1" * 4_000_000) for _ in range(10)], lambda: None)
        assert 38_000_000 < sample.extra_bytes < 80_000_000
        assert anonymous_bytes() > 40_000_000


def test_memory_peak_watches_what_it_is_told_to() -> None:
    looks = iter(range(1_000_000))
    with MemoryPeak(lambda: next(looks)) as memory:
        pass
    assert memory.before == 0 and memory.peak == next(looks) - 1


def test_private_memory_has_a_part_of_what_ranks_share_and_none_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1" * 40_000_000)
    with mmap.mmap(-1, 40_000_000) as shared, (tmp_path / "file").open("rb") as file:
        before = private_bytes(4)
        shared.write(b"1" * 4_000_000 * 10)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert max(mapped[:: mmap.PAGESIZE]) == ord("1")
            assert 9_000_000 < private_bytes(4) - before < 20_000_000


def test_report_is_an_object_with_dataclasses_as_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_OPTIONS", json.dumps({"report": str(tmp_path / "report")}))
    report({"loss": 1.5, "sample": Sample(2.0, 3)})
    assert json.loads(Path(options()["report"]).read_text()) == {
        "loss": 1.5,
        "sample": {"seconds": 2.0, "extra_bytes": 3},
    }
