"""Scripts that others wrote for plain data parallelism, with no line changed: under `hf-zero launch` as under DDP.

TRL's are read from the installed package. Those of transformers (`run_clm.py`, ...) and accelerate (`nlp_example.py`, ...)
are in no package: HF_ZERO_EXAMPLES names a folder that holds copies of them, and without it they are skipped.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from tests.ranks import ENVIRONMENT

_LIMIT_S = 100
_EXAMPLES = os.environ.get("HF_ZERO_EXAMPLES", "")
_WORDS = ["<pad>", "<s>", "</s>", "user", "assistant", *[f"w{i}" for i in range(42)]]
# In place of packages that fetch metrics and sentence splitters from the network.
_EVALUATE = """
import numpy

class Metric:
    def __init__(self):
        self.found = []
    def add_batch(self, predictions, references):
        self.found += zip(predictions.tolist(), references.tolist())
    def compute(self, predictions=None, references=None, **_):
        found = self.found if predictions is None else list(zip(predictions, references))
        self.found = []
        return {"accuracy": float(numpy.mean([a == b for a, b in found]))}

def load(*_, **__):
    return Metric()
"""
_NLTK = """
class data:
    find = staticmethod(lambda name: name)

def sent_tokenize(text):
    return [text]
"""
_REWARDS = """
def variety(completions, **_):
    return [float(len(set(text.split()))) for text in completions]
