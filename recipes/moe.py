"""Train a mixture of experts on text, with the plain Trainer: each rank computes some experts, and tokens go to them.

One key of the configuration makes it so, `ep_size`; what is saved is what one process would save:

    accelerate launch --config_file configs/accelerate/cpu2.yaml recipes/moe.py --zero configs/expert_parallel.yaml \
        --output_dir out/moe

By default the model is a small Qwen3-MoE with 8 experts in each layer and a loss that keeps its router balanced.
`--model_name_or_path Qwen/Qwen3-30B-A3B` takes another one: any of transformers that has a plan for its experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import inputs
from history import History
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    set_seed,
)

import hf_zero as zero


@dataclass
class RecipeArguments:
    """Which model and text."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or hub name; default: a small Qwen3-MoE."}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "File or hub name; it has a column 'text'."})
    plot: bool = field(default=False, metadata={"help": "Draw loss and memory as history.png."})


def main() -> None:
    """Read the arguments, train, save."""
    parser = HfArgumentParser((RecipeArguments, zero.ZeroTrainingArguments))
    # For the small model; the command line comes first.
    parser.set_defaults(max_steps=100, learning_rate=3e-3, logging_steps=10, save_strategy="no")
    args, training_args = (
        parser.parse_args_into_dataclasses()
    )  # before the model, of which each rank then reads its experts only
    history = History(args.plot)
    set_seed(training_args.seed)

    train, held_out = inputs.load_rows(args.dataset_name, ({"text": text} for _, text in inputs.docstrings()))
    name = args.model_name_or_path or inputs.small_moe(f"{training_args.output_dir}/start", train["text"])
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)

    def tokenise(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return tokenizer([text + tokenizer.eos_token for text in rows["text"]], truncation=True, max_length=512)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train.map(tokenise, batched=True, remove_columns=train.column_names),
        eval_dataset=held_out.map(tokenise, batched=True, remove_columns=held_out.column_names),
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[history],
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()  # the tokenizer too
    metrics = trainer.evaluate()
    history.finish(training_args.output_dir)
    if trainer.is_world_process_zero():
        size = training_args.zero_config.ep_size if training_args.zero_config else 1
        print(f"held out: loss {metrics['eval_loss']:.4f}; all experts of a layer on {size} ranks")


if __name__ == "__main__":
    main()
