"""Teach a model which of two answers is better (direct preference optimisation), with TRL.

The reference model is partitioned, too. By default a small Llama learns to prefer a function's own description:

    accelerate launch --config_file configs/accelerate/cpu2.yaml recipes/dpo.py --zero configs/zero3.yaml --output_dir out/dpo

By default it starts from random weights. Better give it a model that can answer, such as that of `sft.py`:
`--model_name_or_path out/sft`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import inputs
import torch
from history import History
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from trl import DPOConfig, DPOTrainer

import hf_zero as zero


@dataclass
class RecipeArguments:
    """Which model and preferences."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or hub name; default: a small Llama."}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "File or hub name; it has columns 'prompt', 'chosen' and 'rejected'."}
    )
    plot: bool = field(default=False, metadata={"help": "Draw loss and memory as history.png."})


def main() -> None:
    """Read the arguments, train, save."""
    parser = HfArgumentParser((RecipeArguments, zero.with_zero(DPOConfig)))
    # For the small model; the command line comes first.
    parser.set_defaults(max_steps=60, learning_rate=5e-4, max_length=256, logging_steps=5, save_strategy="no")
    parser.set_defaults(bf16=torch.accelerator.is_available(), activation_checkpointing=False)
    args, training_args = (
        parser.parse_args_into_dataclasses()
    )  # before the model, which is then partitioned as it loads
    history = History(args.plot)
    set_seed(training_args.seed)

    train, held_out = inputs.load_rows(args.dataset_name, preferences(), held_out=0.02)
    texts = (text for row in train for text in (str(row["prompt"]), str(row["chosen"])))
    name = args.model_name_or_path or inputs.small_llama(f"{training_args.output_dir}/start", texts)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)

    trainer = DPOTrainer(
        model=model,  # TRL loads its reference from the same folder
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[history],
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()  # a folder that plain from_pretrained loads
    metrics = trainer.evaluate()
    history.finish(training_args.output_dir)
    if trainer.is_world_process_zero():
        accuracy = metrics["eval_rewards/accuracies"]
        print(f"held out: the better answer is preferred in {accuracy:.1%}, by {metrics['eval_rewards/margins']:.2f}")


def preferences() -> Iterator[dict[str, str]]:
    """Questions about the standard library, with their answers and with answers to the question before."""
    other = ""
    for question, answer in inputs.questions():
        if other and other != answer:
            # Backwards, so that a model can tell them apart that has seen no language yet.
            yield {"prompt": question, "chosen": f" {answer}", "rejected": " " + " ".join(reversed(other.split()))}
        other = answer


if __name__ == "__main__":
    main()
