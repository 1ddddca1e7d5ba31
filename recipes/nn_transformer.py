"""Train `torch.nn.Transformer` with plain PyTorch: no Hugging Face library, one line of hf_zero.

A small model learns to sort numbers:

    torchrun --nproc-per-node 2 recipes/nn_transformer.py --zero configs/nn_transformer.yaml --output_dir out/nn_transformer

The configuration expects 2 ranks and refuses others. The weights end in one file that plain PyTorch reads.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from history import History
from torch import Tensor, nn
from tqdm.auto import tqdm

import hf_zero as zero

NUMBERS, LENGTH, START = 32, 8, 32  # numbers below 32, eight of them; the token that an answer starts with


class Sorter(nn.Module):
    """Reads numbers, and writes them in order."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUMBERS + 1, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, NUMBERS)

    def forward(self, numbers: Tensor, written: Tensor) -> Tensor:
        """Logits [batch, written, NUMBERS] of what comes after each written token."""
        mask = nn.Transformer.generate_square_subsequent_mask(written.shape[1], device=written.device)
        return self.head(self.transformer(self.embed(numbers), self.embed(written), tgt_mask=mask, tgt_is_causal=True))

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens and their places."""
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


def main() -> None:
    """Train, save, load in plain PyTorch, sort."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", default="nn_transformer", help="ZeRO configuration: a stage (0 to 3), or a file")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_steps", type=int, default=400)
    parser.add_argument("--plot", action="store_true", help="draw loss and memory as history.png")
    args = parser.parse_args()

    dist.init_process_group()
    rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(dist.get_node_local_rank())
        device = torch.accelerator.current_accelerator()
    history = History(args.plot)

    torch.manual_seed(0)  # equal weights on all ranks
    model = Sorter().to(device)
    zero.shard_model(model, args.zero)  # the line that is not plain PyTorch
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    torch.manual_seed(1 + rank)  # other numbers on each rank
    progress = tqdm(range(1, args.max_steps + 1), disable=rank > 0)
    for step in progress:
        loss = loss_of(model, torch.randint(NUMBERS, (64, LENGTH), device=device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.max_steps:
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            progress.set_postfix(loss=f"{mean.item():.3f}")
            history.log(step, mean.item())

    path = Path(args.output_dir, "model.pt")
    with zero.GatheredParameters(model):  # whole weights, on every rank
        if rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), path)
    history.finish(args.output_dir)
    if rank == 0:
        check(path)
    dist.destroy_process_group()


def loss_of(model: nn.Module, numbers: Tensor) -> Tensor:
    """Cross entropy of the numbers in order."""
    answer = numbers.sort(dim=1).values
    written = torch.cat([torch.full_like(answer[:, :1], START), answer[:, :-1]], dim=1)
    return nn.functional.cross_entropy(model(numbers, written).flatten(0, 1), answer.flatten())


@torch.no_grad()
def check(path: Path) -> None:
    """Load the weights in plain PyTorch, and sort new numbers, one after the other."""
    model = Sorter().eval()
    model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    numbers = torch.randint(NUMBERS, (200, LENGTH), generator=torch.Generator().manual_seed(0))
    written = torch.full((200, 1), START)
    for _ in range(LENGTH):
        written = torch.cat([written, model(numbers, written)[:, -1:].argmax(-1)], dim=1)
    is_sorted = (written[:, 1:] == numbers.sort(dim=1).values).all(dim=1)
    print(f"plain PyTorch sorts {is_sorted.float().mean():.1%} of 200 lists with the weights of {path}")


if __name__ == "__main__":
    main()
