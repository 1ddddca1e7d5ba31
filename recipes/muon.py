"""Train with Muon for the matrices and AdamW for the rest, in a loop of plain PyTorch.

Muon orthogonalises whole matrices. Both optimizers are made as always, on the partitioned model's parameters:

    torchrun --nproc-per-node 2 recipes/muon.py --zero configs/zero3.yaml --output_dir out/muon
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import inputs
import torch
import torch.distributed as dist
from history import History
from torch.utils.data import DataLoader, DistributedSampler
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_zero as zero


def main() -> None:
    """Read the arguments, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", help="ZeRO configuration: a stage (0 to 3), or a file (default: $HF_ZERO_CONFIG)")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--model_name_or_path", help="folder or hub name; default: a small Llama")
    parser.add_argument("--dataset_name", help="file or hub name; it has a column 'text'")
    parser.add_argument("--max_steps", type=int, default=120)
    parser.add_argument("--batch_size", type=int, default=16, help="of one rank")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--plot", action="store_true", help="draw loss and memory as history.png")
    args = parser.parse_args()

    dist.init_process_group()
    rank = dist.get_rank()
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(dist.get_node_local_rank())
    history = History(args.plot)
    torch.manual_seed(0)
    train, _ = inputs.load_rows(args.dataset_name, ({"text": text} for _, text in inputs.docstrings()))
    name = args.model_name_or_path or inputs.small_llama(f"{args.output_dir}/start", train["text"])
    tokenizer = AutoTokenizer.from_pretrained(name)
    with zero.Init(args.zero):
        model = AutoModelForCausalLM.from_pretrained(name)  # partitioned while it loads

    blocks = [param for name, param in model.named_parameters() if param.ndim == 2 and ".layers." in name]
    rest = [param for param in model.parameters() if all(param is not block for block in blocks)]
    optimizers = [
        torch.optim.Muon(blocks, lr=args.learning_rate, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=args.learning_rate),  # embedding, head and norms
    ]

    sampler = DistributedSampler(train)
    batches = DataLoader(train["text"][:], args.batch_size, sampler=sampler, drop_last=True)
    progress = tqdm(range(1, args.max_steps + 1), disable=rank > 0)
    for step, texts in zip(progress, forever(batches, sampler), strict=False):
        batch = tokenizer(
            [text + tokenizer.eos_token for text in texts],
            padding=True,
            truncation=True,
            max_length=128,
            return_tensors="pt",
        ).to(model.device)
        loss = model(**batch, labels=batch["input_ids"].where(batch["attention_mask"].bool(), -100)).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0 or step == args.max_steps:
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            progress.set_postfix(loss=f"{mean.item():.3f}")
            history.log(step, mean.item())

    model.save_pretrained(args.output_dir)  # all ranks; plain from_pretrained loads it
    if rank == 0:
        tokenizer.save_pretrained(args.output_dir)
    history.finish(args.output_dir)
    dist.destroy_process_group()


def forever(batches: DataLoader, sampler: DistributedSampler) -> Iterator[list[str]]:
    """Batches of epoch after epoch, each in its own order."""
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from batches


if __name__ == "__main__":
    main()
