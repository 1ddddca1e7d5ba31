"""Train on documents of 32,768 tokens, each shared by several ranks, on a task that needs their beginning.

A document is Python's own source text. Notes such as `[day:Friday]` are hidden near its beginning, and its last lines repeat
them: what stood there is all that the loss asks for. Two keys of the configuration make it fit, `sp_size` (or `cp_size`) and
`tile_tokens`:

    accelerate launch --config_file configs/accelerate/cpu2.yaml recipes/long_context.py --zero configs/long_context.yaml \
        --output_dir out/long_context

In the first half of the steps documents are short, and then they double up to `--seq_len`; a step has as many tokens always.
Afterwards held-out documents are read whole, and without their first half, in which case the answers can only be guessed. By
default the model is a tiny Llama. `--seq_len 1024` is for a first try.
"""

from __future__ import annotations

import calendar
import keyword
import random
from dataclasses import dataclass, field

import inputs
import torch
from history import History
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)

import hf_zero as zero

NOTES = {"[day:": list(calendar.day_name), "[month:": list(calendar.month_name[1:]), "[keyword:": keyword.kwlist}
SHORTEST = 64  # tokens
IGNORED = -100  # a label that is no target


@dataclass
class RecipeArguments:
    """Which model and text, and how long documents are."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or hub name; default: a tiny Llama."}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "File or hub name; it has a column 'text'."})
    seq_len: int = field(default=32768, metadata={"help": "Tokens of the longest documents."})
    plot: bool = field(default=False, metadata={"help": "Draw loss and memory as history.png."})


class Documents(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Batches of documents, which are drawn when they are asked for.

    Args:
        tokenizer: of notes and texts.
        texts: between the notes.
        lengths: tokens of each document of a batch, by batch; the last are the longest, and batches have as many.
        seed: others give other documents.
        is_near: leave the first half of each document out, and so what its end asks for.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, texts: list[str], lengths: list[int], seed: int, is_near: bool = False
    ) -> None:
        def tokens_of(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

        self.notes = [(tokens_of(kind), [tokens_of(f"{word}]") for word in words]) for kind, words in NOTES.items()]
        self.text = [token for text in texts for token in tokens_of(text)]
        self.text *= 1 + 2 * lengths[-1] // len(self.text)
        self.lengths, self.seed, self.is_near = lengths, seed, is_near

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """`input_ids` and `labels` of a batch, [documents, tokens] each."""
        draw, length = random.Random(f"{self.seed} {number}"), self.lengths[number]
        documents = torch.tensor([self._document(draw, length) for _ in range(self.lengths[-1] // length)])
        ids, labels = documents[:, :, length // 2 if self.is_near else 0 :].unbind(1)
        return {"input_ids": ids.contiguous(), "labels": labels.contiguous()}

    def _document(self, draw: random.Random, length: int) -> tuple[list[int], list[int]]:
        """Tokens and targets."""
        lines = [(kind, draw.choice(words)) for kind, words in self.notes]
        told = [token for kind, word in lines for token in (*kind, *word)]
        draw.shuffle(lines)
        asked = [token for kind, word in lines for token in (*kind, *word)]
        targets = [token for kind, word in lines for token in (*[IGNORED] * len(kind), *word)]
        rest, place = length - len(told) - len(asked), draw.randrange(length // 8)
        start = draw.randrange(len(self.text) - rest)
        text = self.text[start : start + rest]
        ids = [*text[:place], *told, *text[place:], *asked]
        return ids, [*[IGNORED] * (length - len(asked)), *targets]


def growing(longest: int, num_steps: int) -> list[int]:
    """Tokens of documents by step: the fewest in the first half of the steps, and then twice as many each time."""
    doublings = (longest // SHORTEST).bit_length() - 1
    done = [
        max(0, 2 * step - num_steps) * doublings // num_steps + (2 * step >= num_steps) for step in range(num_steps)
    ]
    return [longest >> max(doublings - each, 0) for each in done]


def only(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The collator: a row is a batch already."""
    if len(rows) > 1:
        raise ValueError("a row has --seq_len tokens already: leave per_device_train_batch_size and ..._eval_... at 1.")
    return rows[0]


def main() -> None:
    """Read the arguments, train, save, read held-out documents."""
    parser = HfArgumentParser((RecipeArguments, zero.ZeroTrainingArguments))
    # For the tiny model; the command line comes first.
    parser.set_defaults(max_steps=200, learning_rate=5e-3, adam_beta2=0.98, logging_steps=10, save_strategy="no")
    parser.set_defaults(lr_scheduler_type="constant_with_warmup", warmup_steps=10)
    parser.set_defaults(per_device_train_batch_size=1, per_device_eval_batch_size=1)
    parser.set_defaults(train_sampling_strategy="sequential")  # short ones first
    args, training_args = parser.parse_args_into_dataclasses()
    history = History(args.plot)
    set_seed(training_args.seed)

    sources = inputs.load_python_sources(inputs.standard_library(), 5, 100)["train"]
    train, held_out = (rows["text"][:] for rows in inputs.load_rows(args.dataset_name, sources))
    words = [*NOTES, *(f"{word}]" for kind in NOTES.values() for word in kind)]  # a token each
    start = f"{training_args.output_dir}/start"
    name = args.model_name_or_path or inputs.long_llama(start, train, words, args.seq_len)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)

    config = training_args.zero_config or zero.ZeroConfig(stage=0)
    sharing = config.sp_size * config.cp_size
    batches = training_args.world_size // sharing * training_args.gradient_accumulation_steps
    lengths = [length for length in growing(args.seq_len, training_args.max_steps) for _ in range(batches)]
    full = [args.seq_len] * max(4, batches)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=Documents(tokenizer, train, lengths, training_args.seed),
        eval_dataset={
            "whole": Documents(tokenizer, held_out, full, -1),
            "near": Documents(tokenizer, held_out, full, -1, is_near=True),
        },
        processing_class=tokenizer,
        data_collator=only,
        callbacks=[history],
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()  # the tokenizer too
    metrics = trainer.evaluate()
    history.finish(training_args.output_dir)
    if trainer.is_world_process_zero():
        whole, near = metrics["eval_whole_loss"], metrics["eval_near_loss"]
        print(f"held out: loss {whole:.4f} of whole documents, {near:.4f} without their first half")
        print(f"a document: {args.seq_len} tokens, on {sharing} ranks")


if __name__ == "__main__":
    main()
