"""Train a model that embeds sentences, with sentence-transformers.

By default a small BERT, of MiniLM's kind, learns to find the description of a function by its name:

    accelerate launch --config_file configs/accelerate/cpu2.yaml recipes/embedding.py --zero configs/zero3.yaml \
        --output_dir out/embedding
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import inputs
from datasets import Dataset
from history import History
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import HfArgumentParser, set_seed

import hf_zero as zero


@dataclass
class RecipeArguments:
    """Which model and pairs of texts."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or hub name; default: a small BERT."}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "File or hub name; its columns 'anchor' and 'positive' belong together."}
    )
    plot: bool = field(default=False, metadata={"help": "Draw loss and memory as history.png."})


def main() -> None:
    """Read the arguments, train, save, search among the held-out texts."""
    parser = HfArgumentParser((RecipeArguments, zero.with_zero(SentenceTransformerTrainingArguments)))
    # For the small model; the command line comes first.
    parser.set_defaults(num_train_epochs=1, learning_rate=1e-3, per_device_train_batch_size=32, warmup_steps=20)
    parser.set_defaults(logging_steps=10, save_strategy="no")
    args, training_args = (
        parser.parse_args_into_dataclasses()
    )  # before the model, which is then partitioned as it loads
    history = History(args.plot)
    set_seed(training_args.seed)

    train, held_out = inputs.load_rows(args.dataset_name, names_and_descriptions(), held_out=0.02)
    texts = [*train["anchor"], *train["positive"]]
    name = args.model_name_or_path or inputs.small_bert(f"{training_args.output_dir}/start", texts)
    model = SentenceTransformer(name, device=str(training_args.device))

    trainer = SentenceTransformerTrainer(
        model=model,
        args=training_args,
        train_dataset=train.select_columns(["anchor", "positive"]),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=[history],
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()  # a folder that plain SentenceTransformer loads
    found = first_found(model, held_out)
    history.finish(training_args.output_dir)
    if trainer.is_world_process_zero():
        print(f"held out: the right one of {len(held_out)} texts comes first in {found:.1%}")


def names_and_descriptions() -> Iterator[dict[str, str]]:
    """The words of functions' names, and what is said of them."""
    for name, text in inputs.docstrings():
        yield {"anchor": name.replace(".", " ").replace("_", " "), "positive": text}


def first_found(model: SentenceTransformer, rows: Dataset) -> float:
    """How often the nearest text is the right one; all ranks call this, since under stage 3 they compute together."""
    anchors = model.encode(rows["anchor"][:], show_progress_bar=False)
    positives = model.encode(rows["positive"][:], show_progress_bar=False)
    nearest = model.similarity(anchors, positives).argmax(dim=1)
    return sum(int(index) == row for row, index in enumerate(nearest)) / len(rows)


if __name__ == "__main__":
    main()
