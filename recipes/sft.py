"""Teach a model to answer in chats (supervised fine-tuning), with TRL.

TRL's script with one argument more, `--zero`. By default a small Llama learns what the standard library's functions do:

    accelerate launch --config_file configs/accelerate/cpu2.yaml recipes/sft.py --zero configs/zero3.yaml --output_dir out/sft
"""

from __future__ import annotations

from dataclasses import dataclass, field

import inputs
import torch
from history import History
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedTokenizerBase, set_seed
from trl import SFTConfig, SFTTrainer

import hf_zero as zero


@dataclass
class RecipeArguments:
    """Which model and chats."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or hub name; default: a small Llama."}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "File or hub name; it has a column 'messages'."})
    plot: bool = field(default=False, metadata={"help": "Draw loss and memory as history.png."})


def main() -> None:
    """Read the arguments, train, save, ask a question."""
    parser = HfArgumentParser((RecipeArguments, zero.with_zero(SFTConfig)))
    # For the small model; the command line comes first.
    parser.set_defaults(max_steps=100, learning_rate=2e-3, max_length=256, logging_steps=10, save_strategy="no")
    parser.set_defaults(bf16=torch.accelerator.is_available(), activation_checkpointing=False)
    args, training_args = (
        parser.parse_args_into_dataclasses()
    )  # before the model, which is then partitioned as it loads
    history = History(args.plot)
    set_seed(training_args.seed)

    train, held_out = inputs.load_rows(args.dataset_name, ({"messages": chat(*pair)} for pair in inputs.questions()))
    texts = (message["content"] for row in train for message in row["messages"])
    name = args.model_name_or_path or inputs.small_llama(f"{training_args.output_dir}/start", texts)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)

    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[history],
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()  # a folder that plain from_pretrained loads
    metrics = trainer.evaluate()
    answer = ask(model, tokenizer, held_out[0]["messages"][:1])  # all ranks: under stage 3, they compute together
    history.finish(training_args.output_dir)
    if trainer.is_world_process_zero():
        print(f"held out: loss {metrics['eval_loss']:.4f}")
        print(f"{held_out[0]['messages'][0]['content']} -> {answer!r}")


def chat(question: str, answer: str) -> list[dict[str, str]]:
    """A question and its answer as messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def ask(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """The model's answer to messages, at most 40 tokens."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    prompt = prompt.to(model.device)
    model.eval()
    output = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


if __name__ == "__main__":
    main()
