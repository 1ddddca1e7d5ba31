"""Small models of random structure, and the paths that calls take through them."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 11


class Broken(Exception):
    """What a schedule raises on purpose."""


class Brief:
    """Shows only the fields that are not as usual."""

    def __repr__(self) -> str:
        shown = [f for f in fields(self) if f.default is MISSING or getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


@dataclass(frozen=True, repr=False)
class Visit(Brief):
    """One call of a block: which block, and what happens in it.

    `inner` is a checkpoint inside its forward: of all of it, of a part, or of two parts; `breaks` says when it raises.
    """

    block: int
    takes_branch: bool = False
    inner: str = ""
    is_reentrant: bool = False
    breaks: str = ""


@dataclass(frozen=True, repr=False)
class Segment(Brief):
    """Calls in a row, in a checkpoint around them or not."""

    visits: tuple[Visit, ...]
    checkpoint: str = ""


@dataclass(frozen=True)
class Shape:
    """What a model is made of."""

    width: int
    hidden: tuple[int, ...]  # one block each
    is_tied: bool
    has_root_parameters: bool
    dropout: float
    has_unused_module: bool
    reads_elsewhere: bool  # parameters of modules that are not being called
    frozen: frozenset[int]  # positions of parameters


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Broken("backward")


class RandomBlock(nn.Module):
    """Odd sizes, a scalar, one dimension, fewer rows than ranks, a parameter never used, a branch."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=hidden % 2 == 0)
        self.down = nn.Linear(hidden, width)
        self.side = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.randn(()))
        self.shift = nn.Parameter(torch.randn(width))
        self.row = nn.Parameter(torch.randn(1, width))
        self.never = nn.Parameter(torch.randn(3, 2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, visit: Visit) -> Tensor:
        if visit.inner == "all":
            return checkpoint(self._compute, x, visit, use_reentrant=visit.is_reentrant)
        return self._compute(x, visit)

    def _compute(self, x: Tensor, visit: Visit) -> Tensor:
        run: Callable[..., Tensor] = lambda part, *args: part(*args)  # noqa: E731
        if visit.inner in ("part", "parts"):
            run = partial(checkpoint, use_reentrant=visit.is_reentrant)
        h = run(self._mlp, self.norm(x) * self.row)
        if visit.breaks == "forward":
            raise Broken("forward")
        if visit.breaks == "interrupt":
            raise KeyboardInterrupt
        if visit.breaks == "backward":
            h = _RaiseInBackward.apply(h)
        if visit.takes_branch:
            h = (run if visit.inner == "parts" else lambda part, *args: part(*args))(self._branch, h)
        return x + h * self.scale + self.shift

    def _mlp(self, h: Tensor) -> Tensor:
        return self.down(self.dropout(torch.tanh(self.up(h))))

    def _branch(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.side(h))


class RandomNet(nn.Module):
    """Embedding, blocks, norm, head (tied or not), and parameters of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(RandomBlock(shape.width, hidden, shape.dropout) for hidden in shape.hidden)
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        if shape.is_tied:
            self.head.weight = self.embed.weight
        if shape.has_root_parameters:
            self.gain = nn.Parameter(torch.randn(VOCABULARY))
        if shape.has_unused_module:
            self.unused = nn.Linear(3, 5)
        self.reads_elsewhere = shape.reads_elsewhere
        for position, param in enumerate(self.parameters()):
            param.requires_grad_(position not in shape.frozen)

    def forward(self, tokens: Tensor, x: Tensor, path: tuple[Segment, ...]) -> tuple[Tensor, list[Tensor]]:
        h = self.embed(tokens) + x
        if self.reads_elsewhere:
            h = h + torch.tanh(self.norm.weight + self.head.weight.mean(0)) * self.blocks[0].row
        hidden = [h]
        for segment in path:
            if not segment.visits:
                continue
            if segment.checkpoint:
                h = checkpoint(self._run, segment, h, use_reentrant=segment.checkpoint == "reentrant")
            else:
                h = self._run(segment, h)
            hidden.append(h)
        logits = self.head(self.norm(h))
        return (logits * self.gain if hasattr(self, "gain") else logits), hidden

    def _run(self, segment: Segment, h: Tensor) -> Tensor:
        for visit in segment.visits:
            h = self.blocks[visit.block](h, visit)
        return h