"""


@dataclass
class Script:
    """How to run one of them.

    Attributes:
        path: of the script.
        prepare: writes model and data into the working directory.
        arguments: of the script, without `--output_dir`.
        saves_in: where in its output folder it leaves a `model.safetensors`; None if it saves nothing.
    """

    path: str
    prepare: Callable[[Path], None]
    arguments: list[str] = field(default_factory=list)
    saves_in: str | None = "."


def _text(seed: int, least: int = 3) -> str:
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(least, 9, (1,), generator=generator))
    return " ".join(f"w{i}" for i in torch.randint(0, 42, (count,), generator=generator).tolist())


def _write_tokenizer(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=64
    )
    made.chat_template = (
        "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    )
    made.save_pretrained(folder)


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _llama(folder: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(vocab_size=len(_WORDS), max_position_embeddings=64, **shape, **special)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    _write_tokenizer(folder / "model")


def _clm(folder: Path) -> None:
    _llama(folder)
    for name, count in (("train", 400), ("validation", 60)):
        (folder / f"{name}.txt").write_text("\n".join(_text(i) for i in range(count)))


def _sft(folder: Path) -> None:
    _llama(folder)
    _write_rows(folder / "data" / "train.jsonl", [{"text": _text(i)} for i in range(64)])


def _dpo(folder: Path) -> None:
    _llama(folder)
    rows = [{"prompt": _text(i), "chosen": " " + _text(100 + i), "rejected": " " + _text(200 + i)} for i in range(64)]
    _write_rows(folder / "data" / "train.jsonl", rows)


def _grpo(folder: Path) -> None:
    _llama(folder)
    (folder / "rewards.py").write_text(_REWARDS)
    _write_rows(folder / "data" / "train.jsonl", [{"prompt": _text(i)} for i in range(64)])


def _bert(folder: Path, name: str) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(_WORDS), max_position_embeddings=64, pad_token_id=0, **shape)
    BertForSequenceClassification(config).bert.save_pretrained(folder / name)  # so that the script makes the head
    _write_tokenizer(folder / name)


def _pairs(count: int) -> list[dict[str, Any]]:
    return [
        {"idx": i, "sentence1": _text(i), "sentence2": _text(i if i % 2 else 500 + i), "label": i % 2}
        for i in range(count)
    ]


def _glue(folder: Path) -> None:
    _bert(folder, "model")
    for name, count in (("train", 96), ("validation", 34)):
        _write_rows(folder / f"{name}.json", [{k: v for k, v in row.items() if k != "idx"} for row in _pairs(count)])


def _mrpc(folder: Path) -> None:
    """What `load_dataset("nyu-mll/glue", "mrpc")`, or "glue", and `from_pretrained("bert-base-cased")` then find there."""
    _bert(folder, "bert-base-cased")
    files = [{"split": name, "path": f"{name}.jsonl"} for name in ("train", "validation")]
    header = json.dumps({"configs": [{"config_name": "mrpc", "data_files": files}]})
    for glue in (folder / "nyu-mll" / "glue", folder / "glue"):
        for name, count in (("train", 96), ("validation", 34)):
            _write_rows(glue / f"{name}.jsonl", _pairs(count))
        (glue / "README.md").write_text(f"---\n{header}\n---\n")


def _summaries(folder: Path) -> None:
    torch.manual_seed(0)
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    special = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    T5ForConditionalGeneration(T5Config(vocab_size=len(_WORDS), **shape, **special)).save_pretrained(folder / "model")
    _write_tokenizer(folder / "model")
    for name, count in (("train", 64), ("validation", 10)):
        rows = [{"text": _text(i, least=6), "summary": " ".join(_text(i, least=6).split()[:2])} for i in range(count)]
        _write_rows(folder / f"{name}.json", rows)


def _images(folder: Path) -> None:
    from PIL import Image

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=2, **shape)).save_pretrained(
        folder / "model"
    )
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 8, "width": 8},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps(processor))
    for number in range(40):
        place = folder / "images" / ("dark", "light")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 100, (12, 12, 3)) + 100 * (number % 2)
        Image.fromarray(pixels.to(torch.uint8).numpy()).save(place / f"{number}.png")


def _trl(name: str) -> str:
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None
    return str(Path(found.origin).parent / "scripts" / f"{name}.py")


_TRAINER = ["--max_steps=6", "--learning_rate=1e-3", "--logging_steps=1", "--per_device_train_batch_size=4"]
_TRAINER += ["--save_strategy=no", "--report_to=none", "--use_cpu"]
_RUN = ["--model_name_or_path=model", "--do_train", "--do_eval", *_TRAINER]
_TRL = ["--model_name_or_path=model", "--dataset_name=data", "--bf16=False", *_TRAINER]
_FILES = ["--train_file=train.json", "--validation_file=validation.json"]
_SUMMARY = ["--predict_with_generate", "--max_source_length=32", "--max_target_length=8"]
_ONLINE = ["--num_generations=2", "--max_completion_length=6", "--reward_funcs=rewards.variety"]

SCRIPTS = {
    "sft.py": Script(_trl("sft"), _sft, [*_TRL, "--max_length=16"]),
    "dpo.py": Script(_trl("dpo"), _dpo, [*_TRL, "--max_length=32"]),
    "grpo.py": Script(_trl("grpo"), _grpo, [*_TRL, *_ONLINE]),
    "run_clm.py": Script(
        f"{_EXAMPLES}/run_clm.py",
        _clm,
        [*_RUN, "--train_file=train.txt", "--validation_file=validation.txt", "--block_size=16"],
    ),
    "run_glue.py": Script(f"{_EXAMPLES}/run_glue.py", _glue, [*_RUN, *_FILES, "--max_seq_length=24"]),
    "run_summarization.py": Script(f"{_EXAMPLES}/run_summarization.py", _summaries, [*_RUN, *_FILES, *_SUMMARY]),
    "run_image_classification.py": Script(
        f"{_EXAMPLES}/run_image_classification.py",
        _images,
        [*_RUN, "--train_dir=images", "--remove_unused_columns=False", "--dataloader_num_workers=0"],
    ),
    "nlp_example.py": Script(f"{_EXAMPLES}/nlp_example.py", _mrpc, ["--cpu"], saves_in=None),
    "complete_nlp_example.py": Script(
        f"{_EXAMPLES}/complete_nlp_example.py", _mrpc, ["--cpu", "--checkpointing_steps=epoch"], saves_in="epoch_2"
    ),
}


def _run(command: list[str], folder: Path, arguments: list[str]) -> str:
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(folder / "stand_ins"), *filter(None, sys.path)])}
    environment |= {"HF_HOME": str(folder / "cache"), "HF_ZERO_COLLECTIVES": "pairwise"}
    process = subprocess.Popen(
        [sys.executable, "-m", *command, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=_LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the ranks, too, which outlive their launcher
    assert process.returncode == 0, output[-3000:] + errors[-6000:]
    return output


def _losses(folder: Path) -> dict[str, list[float]]:
    """What the Trainer logged, by name."""
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {key: [entry[key] for entry in log if key in entry] for key in ("loss", "grad_norm")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage"), [*((name, 3) for name in SCRIPTS), ("sft.py", 1), ("complete_nlp_example.py", 1)]
)
def test_scripts_of_others_train_under_the_launcher_as_under_ddp(name: str, stage: int, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    if not Path(script.path).is_file():
        pytest.skip(f"HF_ZERO_EXAMPLES names no folder with {name}")
    if name == "run_image_classification.py":
        pytest.importorskip("torchvision")
    (tmp_path / "stand_ins").mkdir()
    (tmp_path / "stand_ins" / "evaluate.py").write_text(_EVALUATE)
    (tmp_path / "stand_ins" / "nltk.py").write_text(_NLTK)
    script.prepare(tmp_path)
    places = [[] if script.saves_in is None else [f"--output_dir={kind}"] for kind in ("plain", "zero")]
    plain = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", script.path, *script.arguments]
    theirs = _run(plain, tmp_path, places[0])
    launcher = ["hf_zero.cli.main", "launch", "--num_processes=2", "--zero", json.dumps({"stage": stage})]
    ours = _run([*launcher, script.path, *script.arguments], tmp_path, places[1])

    told = [[line for line in text.splitlines() if line.startswith("epoch ")] for text in (ours, theirs)]
    assert told[0] == told[1]  # accelerate's examples tell how often they were right
    if script.saves_in is None:
        assert len(told[0]) == 3
        return
    if (tmp_path / "plain" / "trainer_state.json").exists():
        losses, expected_losses = _losses(tmp_path / "zero"), _losses(tmp_path / "plain")
        assert len(losses["loss"]) == 6
        for key, values in expected_losses.items():
            # The norm of all gradients is a sum that is taken in another order, and the Trainer rounds losses.
            assert losses[key] == pytest.approx(values, rel=1e-3, abs=2e-4)
    weights, expected = (
        load_file(tmp_path / kind / script.saves_in / "model.safetensors") for kind in ("zero", "plain")
    )
    assert weights.keys() == expected.keys()
    for key, weight in expected.items():
        torch.testing.assert_close(
            weights[key], weight, rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
        )
