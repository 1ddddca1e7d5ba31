"""Write the training loop yourself, with accelerate: train, evaluate, save the state, resume, export.

An accelerate loop in which `Accelerator` became `ZeroAccelerator`:

    accelerate launch --config_file configs/accelerate/cpu2.yaml recipes/custom_loop.py --zero configs/zero3.yaml \
        --output_dir out/custom_loop

With `--resume` it goes on from the state of the last epoch, on any number of ranks and in any stage.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import inputs
import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from datasets import Dataset
from history import History
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

import hf_zero as zero


def main() -> None:
    """Read the arguments, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", help="ZeRO configuration: a stage (0 to 3), or a file (default: $HF_ZERO_CONFIG)")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--model_name_or_path", help="folder or hub name; default: a small Llama")
    parser.add_argument("--dataset_name", help="file or hub name; it has a column 'text'")
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--max_steps", type=int, default=-1, help="instead of epochs")
    parser.add_argument("--max_train_samples", type=int, default=2000, help="rows to train on, at most")
    parser.add_argument("--batch_size", type=int, default=16, help="of one rank")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--resume", action="store_true", help="go on from the last epoch that was saved")
    parser.add_argument("--plot", action="store_true", help="draw loss and memory as history.png")
    args = parser.parse_args()

    accelerator = zero.ZeroAccelerator(
        zero_plugin=zero.ZeroPlugin(args.zero),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # what resuming repeats
    )
    history = History(args.plot)
    set_seed(0)
    train, held_out = inputs.load_rows(args.dataset_name, ({"text": text} for _, text in inputs.docstrings()))
    train = train.take(min(args.max_train_samples, len(train)))
    name = args.model_name_or_path or inputs.small_llama(f"{args.output_dir}/start", train["text"])
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)

    def collate(rows: list[dict[str, str]]) -> dict[str, Tensor]:
        texts = [row["text"] + tokenizer.eos_token for row in rows]
        batch = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
        batch["labels"] = batch["input_ids"].where(batch["attention_mask"].bool(), -100)
        return batch

    def loader(rows: Dataset, shuffle: bool) -> DataLoader:
        return DataLoader(rows, args.batch_size, shuffle=shuffle, collate_fn=collate, drop_last=shuffle)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    batches, held_out_batches = loader(train, True), loader(held_out, False)
    ranks = accelerator.num_processes  # the scheduler steps once for each of them
    total = args.max_steps * ranks if args.max_steps > 0 else args.num_train_epochs * len(batches)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 20, total)
    model, optimizer, batches, held_out_batches, scheduler = accelerator.prepare(
        model, optimizer, batches, held_out_batches, scheduler
    )
    steps = len(batches)
    last = args.max_steps if args.max_steps > 0 else args.num_train_epochs * steps
    state = Path(args.output_dir, "state")
    if args.resume:
        accelerator.load_state(state)
    first_epoch = scheduler.scheduler.last_epoch // (steps * ranks)

    for epoch in range(first_epoch, -(-last // steps)):
        model.train()
        rest = itertools.islice(batches, last - epoch * steps)
        progress = tqdm(
            rest, total=min(steps, last - epoch * steps), desc=f"epoch {epoch}", disable=not accelerator.is_main_process
        )
        for step, batch in enumerate(progress):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            done = epoch * steps + step + 1
            if step % 10 == 0 or done % steps == 0 or done == last:
                mean = accelerator.reduce(loss.detach(), "mean").item()
                progress.set_postfix(loss=f"{mean:.3f}")
                history.log(done, mean)
        if last >= (epoch + 1) * steps:
            accelerator.save_state(state)  # all ranks write it together
        accelerator.print(f"epoch {epoch}: held-out loss {evaluate(accelerator, model, held_out_batches):.4f}")

    accelerator.unwrap_model(model).save_pretrained(args.output_dir)  # all ranks; plain from_pretrained loads it
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
    history.finish(args.output_dir)
    accelerator.end_training()


@torch.no_grad()
def evaluate(accelerator: zero.ZeroAccelerator, model: torch.nn.Module, batches: DataLoader) -> float:
    """The mean loss of held-out texts; all ranks call this, since under stage 3 they compute together."""
    model.eval()
    losses = [accelerator.gather_for_metrics(model(**batch).loss.repeat(len(batch["labels"]))) for batch in batches]
    return torch.cat(losses).mean().item()


if __name__ == "__main__":
    main()
