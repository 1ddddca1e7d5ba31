"""`hf-zero plan`: what it shows, chooses, writes and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from transformers import GPT2Config, LlamaConfig, ViTConfig

from hf_zero.cli import main
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.plan.activations import activations
from hf_zero.plan.shapes import meta_model


@pytest.fixture
def folder(tmp_path: Path) -> str:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2, vocab_size=128
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


def test_says_what_would_help_where_nothing_fits(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = _plan(capsys, folder, "--ranks", "2", "--gpu-memory", "1MiB")
    assert code == 1
    assert "Nothing fits" in text and "It fits on" in text
    code, text = _plan(capsys, folder, "--gpu-memory", "1MiB", "--seq-len", "4096", "--batch-size", "64")
    assert code == 1
    assert "More ranks do not help: activations alone need" in text


def test_draws_what_a_rank_holds(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _plan(capsys, folder, "--seq-len", "16", "--plot", str(tmp_path / "plan.png"))[0] == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "0"], "--ranks is 0"),
        (["--ranks", "4", "--replicate", "3"], "--replicate 3 does not divide --ranks 4"),
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
