"""Translate with an encoder and a decoder (T5, BART, ...), with the plain Seq2SeqTrainer, which generates to evaluate.

By default a small T5 learns to write dates as numbers, "Sunday, 22 November 2026" as "2026-11-22":

    accelerate launch --config_file configs/accelerate/cpu2.yaml recipes/seq2seq.py --zero configs/zero3.yaml \
        --output_dir out/seq2seq
"""

from __future__ import annotations

from dataclasses import dataclass, field

import inputs
import numpy
from history import History
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

import hf_zero as zero


@dataclass
class RecipeArguments:
    """Which model and pairs of texts."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Folder or hub name; default: a small T5."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "File or hub name; it has columns 'source' and 'target'."}
    )
    plot: bool = field(default=False, metadata={"help": "Draw loss and memory as history.png."})


def main() -> None:
    """Read the arguments, train, save, translate the held-out texts."""
    parser = HfArgumentParser((RecipeArguments, zero.with_zero(Seq2SeqTrainingArguments)))
    # For the small model; the command line comes first.
    parser.set_defaults(num_train_epochs=2, learning_rate=3e-3, per_device_train_batch_size=16, warmup_steps=20)
    parser.set_defaults(logging_steps=20, save_strategy="no", predict_with_generate=True, generation_max_length=32)
    args, training_args = (
        parser.parse_args_into_dataclasses()
    )  # before the model, which is then partitioned as it loads
    history = History(args.plot)
    set_seed(training_args.seed)

    default = ({"source": source, "target": target} for source, target in inputs.dates())
    train, held_out = inputs.load_rows(args.dataset_name, default, held_out=0.02)
    texts = [*train["source"], *train["target"]]
    name = args.model_name_or_path or inputs.small_t5(f"{training_args.output_dir}/start", texts)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForSeq2SeqLM.from_pretrained(name)

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(rows["source"], truncation=True, max_length=256)
        targets = tokenizer(rows["target"], truncation=True, max_length=255, add_special_tokens=False)["input_ids"]
        return {**encoded, "labels": [[*tokens, tokenizer.eos_token_id] for tokens in targets]}

    def exact_match(found: EvalPrediction) -> dict[str, float]:
        def decode(tokens: numpy.ndarray) -> list[str]:
            tokens = numpy.where(tokens < 0, tokenizer.pad_token_id, tokens)  # -100: what batches were filled with
            return tokenizer.batch_decode(tokens, skip_special_tokens=True)

        pairs = zip(decode(found.predictions), decode(found.label_ids), strict=True)
        return {"exact_match": float(numpy.mean([written == target for written, target in pairs]))}

    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=train.map(encode, batched=True, remove_columns=train.column_names),
        eval_dataset=held_out.map(encode, batched=True, remove_columns=held_out.column_names),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        compute_metrics=exact_match,
        callbacks=[history],
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()  # a folder that plain from_pretrained loads
    metrics = trainer.evaluate()
    history.finish(training_args.output_dir)
    if trainer.is_world_process_zero():
        print(f"held out: loss {metrics['eval_loss']:.4f}, exactly right {metrics['eval_exact_match']:.1%}")


if __name__ == "__main__":
    main()
