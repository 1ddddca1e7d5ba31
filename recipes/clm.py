"""Train a causal language model with ZeRO on the plain transformers Trainer, from text to a safetensors folder.

The script is a small version of transformers' `run_clm.py` with one difference: its training arguments are
`ZeroTrainingArguments`, created before the model. Without `--model_name_or_path` it trains a small Llama on bytes, and
without data arguments it trains on the Python standard library's sources, so it runs without any download:

    accelerate launch --config_file configs/accelerate/cpu2.yaml recipes/clm.py --zero configs/zero3.yaml \
        --output_dir out --max_steps 60 --learning_rate 3e-3 --warmup_steps 5 --logging_steps 10 --logging_first_step \
        --save_strategy no --verify_export
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import datasets
import transformers
from datasets import Dataset
from inputs import FILE_BUILDERS, byte_tokenizer, load_file, load_python_sources, standard_library
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Trainer,
    default_data_collator,
    set_seed,
)
from verify_export import verify_export

import hf_zero as zero

logger = logging.getLogger("clm")


@dataclass
class ModelArguments:
    """Which model: a folder or hub name, or the sizes of a small Llama that reads bytes."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Local folder or hub name."})
    revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the hub."})
    token: str | None = field(default=None, metadata={"help": "Hub token; by default the one of `hf auth login`."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run the model's own code from the hub."})
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata={"help": "Type of the parameters; 'auto' is the checkpoint's own."}
    )
    hidden_size: int = field(default=256, metadata={"help": "This and the sizes below: only without a model name."})
    intermediate_size: int = 704
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    max_position_embeddings: int = 1024

    @property
    def hub_kwargs(self) -> dict[str, Any]:
        """The arguments of every `from_pretrained`."""
        return {"revision": self.revision, "token": self.token, "trust_remote_code": self.trust_remote_code}


@dataclass
class DataArguments:
    """Which text: files, a hub dataset, or by default the standard library's sources."""

    train_file: str | None = field(default=None, metadata={"help": "Text to train on: txt, json, jsonl, csv, parquet."})
    validation_file: str | None = field(default=None, metadata={"help": "Held-out text, of one of these types."})
    dataset_name: str | None = field(default=None, metadata={"help": "A dataset on the hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    text_column: str | None = field(default=None, metadata={"help": "Default: 'text', or the first one with text."})
    block_size: int = field(default=128, metadata={"help": "Tokens in a training example."})
    validation_percentage: int = field(
        default=5, metadata={"help": "Share of the text (source files, or rows of data) held out if none is given."}
    )
    max_train_files: int | None = field(default=100, metadata={"help": "Source files to train on (default text only)."})
    max_eval_samples: int = field(default=128, metadata={"help": "Held-out blocks to evaluate on, at most."})
    verify_export: bool = field(
        default=False, metadata={"help": "Load the export in a plain process, and compare its held-out loss."}
    )

    def __post_init__(self) -> None:
        if self.dataset_name and (self.train_file or self.validation_file):
            raise ValueError("--dataset_name and --train_file or --validation_file exclude each other; give one.")
        if self.validation_file and not self.train_file:
            raise ValueError("--validation_file needs a --train_file.")
        for path in filter(None, (self.train_file, self.validation_file)):
            if Path(path).suffix.removeprefix(".") not in FILE_BUILDERS:
                raise ValueError(f"{path}: unknown extension; use one of {', '.join(FILE_BUILDERS)}.")
            if not Path(path).is_file():
                raise FileNotFoundError(f"{path}: no such file, seen from {Path.cwd()}.")
        if self.block_size < 2:
            raise ValueError(f"--block_size {self.block_size}: a block needs a token and one to predict from it.")
        if not 0 < self.validation_percentage < 100:
            raise ValueError(f"--validation_percentage {self.validation_percentage}: must lie between 1 and 99.")
        if self.max_eval_samples < 1 or (self.max_train_files is not None and self.max_train_files < 1):
            raise ValueError("--max_eval_samples and --max_train_files must be at least 1.")


def load_config_and_tokenizer(args: ModelArguments) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """The named model's, or a small Llama's with a byte tokenizer."""
    if args.model_name_or_path:
        config = AutoConfig.from_pretrained(args.model_name_or_path, **args.hub_kwargs)
        return config, AutoTokenizer.from_pretrained(args.model_name_or_path, **args.hub_kwargs)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads,
        max_position_embeddings=args.max_position_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return config, tokenizer


def check_block_size(block_size: int, config: PreTrainedConfig) -> None:
    """Raise if a block has more tokens than the model has positions."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and block_size > positions:
        raise ValueError(f"--block_size {block_size}: the model has {positions} positions; give at most that.")


def load_texts(args: DataArguments, token: str | None = None) -> dict[str, Dataset]:
    """The text to train on and to evaluate on, as rows of the datasets 'train' and 'validation'."""
    if args.dataset_name:
        texts = datasets.load_dataset(args.dataset_name, args.dataset_config_name, token=token)
        if "train" not in texts:
            raise ValueError(f"{args.dataset_name}: no split 'train', only {', '.join(texts)}.")
    elif args.train_file:
        files = {"train": args.train_file, "validation": args.validation_file}
        texts = {name: load_file(path) for name, path in files.items() if path}
    else:
        root = standard_library()
        return load_python_sources(root, args.validation_percentage, args.max_train_files)
    if "validation" not in texts:  # the last rows, not random ones: neighbouring lines tell too much about each other
        whole = texts["train"]
        num_train = len(whole) - math.ceil(len(whole) * args.validation_percentage / 100)
        texts = {"train": whole.take(num_train), "validation": whole.skip(num_train)}
    return texts


def find_text_column(dataset: Dataset, name: str | None) -> str:
    """`name` if the dataset has it as text, or its 'text', or its first column of text."""
    columns = [column for column, kind in dataset.features.items() if getattr(kind, "dtype", "").endswith("string")]
    if name and name not in columns:
        raise ValueError(f"--text_column {name}: no such column of text; there are: {', '.join(columns) or 'none'}.")
    if not columns:
        raise ValueError(f"no column holds text among: {', '.join(dataset.column_names) or 'none'}.")
    return name or ("text" if "text" in columns else columns[0])


def group_tokens(examples: Iterable[list[int]], block_size: int) -> list[list[int]]:
    """Join the examples' tokens and cut them into blocks of `block_size`; the last, shorter piece is dropped."""
    tokens = list(chain.from_iterable(examples))
    return [tokens[start : start + block_size] for start in range(0, len(tokens) - block_size + 1, block_size)]


def make_blocks(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, block_size: int, column: str) -> Dataset:
    """Tokenise the rows and regroup them, 1000 at a time, into blocks; the model shifts the labels itself."""

    def tokenise_and_group(rows: dict[str, list[str | None]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer([text or "" for text in rows[column]], return_attention_mask=False, verbose=False)
        blocks = group_tokens(encoded["input_ids"], block_size)
        return {"input_ids": blocks, "labels": blocks}

    return dataset.map(tokenise_and_group, batched=True, remove_columns=dataset.column_names, desc="Tokenising")


def load_blocks(args: DataArguments, tokenizer: PreTrainedTokenizerBase, token: str | None) -> dict[str, Dataset]:
    """The blocks of 'train' and 'validation'; neither is empty."""
    texts, blocks = load_texts(args, token), {}
    for name in ("train", "validation"):
        column = find_text_column(texts[name], args.text_column)
        blocks[name] = make_blocks(texts[name], tokenizer, args.block_size, column)
        if not len(blocks[name]):
            raise ValueError(f"the {name} text is shorter than a block of {args.block_size} tokens; give more text.")
    held_out = blocks["validation"].shuffle(seed=0)  # a sample of all of it, the same on every rank
    blocks["validation"] = held_out.take(min(args.max_eval_samples, len(held_out)))
    return blocks


def main() -> None:
    """Read the arguments, train, evaluate, export."""
    parser = HfArgumentParser((ModelArguments, DataArguments, zero.ZeroTrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    level = logging.INFO if training_args.should_log else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not training_args.should_log:
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    logger.info("world size %d, zero: %s", training_args.world_size, training_args.zero)
    set_seed(training_args.seed)
    config, tokenizer = load_config_and_tokenizer(model_args)
    check_block_size(data_args.block_size, config)
    with training_args.main_process_first(desc="tokenising"):  # the others then find its work in the cache
        blocks = load_blocks(data_args, tokenizer, model_args.token)
    logger.info("%d blocks to train on, %d held out", len(blocks["train"]), len(blocks["validation"]))
    if model_args.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(
            model_args.model_name_or_path, config=config, dtype=model_args.dtype, **model_args.hub_kwargs
        )
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=model_args.dtype.replace("auto", "float32"))

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks["train"],
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()  # the tokenizer too
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 700.0))
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)

    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] or [result.training_loss]
        print(
            f"trained: {result.global_step} steps, world size {training_args.world_size}, in {training_args.output_dir}"
        )
        print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}, held out {metrics['eval_loss']:.4f}", flush=True)
    if data_args.verify_export:
        zero_config = training_args.zero_config or zero.ZeroConfig(stage=0)
        is_fp32 = zero_config.compute_dtype != "bfloat16" and not (training_args.bf16 or training_args.fp16)
        verify_export(trainer, blocks["validation"]["input_ids"][:], f"under ZeRO stage {zero_config.stage}", is_fp32)


if __name__ == "__main__":
    main()
