"""Classify texts, with the plain Trainer.

By default a small BERT learns which package of the standard library a description is from:

    accelerate launch --config_file configs/accelerate/cpu2.yaml recipes/classification.py --zero configs/zero3.yaml \
        --output_dir out/classification
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import inputs
from history import History
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    set_seed,
)

import hf_zero as zero

PACKAGES = ("asyncio", "email", "idlelib", "importlib", "logging", "tkinter", "unittest", "xml")


@dataclass
class RecipeArguments:
    """Which model and texts."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or hub name; default: a small BERT."}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "File or hub name; it has columns 'text' and 'label' (a name or a number)."}
    )
    plot: bool = field(default=False, metadata={"help": "Draw loss and memory as history.png."})


def main() -> None:
    """Read the arguments, train, save."""
    parser = HfArgumentParser((RecipeArguments, zero.ZeroTrainingArguments))
    # For the small model; the command line comes first.
    parser.set_defaults(num_train_epochs=6, learning_rate=1e-3, per_device_train_batch_size=16, warmup_steps=20)
    parser.set_defaults(logging_steps=20, save_strategy="no")
    # BERT's loss is a mean whatever it is told; transformers would multiply it by the number of ranks.
    parser.set_defaults(average_tokens_across_devices=False)
    args, training_args = (
        parser.parse_args_into_dataclasses()
    )  # before the model, which is then partitioned as it loads
    history = History(args.plot)
    set_seed(training_args.seed)

    train, held_out = inputs.load_rows(args.dataset_name, descriptions(), held_out=0.15)
    labels = sorted(set(train["label"]) | set(held_out["label"]))
    name = args.model_name_or_path or inputs.small_bert(f"{training_args.output_dir}/start", train["text"])
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForSequenceClassification.from_pretrained(
        name, num_labels=len(labels), id2label={number: str(label) for number, label in enumerate(labels)}
    )

    def encode(rows: dict[str, list[str]]) -> dict[str, list[object]]:
        encoded = tokenizer(rows["text"], truncation=True, max_length=128)
        return {**encoded, "labels": [labels.index(label) for label in rows["label"]]}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train.map(encode, batched=True, remove_columns=train.column_names),
        eval_dataset=held_out.map(encode, batched=True, remove_columns=held_out.column_names),
        processing_class=tokenizer,  # pads the batches
        compute_metrics=accuracy,
        callbacks=[history],
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()  # a folder that plain from_pretrained and pipeline() load
    metrics = trainer.evaluate()
    history.finish(training_args.output_dir)
    if trainer.is_world_process_zero():
        print(
            f"held out: loss {metrics['eval_loss']:.4f}, accuracy {metrics['eval_accuracy']:.1%} of {len(labels)} labels"
        )


def descriptions() -> Iterator[dict[str, str]]:
    """What is said of the functions of eight packages, and the packages as labels."""
    for name, text in inputs.docstrings():
        if (package := name.partition(".")[0]) in PACKAGES:
            yield {"text": text, "label": package}


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """The share of right answers."""
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


if __name__ == "__main__":
    main()
