"""Classify images with a vision transformer, with the plain Trainer.

By default a small ViT learns to read scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, to over 95%:

    accelerate launch --config_file configs/accelerate/cpu2.yaml recipes/vit.py --zero configs/zero3.yaml --output_dir out/vit
"""

from __future__ import annotations

from dataclasses import dataclass, field

import inputs
import torch
from datasets import Dataset
from history import History
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    ViTConfig,
    set_seed,
)

import hf_zero as zero


@dataclass
class RecipeArguments:
    """Which model and images."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Folder or hub name; default: a small ViT."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub name or parquet file; it has columns 'image' and 'label' (a number)."}
    )
    plot: bool = field(default=False, metadata={"help": "Draw loss and memory as history.png."})

    def __post_init__(self) -> None:
        if bool(self.model_name_or_path) != bool(self.dataset_name):
            raise ValueError("--model_name_or_path and --dataset_name go together: the small ViT reads digits only.")


def main() -> None:
    """Read the arguments, train, save."""
    parser = HfArgumentParser((RecipeArguments, zero.ZeroTrainingArguments))
    # For the digits; the command line comes first.
    parser.set_defaults(num_train_epochs=20, learning_rate=1e-3, per_device_train_batch_size=32, warmup_steps=50)
    parser.set_defaults(logging_steps=20, save_strategy="no", remove_unused_columns=False)
    args, training_args = (
        parser.parse_args_into_dataclasses()
    )  # before the model, which is then partitioned as it loads
    history = History(args.plot)
    set_seed(training_args.seed)

    if args.model_name_or_path:
        train, held_out = inputs.load_rows(args.dataset_name, [])
        labels = len(set(train["label"]))
        train, held_out = (with_pixels(rows, args.model_name_or_path) for rows in (train, held_out))
        model = AutoModelForImageClassification.from_pretrained(
            args.model_name_or_path, num_labels=labels, ignore_mismatched_sizes=True
        )
    else:
        train, held_out = digits()
        model = AutoModelForImageClassification.from_config(small_vit())

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=collate,
        compute_metrics=accuracy,
        callbacks=[history],
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()  # a folder that plain from_pretrained loads
    metrics = trainer.evaluate()
    history.finish(training_args.output_dir)
    if trainer.is_world_process_zero():
        print(f"held out: loss {metrics['eval_loss']:.4f}, accuracy {metrics['eval_accuracy']:.1%}")


def small_vit() -> ViTConfig:
    """A ViT of 200,000 parameters for images of 8 x 8 pixels, cut into 16 patches."""
    return ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_labels=10,
    )


def digits() -> tuple[Dataset, Dataset]:
    """scikit-learn's digits; a fifth is held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = found.images[:, None].astype("float32") / 8 - 1
    rows = Dataset.from_dict({"pixel_values": pixels, "label": found.target}).with_format("torch")
    split = rows.train_test_split(0.2, seed=0)
    return split["train"], split["test"]


def with_pixels(rows: Dataset, model: str) -> Dataset:
    """The images of rows as the model wants them, made when they are read."""
    processor = AutoImageProcessor.from_pretrained(model)

    def prepare(rows: dict[str, list[object]]) -> dict[str, object]:
        images = [image.convert("RGB") for image in rows["image"]]
        return {"pixel_values": processor(images, return_tensors="pt")["pixel_values"], "label": rows["label"]}

    return rows.with_transform(prepare)


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of images and labels."""
    labels = torch.tensor([int(row["label"]) for row in rows])
    return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": labels}


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """The share of right answers."""
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


if __name__ == "__main__":
    main()
