"""Teach a model by rewards that a program gives (group relative policy optimisation), with TRL.

By default a tiny Llama that starts from random weights learns to write dates as digits ("Sunday, 22 November 2026" is
20261122). It is rewarded for characters of the right kind, here digits, and more for the right ones:

    accelerate launch --config_file configs/accelerate/cpu2.yaml recipes/grpo.py --zero configs/zero3.yaml --output_dir out/grpo

The model writes by `generate`; with vLLM installed and a GPU, vLLM does, which gets the whole weights before it writes:
`--use_vllm false` is without, `--vllm_mode server` with one on other GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import zip_longest

import inputs
import torch
from history import History
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from trl import GRPOConfig, GRPOTrainer

import hf_zero as zero


@dataclass
class RecipeArguments:
    """Which model and tasks."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or hub name; default: a tiny Llama that reads bytes."}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "File or hub name; it has columns 'prompt' and 'answer'."}
    )
    plot: bool = field(default=False, metadata={"help": "Draw loss and memory as history.png."})


def main() -> None:
    """Read the arguments, train, save."""
    parser = HfArgumentParser((RecipeArguments, zero.with_zero(GRPOConfig)))
    # For the tiny model; the command line comes first.
    parser.set_defaults(max_steps=100, learning_rate=2e-3, logging_steps=5, save_strategy="no", max_completion_length=8)
    parser.set_defaults(per_device_train_batch_size=64, num_generations=16, reward_weights=[1.0, 2.0])
    parser.set_defaults(bf16=torch.accelerator.is_available(), activation_checkpointing=False)
    parser.set_defaults(use_vllm=find_spec("vllm") is not None and torch.accelerator.is_available())
    args, training_args = (
        parser.parse_args_into_dataclasses()
    )  # before the model, which is then partitioned as it loads
    history = History(args.plot)
    set_seed(training_args.seed)

    train, held_out = inputs.load_rows(args.dataset_name, tasks(), held_out=0.02)
    name = args.model_name_or_path or inputs.tiny_llama(f"{training_args.output_dir}/start")
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)

    trainer = GRPOTrainer(
        model=model,
        args=training_args,
        reward_funcs=[kinds_right, characters_right],
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
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        print(f"reward: {rewards[0]:.3f} -> {rewards[-1]:.3f}")
        print(f"held out: {metrics['eval_rewards/characters_right/mean']:.1%} of the characters are right")


def tasks() -> Iterator[dict[str, str]]:
    """Dates in words, and what to answer."""
    for words, answer in inputs.dates():
        yield {"prompt": f"{words} = ", "answer": answer.replace("-", "")}


def kinds_right(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """The share of characters of the right kind, such as digits."""
    return [_share(map(_kind, found), map(_kind, wanted)) for found, wanted in zip(completions, answer, strict=True)]


def characters_right(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """The share of characters that are right."""
    return [_share(found, wanted) for found, wanted in zip(completions, answer, strict=True)]


def _kind(character: str) -> str:
    return "digit" if character.isdigit() else "letter" if character.isalpha() else character


def _share(found: Iterable[str], wanted: Iterable[str]) -> float:
    pairs = list(zip_longest(found, wanted))
    return sum(left == right for left, right in pairs) / max(1, len(pairs))


if __name__ == "__main__":
    main()
