"""Train a LoRA adapter on text, with PEFT and the plain Trainer; what is saved is the adapter.

Frozen weights are partitioned like all others, and have neither gradients nor optimizer states:

    accelerate launch --config_file configs/accelerate/cpu2.yaml recipes/lora.py --zero configs/zero3.yaml --output_dir out/lora

By default the base is a small Llama with random weights. Better give it one that knows something, such as the model of
`sft.py`: `--model_name_or_path out/sft`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import inputs
from history import History
from peft import LoraConfig, get_peft_model
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
    """Which model, text and adapter."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or hub name; default: a small Llama."}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "File or hub name; it has a column 'text'."})
    rank: int = field(default=16, metadata={"help": "Rank of the adapter's matrices."})
    plot: bool = field(default=False, metadata={"help": "Draw loss and memory as history.png."})


def main() -> None:
    """Read the arguments, train, save."""
    parser = HfArgumentParser((RecipeArguments, zero.ZeroTrainingArguments))
    # For the small model; the command line comes first.
    parser.set_defaults(max_steps=80, learning_rate=5e-3, logging_steps=10, save_strategy="no")
    args, training_args = (
        parser.parse_args_into_dataclasses()
    )  # before the model, which is then partitioned as it loads
    history = History(args.plot)
    set_seed(training_args.seed)

    train, held_out = inputs.load_rows(args.dataset_name, ({"text": text} for _, text in inputs.docstrings()))
    name = args.model_name_or_path or inputs.small_llama(f"{training_args.output_dir}/start", train["text"])
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)
    head = None if args.model_name_or_path else ["lm_head"]  # a random one has to learn, too
    lora = LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules="all-linear",
        modules_to_save=head,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, lora)

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
    trainer.save_model()  # the adapter: PeftModel.from_pretrained(base, output_dir)
    metrics = trainer.evaluate()
    history.finish(training_args.output_dir)
    if trainer.is_world_process_zero():
        trained, whole = model.get_nb_trainable_parameters()
        print(f"held out: loss {metrics['eval_loss']:.4f}; trained {trained:,} of {whole:,} parameters")


if __name__ == "__main__":
    main()
