"""`hf-zero plan`: what it shows, chooses, writes and refuses."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import GPT2Config, LlamaConfig, ViTConfig

from hf_zero.cli.main import main
from hf_zero.config.offload import Offload
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.plan.activations import activations
from hf_zero.plan.memory import Setting, predict
from hf_zero.plan.models import SIZES
from hf_zero.plan.scale import at_scale
from hf_zero.plan.shapes import meta_model, shapes_of


@pytest.fixture
def folder(tmp_path: Path) -> str:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=128
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def _plan(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = main(["plan", *options])
    told = capsys.readouterr()
    return code, told.out + told.err


def test_shows_each_stage_and_writes_the_first_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "zero.yaml"
    options = ["llama-125m", "--ranks", "8", "--gpu-memory", "600MiB", "--dtype", "float32", "--write", str(out)]
    code, text = _plan(capsys, *options)
    assert code == 0
    fits = [line.split()[-1] for line in text.splitlines() if line.startswith("  stage")]
    assert fits == ["no", "no", "no", "yes"]
    assert "Cheapest that fits into 600.0 MiB, of which a tenth is kept free: stage 3." in text
    config = ZeroConfig.from_file(out)
    assert (config.stage, config.expected_world_size, config.compute_dtype) == (3, 8, "float32")
    assert yaml.safe_load(out.read_text()) == {"stage": 3, "compute_dtype": "float32", "expected_world_size": 8}
    assert _plan(capsys, *options)[1].endswith("remove it, or name another file\n")


def test_a_choice_that_needs_checkpointing_is_told_with_the_command(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for memory, needs_it in (("8MiB", True), ("32MiB", False)):
        out = tmp_path / f"{memory}.yaml"
        options = [folder, "--ranks", "2", "--seq-len", "1024", "--gpu-memory", memory, "--write", str(out)]
        code, text = _plan(capsys, *options)
        assert code == 0, text
        assert (f"Wrote {out} (stage 0, checkpointing)." in text) == needs_it
        assert ("gradient_checkpointing=True" in text.partition("Run: hf-zero launch")[2]) == needs_it


def test_more_ranks_are_shown_up_to_what_limits_them(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = _plan(capsys, "llama-125m", "--scale")
    shown = {line.split(" ranks")[0].strip(): line.split()[2:] for line in text.splitlines() if " ranks  " in line}
    assert code == 0 and list(shown) == ["8", "64", "256", "1,024", "4,096", "10,000"]
    assert shown["1,024"][-2:] == ["10", "20"] and shown["8"][-2] == "7"
    model = shapes_of(meta_model("llama-125m"))
    on_64 = predict(model, Setting(ZeroConfig(stage=3, compute_dtype="bfloat16", collectives="native"), 64))
    assert shown["64"][0] == f"{on_64.states / 2**20:.1f}"
    assert "What limits first: At 1,024 ranks: messages of " in text
    on_gpus = {
        row.num_ranks: row.sockets for row in at_scale(model, Setting(ZeroConfig(stage=3, collectives="native"), 8))
    }
    assert (on_gpus[8], on_gpus[1_024], on_gpus[10_000]) == (7, 20, 28)  # connected when they first talk
    code, text = _plan(capsys, folder, "--scale")
    assert code == 0 and "What limits first: At 8 ranks: messages of " in text


def test_a_disk_is_planned_with_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "zero.yaml"
    options = ["llama-125m", "--ranks", "2", "--memory", "700MiB", "--dtype", "float32", "--disk", "/fast"]
    code, text = _plan(capsys, *options, "--write", str(out))
    assert code == 0
    rows = {line.split("   ")[0].strip(): line.split()[-1] for line in text.splitlines() if line.startswith("  stage")}
    assert rows == dict.fromkeys([f"stage {s}" for s in range(4)] + ["stage 1, disk", "stage 2, disk"], "no") | {
        "stage 3, disk": "yes"
    }
    assert ZeroConfig.from_file(out).offload == Offload("disk", "disk", path="/fast")


def test_states_on_a_disk_are_counted_there() -> None:
    shape = shapes_of(meta_model("llama-34m"))
    for stage, more, per_parameter in ((1, {}, 8), (3, {}, 12), (2, {"compute_dtype": "bfloat16"}, 12)):
        offload = {"optimizer": "disk", "parameters": "disk" if stage == 3 else "none", "path": "/fast"}
        config = {"stage": stage, "collectives": "pairwise", **more}
        plain, disk = (predict(shape, Setting(ZeroConfig(**config, offload=each), 2)) for each in ("none", offload))
        assert disk.on_disk == pytest.approx(per_parameter * shape.numel / 2, rel=0.01)
        assert plain.states - disk.states == disk.on_disk
        assert plain.peak - disk.peak == disk.on_disk - 3 * 32 * 2**20


def _seven_billion(folder: Path) -> str:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "vocab_size": 32000}
    LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return str(folder)


def _fitting(text: str) -> dict[str, str]:
    return {line.split("   ")[0].strip(): line.split()[-1] for line in text.splitlines() if line.startswith("  stage")}


def test_a_host_makes_seven_billion_parameters_fit_on_one_small_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, options = tmp_path / "zero.yaml", [_seven_billion(tmp_path), "--ranks", "1", "--gpu-memory", "24GB"]
    assert _plan(capsys, *options)[0] == 1
    code, text = _plan(capsys, *options, "--host-memory", "256GB", "--write", str(out))
    assert code == 0
    fits = _fitting(text)
    assert fits["stage 3"] == "no" and fits["stage 2, optimizer on host"] == fits["stage 3, all on host"] == "yes"
    assert "optimizer on host; offload to the host is what makes it fit." in text
    assert ZeroConfig.from_file(out).offload == Offload("host")
    code, text = _plan(capsys, *options, "--host-memory", "64GB")
    assert code == 1
    assert "if a host has 1" in text and "for its 1 ranks" in text


def test_ranks_of_a_host_share_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [_seven_billion(tmp_path), "--gpu-memory", "10GB", "--host-memory", "160GB"]
    assert (
        _fitting(_plan(capsys, *options, "--ranks", "16", "--ranks-per-host", "8")[1])["stage 3, all on host"] == "yes"
    )
    assert _fitting(_plan(capsys, *options, "--ranks", "8")[1])["stage 3, all on host"] == "yes"
    assert _fitting(_plan(capsys, *options, "--ranks", "8", "--dtype", "float32")[1])["stage 3, all on host"] == "no"
    assert _plan(capsys, options[0], "--ranks-per-host", "2")[1].endswith("--host-memory: give that, too\n")


def test_more_ranks_with_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [_seven_billion(tmp_path), "--ranks", "8", "--gpu-memory", "10GB", "--scale"]
    code, text = _plan(capsys, *options, "--host-memory", "160GB")
    shown = {line.split(" ranks")[0].strip(): line.split() for line in text.splitlines() if " ranks  " in line}
    setting = Setting(ZeroConfig(stage=3, compute_dtype="bfloat16", collectives="native", offload=Offload("host")), 64)
    held = predict(shapes_of(meta_model(options[0])), setting)
    assert code == 0 and held.on_host > 0
    assert shown["64"][-2:] == [f"{8 * held.on_host / 2**30:.2f}", "GiB"]
    assert "Host memory: enough from 8 ranks on, which need " in text
    assert "Host memory: enough from 64 ranks on, which need " in _plan(capsys, *options, "--host-memory", "60GB")[1]
    assert "on a host" not in _plan(capsys, *options[:-1])[1]


def test_what_rests_on_a_host_is_counted_there() -> None:
    shape = shapes_of(meta_model("llama-34m"))
    for stage, place, ranks, on_host, on_device in (
        (2, {"optimizer": "host"}, 2, 18, 4),
        (3, {"optimizer": "host"}, 2, 18, 2),
        (3, {"optimizer": "host", "parameters": "host"}, 2, 18, 0),
        (3, {"optimizer": "host", "parameters": "host"}, 1, 18, 0),
        (3, {"optimizer": "host"}, 1, 18, 2),
    ):
        config = ZeroConfig(stage=stage, compute_dtype="bfloat16", collectives="native", offload=place)
        held = predict(shape, Setting(config, ranks))
        assert held.on_host == pytest.approx(on_host * shape.numel / ranks, rel=0.01)
        assert held.states == pytest.approx(on_device * shape.numel / ranks, rel=0.01)


def test_seven_billion_parameters_in_4_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    LlamaConfig(**sizes, vocab_size=32000, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    code, text = _plan(capsys, str(tmp_path), "--ranks", "4", "--lora", "16", "--load-in-4bit")
    assert code == 0
    assert "6,778,392,576 parameters (39,976,960 trainable)" in text
    held = {line.split()[1]: line.split()[2:4] for line in text.splitlines() if line.startswith("  stage")}
    # 6.476e9 weights of half a byte, 2 x 131e6 of bfloat16 around them, and adapters with their masters
    assert held["2"] == ["3.62", "GiB"] and held["3"] == ["935.3", "MiB"]
    assert _plan(capsys, str(tmp_path), "--load-in-4bit")[1].endswith("nothing would train: give --lora R too\n")


def test_says_what_would_help_where_nothing_fits(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = _plan(capsys, folder, "--ranks", "2", "--gpu-memory", "1MiB")
    assert code == 1
    assert "Nothing fits" in text and "It fits on" in text
    code, text = _plan(capsys, folder, "--gpu-memory", "1MiB", "--seq-len", "4096", "--batch-size", "64")
    assert code == 1
    assert "More ranks do not help: activations alone need" in text and "tp_size" not in text
    code, text = _plan(capsys, "llama-125m", "--gpu-memory", "400MiB")
    assert "It fits on 16 ranks." in text and "offload: {optimizer: host, parameters: host}" in text
    assert "smaller batch" not in text and "tp_size" not in text
    code, text = _plan(capsys, "llama-125m", "--gpu-memory", "100MiB")
    assert "More ranks do not help: gathered units alone need 101.5 MiB." in text and "smaller batch" not in text
    assert "`prefetch_bytes: 0` (the largest unit takes 37.5 MiB)" in text and "`tp_size: 2`" in text
    code, text = _plan(capsys, "llama-125m", "--gpu-memory", "20MiB")
    assert "The largest parameter takes 37.5 MiB: `tp_size: 2` (or more) cuts every layer" in text


def test_draws_what_a_rank_holds(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _plan(capsys, folder, "--seq-len", "16", "--plot", str(tmp_path / "plan.png"))[0] == 0
    assert _plan(capsys, folder, "--scale", "--plot", str(tmp_path / "ranks.png"))[0] == 0
    assert (tmp_path / "ranks.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "0"], "--ranks is 0"),
        (["--ranks", "4", "--replicate", "3"], "--replicate 3 does not divide --ranks 4"),
        (["--gpu", "h100"], "give --seq-len, too"),
        (["--gpu", "z9", "--seq-len", "64"], "--gpu z9 is not known: give one of a10, "),
        (["--gpu", "h100", "--measure"], "give one of them"),
        (["--gpu", "h100", "--seq-len", "64", "--ranks", "16"], "16 ranks are on 2 hosts of 8: give --network"),
        (["--network", "400gbit"], "--network goes with --gpu"),
        (["--best"], "--best compares times: give --gpu or --measure"),
        (["--collectives", "host"], "--collectives says what --measure measures: give that, too"),
        (["--measure", "--seq-len", "64", "--replicate", "2"], "--measure does not measure --replicate"),
        (["--measure", "--seq-len", "64", "--lora", "2"], "--measure does not measure --lora"),
        (
            ["--measure", "--seq-len", "64", "--optimizer", "lion"],
            "--measure knows the time of adamw, adam, sgd, momentum",
        ),
        (["--gpu", "h100", "--seq-len", "64", "--cp", "2"], "is not predicted with --cp"),
        (["--ranks", "4", "--cp", "3"], "--cp 3 does not divide the 4 ranks of a replica"),
        (["--ranks", "4", "--sp", "2", "--cp", "4"], "--sp 2 x --cp 4 does not divide the 4 ranks of a replica"),
        (["--ranks", "4", "--sp", "4"], "sp_size is 4, but LlamaForCausalLM has 2 heads of queries"),
    ],
)
def test_options_that_make_no_sense_are_errors(
    options: list[str], words: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = _plan(capsys, folder, *options)
    assert (code, words in text) == (1, True)


def test_model_without_configuration_or_tokens_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, text = _plan(capsys, "nobody/nothing")
    assert (code, "no configuration of 'nobody/nothing'" in text) == (1, True)
    config = ViTConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config.architectures = ["ViTForImageClassification"]
    config.save_pretrained(tmp_path / "vit")
    assert _plan(capsys, str(tmp_path / "vit"))[0] == 0
    code, text = _plan(capsys, str(tmp_path / "vit"), "--seq-len", "4", "--measure")
    assert (code, "--measure runs causal language models" in text) == (1, True)
    code, text = _plan(capsys, str(tmp_path / "vit"), "--seq-len", "4")
    assert (code, "reads no tokens" in text) == (1, True)


def test_checkpointed_blocks_keep_their_inputs(tmp_path: Path) -> None:
    config = GPT2Config(
        n_layer=6, n_embd=64, n_head=2, vocab_size=64, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, use_cache=False
    )
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    model = meta_model(str(tmp_path))
    tokens = torch.zeros(2, 32, dtype=torch.long, device="meta")
    few = [activations(model, {"input_ids": tokens}, checkpoints).total for checkpoints in (True, False)]
    half = meta_model(str(tmp_path))
    half.transformer.h = half.transformer.h[:3]
    fewer = [activations(half, {"input_ids": tokens}, checkpoints).total for checkpoints in (True, False)]
    hidden = 2 * 32 * 64 * 4
    assert few[0] - fewer[0] == 3 * hidden
    assert few[1] - fewer[1] > 3 * 10 * hidden


@pytest.mark.parametrize("sizes", [{"cp": 4}, {"sp": 2}, {"sp": 2, "cp": 2}], ids=["cp4", "sp2", "sp2 x cp2"])
def test_sequences_that_ranks_share_are_longer(
    sizes: dict[str, int], folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, longest, ranks = tmp_path / "shared.yaml", [], math.prod(sizes.values())
    shared = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    for options in ([], [*shared, "--write", str(out)]):
        code, text = _plan(
            capsys, folder, "--ranks", "4", "--seq-len", "1024", "--dtype", "float32", "--memory", "32MiB", *options
        )
        found = re.search(r"Longest sequence of stage 3, checkpointing: ([\d,]+) tokens", text)
        assert code == 0 and found is not None, text
        longest.append(int(found.group(1).replace(",", "")))
    assert ranks / 2 * longest[0] < longest[1] < ranks * longest[0]
    written = ZeroConfig.from_file(out)
    assert (written.sp_size, written.cp_size) == (sizes.get("sp", 1), sizes.get("cp", 1))


def test_long_sequences_are_told_with_and_without_tiles(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaConfig.from_pretrained(folder, vocab_size=8192).save_pretrained(folder)
    options = [folder, "--ranks", "2", "--seq-len", "1024", "--dtype", "float32"]
    code, text = _plan(capsys, *options)
    assert code == 0
    assert "Logits of 1,024 tokens over 8,192 words: 32.0 MiB in float32" in text and "Peak of stage 3: " in text
    out = tmp_path / "tiled.yaml"
    code, text = _plan(capsys, *options, "--tile-tokens", "64", "--memory", "40MiB", "--write", str(out))
    found = re.search(
        r"Longest sequence of stage 3, checkpointing: ([\d,]+) tokens; ([\d,]+) with tile_tokens 64", text
    )
    assert code == 0 and found is not None, text
    without, tiled = (int(number.replace(",", "")) for number in found.groups())
    assert 0 < without < tiled
    model = meta_model(folder).float()
    model.config.use_cache = False
    setting = Setting(ZeroConfig(stage=3, compute_dtype="float32", collectives="native", tile_tokens=64), 2)
    peaks = []
    for length in (tiled, tiled + 64):
        tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
        kept = activations(model, {"input_ids": tokens, "labels": tokens}, True, 64)
        peaks.append(predict(shapes_of(model), setting, kept).peak)
    assert peaks[0] <= 0.9 * 40 * 2**20 < peaks[1]
    assert ZeroConfig.from_file(out).tile_tokens == 64


def _predicted(text: str) -> dict[str, float]:
    """Milliseconds of a step by the name of a row."""
    rows = re.findall(r"^  (stage \S+(?: \S+)*?)  .* ([\d.,]+) ms ", text, re.MULTILINE)
    return {name: float(number.replace(",", "")) for name, number in rows}


def test_steps_on_a_gpu_are_predicted_and_the_fastest_that_fits_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "hf_zero.cli.planning.sequences.told", lambda *_: []
    )  # the longest sequences on a card take many counts
    LlamaConfig(**SIZES["llama-125m"] | {"num_hidden_layers": 4}, architectures=["LlamaForCausalLM"]).save_pretrained(
        tmp_path
    )
    out = tmp_path / "zero.yaml"
    options = [str(tmp_path), "--ranks", "16", "--gpu", "h100", "--network", "10gbit", "--seq-len", "256"]
    code, text = _plan(capsys, *options, "--best", "--write", str(out))
    assert code == 0
    found = _predicted(text)
    assert len(found) == 8 and found["stage 1"] == found["stage 2"] < found["stage 3"]
    assert "Fastest that fits into 80.00 GiB, of which a tenth is kept free: stage 1." in text
    assert "predicted for h100 by its data sheet, not measured" in text
    assert ZeroConfig.from_file(out).stage == 1
    tuned = ["--best", "--gpu-memory", "300MiB", "--write", str(tmp_path / "tuned.yaml")]
    code, text = _plan(capsys, *options[:-3], "100gbit", *options[-2:], *tuned)
    faster = _predicted(text)
    assert all(faster[name] < found[name] for name in found)
    fitting = {name for name in found if re.search(rf"^  {name}  .* yes$", text, re.MULTILINE)}
    chosen = re.search("Fastest that fits into .*: (stage .*)\\.$", text, re.MULTILINE)
    assert chosen is not None and 0 < len(fitting) < 8, text
    assert chosen[1] in fitting and faster[chosen[1]] == min(faster[name] for name in fitting)
    told = re.search(r"same results: (stage 3.*) with `prefetch_bytes: (\d+)`: ([\d.]+) ms, not ([\d.]+) ms", text)
    assert told is not None and float(told[3]) < float(told[4]) == faster[chosen[1]], text
    written = ZeroConfig.from_file(tmp_path / "tuned.yaml")
    assert (written.prefetch_bytes, written.wire.is_exact) == (
        int(told[2]),
        True,
    ) and written.prefetch_bytes != 64 * 2**20
    smaller = re.search(r"results would differ: `wire:` `{gather: bfloat16, reduce: bfloat16}` ([\d.]+) ms", text)
    assert smaller is not None and float(smaller[1]) < float(told[3]), text


@pytest.mark.slow
@pytest.mark.parametrize("collectives", ["host", "pairwise"])
def test_steps_on_this_machine_are_predicted_by_what_is_measured(
    collectives: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["llama-10m", "--ranks", "2", "--seq-len", "32", "--dtype", "float32", "--collectives", collectives]
    code, text = _plan(capsys, *options, "--measure")
    found = _predicted(text)
    assert code == 0 and len(found) == 8 and all(0 < number < 60_000 for number in found.values()), text
    assert f"predicted for this machine, 2 processes, {collectives}, by the time of a layer" in text
