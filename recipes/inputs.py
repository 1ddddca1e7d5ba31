"""Where the recipes get data, tokenizers and models: the ones you name, or defaults that need no download.

The default data is Python itself: the standard library's sources, and what its docstrings say of its functions.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
from collections.abc import Iterable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import datasets
import torch.distributed as dist
from accelerate import PartialState
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    T5Config,
)

import hf_zero as zero

FILE_BUILDERS = {"txt": "text", "json": "json", "jsonl": "json", "csv": "csv", "parquet": "parquet"}
# Not meant to be read: installed packages, tests and their fixtures, generated tables.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "pydoc_data"}
END = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<|endoftext|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def load_file(path: str) -> Dataset:
    """The rows of a file, by its extension; a txt file has a row for each line, with its line break."""
    builder = FILE_BUILDERS[Path(path).suffix.removeprefix(".")]
    options = {"keep_linebreaks": True} if builder == "text" else {}
    try:
        return datasets.load_dataset(builder, data_files=path, split="train", **options)
    except (datasets.exceptions.DatasetGenerationError, StopIteration, ValueError) as error:
        raise ValueError(f"{path}: is empty, or not {builder}: {error.__cause__ or error}") from error


def load_rows(
    name: str | None, default: Iterable[dict[str, object]], held_out: float = 0.05
) -> tuple[Dataset, Dataset]:
    """Rows to train on, and others to evaluate on.

    Args:
        name: a file (txt, json, jsonl, csv, parquet), or a dataset on the hub; its split "train" is used.
        default: the rows if there is no name.
        held_out: the share of the rows to evaluate on.
    """
    if not name:
        rows = Dataset.from_list(list(default))
    elif Path(name).suffix.removeprefix(".") in FILE_BUILDERS:
        rows = load_file(name)
    else:
        rows = datasets.load_dataset(name, split="train")
    split = rows.train_test_split(held_out, seed=0)  # the same on every rank
    return split["train"], split["test"]


# ---- the standard library --------------------------------------------------------------------------------------------


def source_paths(root: Path) -> list[Path]:
    """The `.py` files under a folder that are meant to be read, relative to it and sorted."""
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return [path for path in paths if not SKIPPED_FOLDERS.intersection(path.parts)]


def split_by_file(paths: Iterable[str], percentage: int) -> tuple[list[str], list[str]]:
    """Split relative paths into those to train on and those held out, by a hash of the path alone.

    A file keeps its side on every rank and machine, whatever other files there are. Both lists are in the order of the
    hash, so that the first few are a sample of all.
    """
    ordered = sorted((int(hashlib.sha256(path.encode()).hexdigest(), 16), path) for path in paths)
    train = [path for digest, path in ordered if digest % 100 >= percentage]
    return train, [path for digest, path in ordered if digest % 100 < percentage]


def load_python_sources(root: Path, percentage: int, max_train_files: int | None) -> dict[str, Dataset]:
    """The `.py` files under `root`, one row each, split by file."""
    kept = [path.as_posix() for path in source_paths(root)]
    if not kept:
        raise ValueError(f"no .py files under {root}; give --train_file or --dataset_name.")
    train, held_out = split_by_file(kept, percentage)

    def read(paths: list[str]) -> Dataset:
        return Dataset.from_dict({"text": [(root / path).read_text("utf-8", errors="ignore") for path in paths]})

    return {"train": read(train[:max_train_files]), "validation": read(held_out)}


def standard_library() -> Path:
    """The folder of this Python's own sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def docstrings(root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Names of a library's public functions and classes, and the first paragraph of what is said of them.

    They are read from the sources, in a few seconds; nothing is imported. Those of 20 to 200 characters are kept, which in
    the standard library are about 5,300.

    Args:
        root: the folder of the sources; the standard library's by default.
    """
    root = root or standard_library()
    for path in source_paths(root):
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        yield from _docstrings_in(ast.parse((root / path).read_text("utf-8", errors="ignore")), module)


def _docstrings_in(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if 20 <= len(text) <= 200:
            yield name, text
        if isinstance(node, ast.ClassDef):
            yield from _docstrings_in(node, name)


def questions() -> Iterator[tuple[str, str]]:
    """Questions about the standard library, and their answers."""
    for name, text in docstrings():
        yield f"What is {name}?", text


def dates(count: int = 4000) -> Iterator[tuple[str, str]]:
    """Dates in words, and as numbers: "Sunday, 22 November 2026" and "2026-11-22"."""
    draw = random.Random(0)
    for _ in range(count):
        day = date(1950, 1, 1) + timedelta(days=draw.randrange(40_000))
        yield f"{day:%A}, {day.day} {day:%B} {day.year}", day.isoformat()


# ---- tokenizers and models that are made, not loaded ----------------------------------------------------------------


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the 256 bytes and one special token, made without a download; decoding gives the same text back."""
    vocabulary = {token: index for index, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), END])}
    return _wrapped(Tokenizer(models.BPE(vocab=vocabulary, merges=[])))


