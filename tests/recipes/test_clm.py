"""The data part of recipes/clm.py, its byte tokenizer, and the check of an export, in one process."""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))  # where a script finds its neighbours
import clm
import inputs
import verify_export

TEXTS = [f"line {number}: naïve 数 \t'quoted'" for number in range(40)]
TOKENIZER = inputs.byte_tokenizer()


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write_texts(folder: Path, extension: str, texts: list[str] = TEXTS, column: str = "text") -> str:
    path = folder / f"data.{extension}"
    rows = datasets.Dataset.from_dict({"number": list(range(len(texts))), column: texts})
    if extension == "txt":
        path.write_text("".join(text + "\n" for text in texts), "utf-8")
    elif extension in ("json", "jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    else:
        rows.to_csv(path) if extension == "csv" else rows.to_parquet(path)
    return str(path)


# ---- the held-out split ----------------------------------------------------------------------------------------------


@given(st.sets(st.text(max_size=20)), st.integers(1, 99))
def test_split_by_file_gives_every_path_one_side(paths: set[str], percentage: int) -> None:
    train, held_out = inputs.split_by_file(paths, percentage)
    assert len(train) + len(held_out) == len(paths)
    assert set(train) | set(held_out) == paths


@given(st.sets(st.text(max_size=20), min_size=1), st.randoms())
def test_split_by_file_does_not_depend_on_order_or_other_files(paths: set[str], random: Random) -> None:
    shuffled = sorted(paths)
    random.shuffle(shuffled)
    assert inputs.split_by_file(shuffled, 50) == inputs.split_by_file(sorted(paths), 50)
    kept = shuffled[: len(shuffled) // 2]
    assert set(inputs.split_by_file(kept, 50)[1]) == set(kept) & set(inputs.split_by_file(paths, 50)[1])


def test_split_by_file_holds_out_the_share_asked_for() -> None:
    paths = [f"package/module_{number}.py" for number in range(4000)]
    _, held_out = inputs.split_by_file(paths, 5)
    assert 150 < len(held_out) < 250  # 200 expected, with a standard deviation of 14
    assert held_out[:3] == inputs.split_by_file(paths, 5)[1][:3]


def test_split_by_file_is_the_same_in_every_process() -> None:
    assert inputs.split_by_file(["abc.py", "ast.py", "os.py", "json/decoder.py"], 50) == (
        ["ast.py", "os.py"],
        ["json/decoder.py", "abc.py"],
    )


def test_python_sources_skip_tests_and_undecodable_bytes(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c/d.py", "test/e.py", "c/tests/f.py", "site-packages/g.py", "h.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"# caf\xc3\xa9 \xff" + name.encode())
    texts = inputs.load_python_sources(tmp_path, 50, None)
    found = [*texts["train"]["text"], *texts["validation"]["text"]]
    assert sorted(found) == ["# café a.py", "# café b.py", "# café c/d.py"]


def test_python_sources_train_on_at_most_the_files_asked_for(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.py").write_text(str(number))
    whole, few = inputs.load_python_sources(tmp_path, 20, None), inputs.load_python_sources(tmp_path, 20, 3)
    assert few["train"]["text"][:] == whole["train"]["text"][:3]
    assert few["validation"]["text"][:] == whole["validation"]["text"][:]


def test_python_sources_raise_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \.py files under .*; give --train_file"):
        inputs.load_python_sources(tmp_path, 5, None)


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


@given(st.text().filter(lambda text: "<|endoftext|>" not in text))
def test_byte_tokenizer_gives_text_back(text: str) -> None:
    tokens = TOKENIZER(text)["input_ids"]
    assert len(tokens) == len(text.encode())
    assert TOKENIZER.decode(tokens) == text


def test_byte_tokenizer_has_a_token_for_every_byte() -> None:
    text = "".join(chr(code) for code in range(0x800)) + "\u4e00\U0001f600\U000fffff\U0010ffff"
    assert len(TOKENIZER) == 257
    assert max(TOKENIZER(text)["input_ids"]) < 256
    assert TOKENIZER("a<|endoftext|>b")["input_ids"][1] == TOKENIZER.eos_token_id == 256


def test_byte_tokenizer_loads_from_an_exported_folder(tmp_path: Path) -> None:
    config, tokenizer = clm.load_config_and_tokenizer(clm.ModelArguments(hidden_size=32))
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(TEXTS) + " don 't , \r\n\x00 <|endoftext|> 😀"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.eos_token_id, len(loaded)) == (256, config.vocab_size)
    again = clm.load_config_and_tokenizer(clm.ModelArguments(model_name_or_path=str(tmp_path)))
    assert (again[0].hidden_size, len(again[1])) == (32, 257)


# ---- blocks ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 256), max_size=30), max_size=10), st.integers(1, 40))
def test_group_tokens_keeps_all_but_the_tail(examples: list[list[int]], block_size: int) -> None:
    blocks = clm.group_tokens(examples, block_size)
    tokens, grouped = list(chain.from_iterable(examples)), list(chain.from_iterable(blocks))
    assert all(len(block) == block_size for block in blocks)
    assert grouped == tokens[: len(grouped)]
    assert len(tokens) - len(grouped) < block_size


@pytest.mark.parametrize("extension", sorted(clm.FILE_BUILDERS))
def test_train_file_of_each_type_gives_its_text(extension: str, tmp_path: Path) -> None:
    path = write_texts(tmp_path, extension)
    args = clm.DataArguments(train_file=path, validation_file=path, block_size=16)
    blocks = clm.load_blocks(args, TOKENIZER, None)
    text = "".join(text + "\n" * (extension == "txt") for text in TEXTS)
    tokens = TOKENIZER(text)["input_ids"]
    num_blocks = len(tokens) // 16
    assert list(chain.from_iterable(blocks["train"]["input_ids"])) == tokens[: num_blocks * 16]
    assert blocks["train"]["labels"][:] == blocks["train"]["input_ids"][:]
    assert blocks["train"].column_names == ["input_ids", "labels"]
    assert sorted(blocks["validation"]["input_ids"][:]) == sorted(blocks["train"]["input_ids"][:])


def test_train_file_alone_holds_out_its_last_rows(tmp_path: Path) -> None:
    args = clm.DataArguments(train_file=write_texts(tmp_path, "csv"), validation_percentage=10)
    texts = clm.load_texts(args)
    assert (texts["train"]["text"][:], texts["validation"]["text"][:]) == (TEXTS[:36], TEXTS[36:])


def test_max_eval_samples_takes_the_same_blocks_every_time(tmp_path: Path) -> None:
    path = write_texts(tmp_path, "parquet")
    args = clm.DataArguments(train_file=path, validation_file=path, block_size=16, max_eval_samples=5)
    first, second = (clm.load_blocks(args, TOKENIZER, None)["validation"]["input_ids"][:] for _ in range(2))
    assert first == second
    assert len(first) == 5


def test_text_column_is_the_named_one_or_the_first_of_text(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"number": [1], "title": ["t"], "body": ["b"]})
    assert clm.find_text_column(rows, None) == "title"
    assert clm.find_text_column(rows, "body") == "body"
    assert clm.find_text_column(rows.rename_column("body", "text"), None) == "text"
    with pytest.raises(ValueError, match="--text_column number: no such column of text; there are: title, body"):
        clm.find_text_column(rows, "number")
    with pytest.raises(ValueError, match="no column holds text among: number"):
        clm.find_text_column(rows.select_columns("number"), None)


def test_rows_without_text_are_empty(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["ab", None, "cd"]})
    assert clm.make_blocks(rows, TOKENIZER, 4, "text")["input_ids"][:] == [TOKENIZER("abcd")["input_ids"]]


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_file": "notes.docx"}, "notes.docx: unknown extension; use one of txt, json, jsonl, csv, parquet"),
        ({"train_file": "notes"}, "notes: unknown extension"),
        ({"train_file": "missing.txt"}, "missing.txt: no such file, seen from "),
        ({"validation_file": "notes.txt"}, "--validation_file needs a --train_file"),
        ({"dataset_name": "a/b", "train_file": "notes.txt"}, "exclude each other"),
        ({"block_size": 1}, "--block_size 1: a block needs"),
        ({"validation_percentage": 100}, "--validation_percentage 100: must lie between 1 and 99"),
        ({"max_eval_samples": 0}, "must be at least 1"),
        ({"max_train_files": 0}, "must be at least 1"),
    ],
)
def test_data_arguments_name_the_mistake(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        clm.DataArguments(**arguments)


def test_check_block_size_names_the_positions() -> None:
    config = LlamaConfig(max_position_embeddings=64)
    clm.check_block_size(64, config)
    with pytest.raises(ValueError, match="--block_size 65: the model has 64 positions"):
        clm.check_block_size(65, config)


@pytest.mark.parametrize("short", ["train", "validation"])
def test_text_shorter_than_a_block_is_named(short: str, tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    files = {"train": write_texts(tmp_path, "txt"), "validation": write_texts(tmp_path, "txt")}
    files[short] = write_texts(tmp_path / "few", "txt", ["short"])
    args = clm.DataArguments(train_file=files["train"], validation_file=files["validation"], block_size=64)
    with pytest.raises(ValueError, match=f"the {short} text is shorter than a block of 64 tokens"):
        clm.load_blocks(args, TOKENIZER, None)


def test_held_out_rows_of_a_short_file_are_named(tmp_path: Path) -> None:
    args = clm.DataArguments(train_file=write_texts(tmp_path, "json", ["x" * 100]), block_size=16)
    with pytest.raises(ValueError, match="the train text is shorter than a block"):
        clm.load_blocks(args, TOKENIZER, None)


@pytest.mark.parametrize("extension", sorted(clm.FILE_BUILDERS))
@pytest.mark.parametrize("content", [b"", b'{"text": \xff'], ids=["empty", "broken"])
def test_file_that_cannot_be_read_is_named(extension: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"data.{extension}"
    path.write_bytes(content)
    args = clm.DataArguments(train_file=str(path))
    with pytest.raises(ValueError, match=rf"data\.{extension}: is empty, or not "):
        clm.load_blocks(args, TOKENIZER, None)


# ---- the export ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "code", "verdict"), [(0.0, 0, "export verified"), (0.01, 1, "EXPORT DIFFERS")])
def test_verify_export_compares_the_losses(
    error: float,
    code: int,
    verdict: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = clm.ModelArguments(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config, tokenizer = clm.load_config_and_tokenizer(sizes)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    blocks = torch.randint(0, 256, (3, 8)).tolist()
    loss = verify_export.held_out_loss(model, blocks)
    rows = torch.tensor(blocks)
    assert loss == pytest.approx(model(input_ids=rows, labels=rows).loss.item(), rel=1e-6)

    record = {"input_ids": blocks, "eval_loss": loss + error, "relative_tolerance": 1e-4, "how": "in this test"}
    (tmp_path / verify_export.HELD_OUT_FILE).write_text(json.dumps(record))
    monkeypatch.setattr(sys, "argv", ["verify_export.py", str(tmp_path)])
    assert verify_export.main() == code
    printed = capsys.readouterr().out
    assert f"{verdict}: eval_loss {loss:.4f} in plain transformers, {loss + error:.4f} in this test" in printed
    assert ("greedy sample: " in printed) == (code == 0)
