"""Small causal language models, batches of sequences, and one process on whole ones beside ranks on slices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.engine.engine import ZeroEngine
from tests.engine.twins import NEAR, PartitionedTensor, assert_same, own_rows, whole

VOCAB, LENGTH, BATCH = 67, 10, 2
Batch = dict[str, Any]

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
_WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "head_dim": 8}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, **_WINDOW),  # one layer sees a window, the other all
    "mistral": lambda: transformers.MistralConfig(**_SIZES, sliding_window=4),
    "gpt2": lambda: transformers.GPT2Config(**_GPT2, **_NO_DROPOUT),
    "gemma": lambda: transformers.GemmaConfig(**{**_SIZES, "num_key_value_heads": 1}, head_dim=6),
    "gemma2": lambda: transformers.Gemma2Config(**_SIZES, head_dim=6, sliding_window=4, query_pre_attn_scalar=6),
}


def make(name: str, attention: str = "sdpa") -> Any:
    """The same model everywhere, in training mode."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=attention).train()


def plain(step: int, group: int, length: int = LENGTH) -> Batch:
    """Full sequences."""
    ids = torch.randint(1, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(100 * step + group))
    return {"input_ids": ids, "labels": ids.clone()}


def ragged(step: int, group: int) -> Batch:
    """Sequences of other lengths, of a number of tokens that no ranks divide; padded at the end, the first half no target."""
    batch = plain(step, group, LENGTH + 1 + 2 * step)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 4 + group :] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    labels[1, : len(labels[1]) // 2 + 1] = -100
    return {**batch, "attention_mask": mask, "labels": labels}


def one_sided(step: int, group: int) -> Batch:
    """All targets in the first tokens: other slices have none."""
    batch = plain(step, group)
    labels = batch["labels"].clone()
    labels[:, 3:] = -100
    return {**batch, "labels": labels}


def left_padded(step: int, group: int) -> Batch:
    """Padded at the beginning."""
    batch = plain(step, group)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :3] = 0
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def packed(step: int, group: int) -> Batch:
    """Three documents in a row, which do not see each other; the slices cut through one of them."""
    batch = plain(step, group)
    batch["input_ids"], labels = batch["input_ids"][:1], batch["labels"][:1]
    places = torch.cat([torch.arange(3), torch.arange(4), torch.arange(LENGTH - 7)]).unsqueeze(0)
    return {"input_ids": batch["input_ids"], "position_ids": places, "labels": labels.masked_fill(places == 0, -100)}


BATCHES: dict[str, Callable[[int, int], Batch]] = {
    each.__name__: each for each in (plain, ragged, one_sided, left_padded, packed)
}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


class Pair:
    """A partitioned model over slices, and one process on whole sequences.

    Args:
        model: as it is in one process.
        config: of the partitioned one.
    """

    def __init__(self, model: nn.Module, **config: Any) -> None:
        self.reference = model
        self.model = copy.deepcopy(model)
        self.engine: ZeroEngine = zero.shard_model(self.model, zero.ZeroConfig(**config))
        world = self.engine.world
        self.groups, self.own = range(world.num_batches), world.batch_rank
        self.optimizers = [
            torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.3, momentum=0.9)
            for each in (self.model, self.reference)
        ]

    def backward(self, draw: Callable[[int, int], Batch], step: int) -> None:
        """One backward each; losses, and each rank's rows of gradients, are those of one process."""
        self.accumulate(draw, step)
        self.compare_gradients()

    def accumulate(self, draw: Callable[[int, int], Batch], step: int) -> None:
        """One backward each; losses are those of one process."""
        loss = loss_of(self.model, draw(step, self.own))
        loss.backward()
        losses = []
        for group in self.groups:
            expected = loss_of(self.reference, draw(step, group))
            (expected / len(self.groups)).backward()
            losses.append(float(expected.detach()))
        assert abs(loss.item() - losses[self.own]) <= 1e-6 * abs(losses[self.own]), (loss.item(), losses)

    def compare_gradients(self) -> None:
        """Gradients are those of one process: of partitioned ones, on every rank the rows that it holds."""
        for (name, ours), theirs in zip(self.model.named_parameters(), self.reference.parameters(), strict=True):
            if theirs.requires_grad:
                assert ours.grad is not None and theirs.grad is not None, name
                if isinstance(ours.grad, PartitionedTensor):
                    assert ours.grad.shape == theirs.grad.shape, name
                    near(ours.grad.rows, own_rows(theirs.grad, ours.grad), name, float(theirs.grad.abs().max()))
                else:
                    near(whole(ours.grad), theirs.grad, name, float(theirs.grad.abs().max()))

    def steps(self, draw: Callable[[int, int], Batch], steps: Iterable[int] = range(2)) -> None:
        """Optimizer steps, after which weights are those of one process."""
        for step in steps:
            self.backward(draw, step)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same(self.model, self.reference, NEAR)


def near(ours: Tensor, theirs: Tensor, what: str, largest: float) -> None:
    """Gradients are added up in another order; `largest` is that of the whole one."""
    # Beside gradients in float64, those of one process are off by as much.
    bound = max(1e-6, 3e-6 * largest)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=bound, msg=lambda text: f"{what}: {text}")
