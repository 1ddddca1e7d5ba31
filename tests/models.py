"""Tiny models and batches that the tests share: every kind of structure that partitioning has to get right.

No dropout anywhere: the unsharded oracle runs the ranks' batches one after the other, so it draws other random numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

VOCAB, LENGTH, BATCH = 37, 6, 2  # 37 rows divide neither by 2 nor by 3

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        name: for test ids.
        build: makes the model from torch's current random state.
        make_batch: a batch from a generator; the third argument is the rank that it is for.
        reuses_weights: a parameter is used by several calls (tied weights, a module called twice): stages 2 and 3 reduce
            it once for each of them, which is another order of additions than autograd's.
    """

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator, int], Batch]
    reuses_weights: bool = False

    def batch(self, step: int, rank: int, micro: int = 0) -> Batch:
        """The batch of one micro-batch of a step on a rank, the same wherever it is asked for."""
        generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
        return self.make_batch(generator, rank)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of `batch`."""
        output = model(**batch)
        return output if isinstance(output, Tensor) else output.loss


def make_model(case: Case, seed: int = 0) -> nn.Module:
    """The model of a case, the same for the same seed, in training mode."""
    torch.manual_seed(seed)
    return case.build().train()


def train(
    model: nn.Module,
    optimizer: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Callable[[int, int], Any],
    steps: Iterable[int] = range(4),
    ranks: Sequence[int] | None = None,
    clip: float | None = None,
) -> tuple[list[float], list[float]]:
    """Train on the batches of `ranks`, which count alike: this rank's own, or all of them for an unsharded model.

    Returns:
        The losses, by step and by rank, and the norms that `clip_grad_norm_` gave, where it was asked for.
    """
    own = [dist.get_rank()] if ranks is None else ranks
    losses, norms = [], []
    for step in steps:
        for index, rank in enumerate(own):
            is_last = index == len(own) - 1
            with contextlib.nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
                found = loss(model, batch(step, rank)) / len(own)
                found.backward()
            losses.append(found.item() * len(own))
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def _tokens(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(1, VOCAB, shape, generator=generator)


def _language_batch(generator: torch.Generator, rank: int) -> Batch:
    ids = _tokens(generator, BATCH, LENGTH)
    return {"input_ids": ids, "labels": ids}


def _sequence_batch(generator: torch.Generator, rank: int) -> Batch:
    ids = _tokens(generator, BATCH, LENGTH)
    return {"input_ids": ids, "labels": torch.randint(0, 3, (BATCH,), generator=generator)}


def _translation_batch(generator: torch.Generator, rank: int) -> Batch:
    return {"input_ids": _tokens(generator, BATCH, LENGTH), "labels": _tokens(generator, BATCH, LENGTH - 1)}


def _image_batch(generator: torch.Generator, rank: int) -> Batch:
    pixels = torch.randn(BATCH, 3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 3, (BATCH,), generator=generator)}


def _feature_batch(generator: torch.Generator, rank: int) -> Batch:
    x, target = torch.randn(4, 7, generator=generator), torch.randn(4, 2, generator=generator)
    return {"x": x, "target": target, "takes_branch": torch.tensor(rank == 0)}


def llama() -> nn.Module:
    """Untied head, grouped-query attention."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """Tied head, transposed linear layers, biases."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    """A head of three rows, a pooler, buffers."""
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
        attn_implementation="sdpa",
    )
    return transformers.BertForSequenceClassification(config)


def t5() -> nn.Module:
    """One embedding used by encoder, decoder and head."""
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=28,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    """A convolution, a class token, position embeddings that are plain parameters."""
    config = transformers.ViTConfig(
        hidden_size=16,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
        attn_implementation="eager",
    )
    return transformers.ViTForImageClassification(config)


def mixtral() -> nn.Module:
    """Top-2 routing over more experts than a batch reaches; experts are three-dimensional parameters."""
    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        attn_implementation="eager",
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config)


class Translator(nn.Module):
    """`torch.nn.Transformer` between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 28, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.transformer(self.embedding(input_ids), self.embedding(labels))
        return nn.functional.cross_entropy(self.head(hidden).transpose(1, 2), labels)


class Block(nn.Module):
    """A repeated block with a scalar and a vector of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(x)) + self.shift


class Fork(nn.Module):
    """A module that all ranks call, with a branch that only some of them take."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor, takes_branch: Tensor) -> Tensor:
        return x + self.experts[0](x) + (self.experts[1](x) if takes_branch else 0)


class AwkwardMLP(nn.Module):
    """Shapes that do not divide, and parameters that not every rank uses.

    Rows: 5 and 7 (no rank count divides them), 2 and 1 (fewer than ranks), 0; scalars; `never` is used on no rank,
    `fork.experts[1]` on rank 0 only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(2))
        self.fork = Fork(5)
        self.last = nn.Linear(5, 2)
        self.single = nn.Parameter(torch.randn(1, 2))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.gain = nn.Parameter(torch.ones(3))
        self.never = nn.Linear(5, 3)
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor, target: Tensor, takes_branch: Tensor) -> Tensor:
        x = self.first(x.to(self.gain.dtype))
        for block in self.blocks:
            x = block(x)
        x = self.fork(x, takes_branch)
        x = self.last(x) * self.temperature * self.gain.mean() + self.single + self.nothing.sum()
        return nn.functional.mse_loss(x, target)


class Stack(nn.Module):
    """Blocks of two linear layers and a norm, every dimension a multiple of `width`: exact sums of bytes.

    Args:
        width: rows of most parameters; the inner dimension is twice that.
        num_blocks: how many blocks.
    """

    def __init__(self, width: int = 12, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * width, width)
        self.blocks = nn.ModuleList(_StackBlock(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 2 * width)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), labels)


class _StackBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def stack_batch(step: int, rank: int, width: int = 12) -> Batch:
    """Token ids below `2 * width`, which fit a `Stack` of that width."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, 2 * width, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


CASES = {
    case.name: case
    for case in (
        Case("llama", llama, _language_batch),
        Case("gpt2", gpt2, _language_batch, reuses_weights=True),
        Case("bert", bert, _sequence_batch),
        Case("t5", t5, _translation_batch, reuses_weights=True),
        Case("vit", vit, _image_batch),
        Case("mixtral", mixtral, _language_batch),
        Case("translator", Translator, _translation_batch, reuses_weights=True),
        Case("mlp", AwkwardMLP, _feature_batch),
    )
}
