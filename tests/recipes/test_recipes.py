"""Every recipe runs on two ranks, on a few rows, and plain libraries load what it leaves."""

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
)

import hf_zero as zero
from hf_zero.integrations.accelerate import accelerator as accelerator_module
from tests.integrations.trainer.runs import undone
from tests.ranks import ENVIRONMENT, run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))  # where a script finds its neighbours
import history
import inputs

RECIPES = Path(__file__).parents[2] / "recipes"
_FEW = ["--max_steps=2", "--logging_steps=1", "--per_device_train_batch_size=2", "--disable_tqdm=true"]
_WORDS = ["make", "take", "open", "close", "read", "write", "file", "line", "name", "list", "tree", "code", "set"]


def _texts(count: int) -> list[str]:
    return [" ".join(_WORDS[(number * step) % len(_WORDS)] for step in range(1, 7)) for number in range(count)]


def _rows(recipe: str) -> list[dict[str, Any]]:
    """Forty rows with the columns that the recipe reads."""
    texts = _texts(40)
    pairs = list(zip(texts, reversed(texts), strict=True))
    columns = {
        "sft": [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in pairs],
        "dpo": [{"prompt": a, "chosen": f" {b}", "rejected": f" {b[::-1]}"} for a, b in pairs],
        "grpo": [{"prompt": f"{a} = ", "answer": f"2026{number:04}"} for number, (a, _) in enumerate(pairs)],
        "classification": [{"text": a, "label": ["few", "many"][len(a) % 2]} for a, _ in pairs],
        "seq2seq": [{"source": a, "target": b} for a, b in pairs],
        "embedding": [{"anchor": a, "positive": b} for a, b in pairs],
    }
    return columns.get(recipe, [{"text": a} for a in texts])


class _StoppedError(Exception):
    pass


def _stop_at_a_state(accelerator: zero.ZeroAccelerator, folder: Path) -> None:
    accelerator_module.save_state(accelerator, folder, None)
    raise _StoppedError


@undone
def _run(recipe: str, argv: list[str], folder: str, stops: bool = False) -> str:
    """Run a recipe as its process would be, or until it has saved a state; what it prints."""
    os.chdir(folder)
    datasets.config.HF_DATASETS_CACHE = Path(folder, "cache")
    sys.path.insert(0, str(RECIPES))
    printed = io.StringIO()
    # The ranks have their group already, and keep it.
    made = mock.patch.multiple("torch.distributed", init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
    arguments = mock.patch.object(sys, "argv", [f"{recipe}.py", *argv])
    stopping = mock.patch.object(zero.ZeroAccelerator, "save_state", _stop_at_a_state) if stops else nullcontext()
    with made, arguments, stopping, contextlib.redirect_stdout(printed), contextlib.suppress(_StoppedError):
        runpy.run_path(str(RECIPES / f"{recipe}.py"), run_name="__main__")
    return printed.getvalue()


def _few_rows(recipe: str, folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in _rows(recipe)))
    return f"--dataset_name={path}"


def _train(recipe: str, folder: Path, argv: list[str], timeout_s: float = 60) -> tuple[str, Path]:
    out = folder / "out"
    printed = run_ranks(_run, 2, recipe, [*argv, f"--output_dir={out}"], str(folder), timeout_s=timeout_s)
    assert "world size 2" in printed[0] and "world size" not in printed[1]
    return printed[0], out


def _tiny_llama(folder: Path) -> str:
    """The option that names a model of 20,000 parameters, which reads bytes."""
    tokenizer = inputs.byte_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"--model_name_or_path={folder}"