def trained_tokenizer(texts: Iterable[str], size: int = 2000, start: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of these texts, as GPT-2 and Llama 3 have; it takes a second.

    Args:
        texts: what its tokens are learnt from.
        size: how many tokens.
        start: put a token before every text, whose hidden state a model such as BERT classifies.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if start:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, tokenizer.token_to_id(END))]
        )
    return _wrapped(tokenizer, use_regex=True)


def _wrapped(tokenizer: Tokenizer, use_regex: bool = False) -> PreTrainedTokenizerFast:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def small_llama(folder: str, texts: Iterable[str]) -> str:
    """Write a Llama of 2 million parameters and its tokenizer into a folder, for models that write; returns the folder."""
    tokenizer = trained_tokenizer(texts)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return _write(folder, AutoModelForCausalLM, config, tokenizer)


def small_moe(folder: str, texts: Iterable[str]) -> str:
    """Write a mixture of experts (Qwen3-MoE, 3 million parameters) and its tokenizer into a folder; returns the folder."""
    tokenizer = trained_tokenizer(texts)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        moe_intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return _write(folder, AutoModelForCausalLM, config, tokenizer)


def tiny_llama(folder: str) -> str:
    """Write a Llama of 100,000 parameters that reads and writes bytes into a folder; returns the folder."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return _write(folder, AutoModelForCausalLM, config, tokenizer)


def long_llama(folder: str, texts: Iterable[str], words: list[str], num_tokens: int) -> str:
    """Write a Llama of one layer (170,000 parameters) and its tokenizer into a folder; returns the folder.

    It finds what stands far before, and nothing else: attention of one layer is enough for that.

    Args:
        folder: a new one.
        texts: what its tokens are learnt from.
        words: each of which is one token besides.
        num_tokens: of the longest document.
    """
    tokenizer = trained_tokenizer(texts)
    tokenizer.add_tokens(words)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=num_tokens,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return _write(folder, AutoModelForCausalLM, config, tokenizer)


def small_bert(folder: str, texts: Iterable[str]) -> str:
    """Write a BERT of 700,000 parameters and its tokenizer into a folder, for models that read; returns the folder."""
    tokenizer = trained_tokenizer(texts, start=True)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
    )
    return _write(folder, AutoModel, config, tokenizer)


def small_t5(folder: str, texts: Iterable[str]) -> str:
    """Write a T5 of a million parameters and its tokenizer into a folder, for models that translate; returns the folder."""
    tokenizer = trained_tokenizer(texts, size=500)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=128,
        d_kv=32,
        d_ff=512,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
    )
    return _write(folder, AutoModelForSeq2SeqLM, config, tokenizer)


def _write(folder: str, kind: Any, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    PartialState()  # starts the process group, where nobody has; on CPU ranks it may know of this process alone
    has_peers = dist.is_initialized()
    if not has_peers or dist.get_rank() == 0:
        with zero.disabled():  # one rank alone makes this model, so it is whole
            kind.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    if has_peers:
        dist.barrier()
    return folder