def _assert_changed(model: torch.nn.Module, start: torch.nn.Module) -> None:
    before = start.state_dict()
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items() if name in before)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        pytest.param("sft", AutoModelForCausalLM, marks=pytest.mark.slow),
        pytest.param("dpo", AutoModelForCausalLM, marks=pytest.mark.slow),
        ("classification", AutoModelForSequenceClassification),
        pytest.param("seq2seq", AutoModelForSeq2SeqLM, marks=pytest.mark.slow),
    ],
)
def test_trainer_recipes_leave_what_from_pretrained_loads(recipe: str, kind: Any, tmp_path: Path) -> None:
    printed, out = _train(recipe, tmp_path, [*_FEW, '--zero={"stage": 3}', _few_rows(recipe, tmp_path)])
    assert "trained: 2 steps" in printed and "held out: " in printed
    made = kind.from_pretrained(out)
    _assert_changed(made, kind.from_pretrained(out / "start", num_labels=made.config.num_labels))
    assert AutoTokenizer.from_pretrained(out)("make a list")["input_ids"]


@pytest.mark.slow
def test_moe_leaves_what_from_pretrained_loads(tmp_path: Path) -> None:
    argv = [*_FEW, '--zero={"stage": 3, "ep_size": 2}', _few_rows("moe", tmp_path)]
    printed, out = _train("moe", tmp_path, argv)
    assert "trained: 2 steps" in printed and "all experts of a layer on 2 ranks" in printed
    _assert_changed(AutoModelForCausalLM.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out / "start"))


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["sp_size", "cp_size"])
def test_long_context_needs_what_stood_far_before(axis: str, tmp_path: Path) -> None:
    argv = [
        "--seq_len=1024",
        "--max_steps=140",
        "--disable_tqdm=true",
        f'--zero={{"stage": 3, "{axis}": 2, "tile_tokens": 128}}',
    ]
    printed, out = _train("long_context", tmp_path, argv, timeout_s=280)
    first, last = (float(each) for each in printed.split("loss: ")[1].splitlines()[0].split(" -> "))
    whole, near = (
        float(each) for each in re.findall(r"loss ([\d.]+) of whole documents, ([\d.]+) without", printed)[0]
    )
    assert last < first / 2 and whole < 1 < near
    assert "a document: 1024 tokens, on 2 ranks" in printed
    _assert_changed(AutoModelForCausalLM.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out / "start"))


def test_long_context_asks_at_the_end_for_what_stands_near_the_beginning() -> None:
    recipe = runpy.run_path(str(RECIPES / "long_context.py"))
    assert recipe["growing"](256, 8) == [64, 64, 64, 64, 128, 128, 256, 256]
    tokenizer = inputs.byte_tokenizer()
    tokenizer.add_tokens([f"{word}]" for words in recipe["NOTES"].values() for word in words])
    for is_near in (False, True):
        batch = recipe["Documents"](tokenizer, _texts(9), [64, 256], 0, is_near)[1]
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        asked = [place for place, label in enumerate(labels) if label != -100]
        assert len(ids) == (128 if is_near else 256) and len(asked) == len(recipe["NOTES"])
        assert all(ids[place] == labels[place] for place in asked)
        assert all((labels[place] in ids[: len(ids) // 2]) != is_near for place in asked)


@pytest.mark.slow
def test_clm_leaves_what_from_pretrained_loads(tmp_path: Path) -> None:
    sizes = ["--hidden_size=32", "--intermediate_size=48", "--num_hidden_layers=2", "--num_attention_heads=2"]
    rows = _few_rows("clm", tmp_path).replace("--dataset_name", "--train_file")
    argv = [*_FEW, '--zero={"stage": 3}', rows, "--block_size=16", "--save_strategy=no", *sizes]
    printed, out = _train("clm", tmp_path, argv)
    assert "trained: 2 steps" in printed and "held out" in printed
    assert AutoModelForCausalLM.from_pretrained(out).config.hidden_size == 32


def test_grpo_rewards_what_is_right_and_leaves_what_from_pretrained_loads(tmp_path: Path) -> None:
    few = ["--per_device_train_batch_size=4", "--num_generations=4", "--per_device_eval_batch_size=4"]
    printed, out = _train("grpo", tmp_path, [*_FEW, '--zero={"stage": 3}', _few_rows("grpo", tmp_path), *few])
    assert "trained: 2 steps" in printed and "reward: " in printed and "of the characters are right" in printed
    _assert_changed(AutoModelForCausalLM.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out / "start"))
    recipe = runpy.run_path(str(RECIPES / "grpo.py"))
    answers = ["2026", "a-b", ""]
    assert recipe["characters_right"](["2062", "a-bc", "x"], answers) == [0.5, 0.75, 0.0]
    assert recipe["kinds_right"](["2062", "x-1", ""], answers) == [1.0, 2 / 3, 0.0]


@pytest.mark.slow
def test_grpo_rewards_go_up(tmp_path: Path) -> None:
    printed, _ = _train("grpo", tmp_path, ["--max_steps=40", "--disable_tqdm=true", '--zero={"stage": 3}'])
    first, last = (float(each) for each in printed.split("reward: ")[1].splitlines()[0].split(" -> "))
    assert first < 0.2 and last > 3 * first


def test_lora_leaves_an_adapter_that_plain_peft_loads(tmp_path: Path) -> None:
    from peft import PeftModel

    printed, out = _train("lora", tmp_path, [*_FEW, '--zero={"stage": 3}', _few_rows("lora", tmp_path)])
    assert "trained: 2 steps" in printed and not (out / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(out / "start")
    tokens = AutoTokenizer.from_pretrained(out)(_texts(1), return_tensors="pt")
    before = base(**tokens).logits
    model = PeftModel.from_pretrained(base, out)
    assert not torch.equal(model(**tokens).logits, before)
    torch.testing.assert_close(model.merge_and_unload()(**tokens).logits, model(**tokens).logits)


@pytest.mark.slow
def test_vit_leaves_what_from_pretrained_loads_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    printed, out = _train("vit", tmp_path, [*_FEW, '--zero={"stage": 3}', "--plot"])
    assert "trained: 2 steps" in printed and "accuracy" in printed
    assert AutoModelForImageClassification.from_pretrained(out)(torch.zeros(1, 1, 8, 8)).logits.shape == (1, 10)
    assert (out / "history.png").stat().st_size > 1000


def test_embedding_leaves_what_plain_sentence_transformers_loads(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    printed, out = _train("embedding", tmp_path, [*_FEW, '--zero={"stage": 3}', _few_rows("embedding", tmp_path)])
    assert "comes first in" in printed
    made, start = (sentence_transformers.SentenceTransformer(str(path), device="cpu") for path in (out, out / "start"))
    _assert_changed(made, start)
    assert made.encode(["make a list"]).shape == (1, 128)


@pytest.mark.parametrize("name", ["muon", "nn_transformer", "pipeline", "custom_loop"])
def test_loops_of_their_own_call_the_number_of_steps_as_the_trainer_does(name: str) -> None:
    text = (RECIPES / f"{name}.py").read_text()
    assert '"--max_steps"' in text and '"--steps"' not in text and '"--epochs"' not in text


def test_custom_loop_goes_on_where_it_stopped(tmp_path: Path) -> None:
    model = _tiny_llama(tmp_path / "start")
    argv = ['--zero={"stage": 3}', _few_rows("custom_loop", tmp_path), "--batch_size=8", "--learning_rate=1e-3", model]
    printed, out = _train("custom_loop", tmp_path, argv)
    expected = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert "epoch 0: held-out loss" in printed and "epoch 1: held-out loss" in printed
    shutil.rmtree(out)
    run_ranks(_run, 2, "custom_loop", [*argv, f"--output_dir={out}"], str(tmp_path), stops=True)
    assert not (out / "model.safetensors").exists()
    printed, out = _train("custom_loop", tmp_path, [*argv, "--resume"])
    assert "epoch 0: held-out loss" not in printed
    resumed = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.items())


def test_nn_transformer_leaves_a_state_dict_of_plain_torch(tmp_path: Path) -> None:
    zero = f"--zero={RECIPES.parent / 'configs' / 'nn_transformer.yaml'}"
    printed, out = _train("nn_transformer", tmp_path, [zero, "--max_steps=2"])
    assert "plain PyTorch sorts" in printed
    state = torch.load(out / "model.pt", weights_only=True)
    assert all(type(value) is torch.Tensor for value in state.values())
    assert state["head.weight"].shape == (32, 64)


@pytest.mark.parametrize("stage", [0, 3])
def test_muon_leaves_what_from_pretrained_loads(stage: int, tmp_path: Path) -> None:
    start = tmp_path / "start"
    argv = [f'--zero={{"stage": {stage}}}', _few_rows("muon", tmp_path), "--max_steps=2", "--batch_size=4"]
    printed, out = _train("muon", tmp_path, [*argv, _tiny_llama(start)])
    assert "trained: 2 steps" in printed
    made, before = (AutoModelForCausalLM.from_pretrained(each) for each in (out, start))
    _assert_changed(made, before)
    _assert_changed(made.model.layers[0].mlp, before.model.layers[0].mlp)  # which is Muon's


# ---- what they share -------------------------------------------------------------------------------------------------


def test_docstrings_name_what_they_describe(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "package").mkdir()
    source = '''
def parse(text):
    """Turn a text
    into a tree.

    It may fail.
    """

class Tree:
    """A tree of words and lines."""

    def leaves(self):
        """All leaves, from left to right."""

    def _rebuild(self):
        """Not meant for anybody else."""

def short():
    """Too short."""

def silent(): ...
'''
    for path in ("package/__init__.py", "package/trees.py", "tests/test_trees.py"):
        (tmp_path / path).write_text(source)
    described = {
        "parse": "Turn a text into a tree.",
        "Tree": "A tree of words and lines.",
        "Tree.leaves": "All leaves, from left to right.",
    }
    expected = {f"{module}.{name}": text for module in ("package", "package.trees") for name, text in described.items()}
    assert dict(inputs.docstrings(tmp_path)) == expected


def test_trained_tokenizer_gives_text_back_and_answers_are_marked() -> None:
    tokenizer = inputs.trained_tokenizer(_texts(20), size=300, start=True)
    text = "make naïve lists 数"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer(text)["input_ids"][0] == tokenizer.bos_token_id
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert (
        tokenizer.apply_chat_template(messages, tokenize=False) == "user: a<|endoftext|>\nassistant: b<|endoftext|>\n"
    )


def test_plot_without_matplotlib_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        history.History(plot=True)


# ---- as they are started ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_vit_reads_over_95_percent_of_the_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    root = RECIPES.parent
    command = ["accelerate.commands.launch", "--config_file", str(root / "configs/accelerate/cpu2.yaml")]
    arguments = ["--zero", str(root / "configs/zero3.yaml"), "--output_dir", str(tmp_path), "--disable_tqdm", "true"]
    done = subprocess.run(
        [sys.executable, "-m", *command, str(RECIPES / "vit.py"), *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("held out: "))
    assert float(line.split("accuracy ")[1].removesuffix("%")) > 95


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_pipeline_of_two_stages_leaves_what_from_pretrained_loads(chunks: int, tmp_path: Path) -> None:
    few = [
        "--max_steps=3",
        "--batch_size=1",
        "--micro_batches=2",
        "--block_size=8",
        f"--chunks={chunks}",
        '--zero={"stage": 1}',
    ]
    argv = [*few, _few_rows("clm", tmp_path), f"--output_dir={tmp_path / 'out'}"]
    printed = run_ranks(_run, 4, "pipeline", argv, str(tmp_path))
    assert "step 3: loss " in printed[0] and "step" not in printed[1]
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    _assert_changed(made, AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "start"))
