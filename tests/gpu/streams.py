"""Programs that use several streams, as a program for DDP may: each joins its own streams, and knows of none of hf_zero's.

[Note: joined by the program] A stream is behind the main one when it begins, and the main one is behind it before it uses what
was made there. In between the program may wait for either of them. So each may be far ahead of the other, and memory that one
has given back may be used anew while the other has done nothing yet.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hf_zero as zero
from hf_zero import torch_compat
from tests.models import Stack, stack_batch

_STEPS = 3
_ON_HOST = {"offload": {"optimizer": "host", "parameters": "host"}}
_SETTINGS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in (0, 1, 2, 3)},
    "stage 3, on the host": {"stage": 3, **_ON_HOST},
}


class _Branches(Stack):
    """Every other block runs beside the one before, on a stream of its own."""

    side: torch.Stream | None = None

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        assert self.side is not None
        x = self.embedding(input_ids)
        main = torch.accelerator.current_stream()
        for first, second in itertools.pairwise(self.blocks):
            self.side.wait_stream(main)
            with self.side:
                beside = second(x)
                x.record_stream(self.side)
            here = first(x)
            main.wait_stream(self.side)
            beside.record_stream(main)
            x = here + beside
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), labels)


class _Split(nn.Module):
    """A block whose halves run on two streams; its first layer is frozen, so nobody waits for the gradient of that."""

    side: torch.Stream | None = None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.side is not None
        main = torch.accelerator.current_stream()
        self.side.wait_stream(main)
        x.record_stream(self.side)
        with self.side:
            hidden = self.frozen(x)
        main.wait_stream(self.side)
        hidden.record_stream(main)
        return x + self.down(torch.tanh(hidden))


class _Splits(Stack):
    """Blocks that are split."""

    def __init__(self, width: int = 12) -> None:
        super().__init__(width, num_blocks=0)
        self.blocks = nn.ModuleList(_Split(width) for _ in range(3))


class _Recomputing(Stack):
    """Blocks are computed again in the backward."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), labels)


@dataclass
class _Training:
    """A model in training, and what has been found of it.

    Attributes:
        main: the stream that the program began on.
        first, second: beside it; both are the main one where a program is to run on one stream.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    main: torch.Stream
    first: torch.Stream
    second: torch.Stream
    found: list[Tensor] = field(default_factory=list)

    @contextlib.contextmanager
    def on(self, side: torch.Stream, is_joined: bool = True) -> Iterator[None]:
        """Run on a stream behind the main one, which then waits for it."""
        side.wait_stream(self.main)
        with side:
            yield
        if is_joined:
            self.main.wait_stream(side)

    def loss(self, number: int) -> Tensor:
        """Of one batch of this rank."""
        batch = {name: tensor.to(self.device) for name, tensor in stack_batch(number, dist.get_rank()).items()}
        loss = self.model(**batch)
        self.found.append(loss.detach())
        return loss

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def crowd(self, *streams: torch.Stream) -> None:
        """Use memory of all sizes that is free on streams, and let them be ahead."""
        for stream in streams:
            with stream:
                for number in range(1, 25):
                    for _ in range(3):
                        torch.full((128 * number,), 7.0, device=self.device)
            if stream != self.main or self.first != self.main:
                stream.synchronize()


def _evaluates_beside(training: _Training, step: int) -> None:
    """An evaluation on a side stream is joined before the step only."""
    with training.on(training.first, is_joined=False), torch.no_grad():
        training.loss(10 + step)
    loss = training.loss(step)
    training.crowd(training.main)
    loss.backward()
    training.main.wait_stream(training.first)
    training.step()


def _evaluates_late(training: _Training, step: int) -> None:
    """The main stream is far ahead of an evaluation on another, and gets what that has given back."""
    with training.on(training.first, is_joined=False), torch.no_grad():
        training.loss(10 + step)
    training.crowd(training.main)
    training.loss(step).backward()
    training.crowd(training.main)
    training.main.wait_stream(training.first)
    training.step()


def _evaluates_between(training: _Training, step: int) -> None:
    """The evaluation comes between a forward and its backward."""
    loss = training.loss(step)
    with training.on(training.first, is_joined=False), torch.no_grad():
        training.loss(10 + step)
    training.crowd(training.main)
    loss.backward()
    training.crowd(training.main)
    training.main.wait_stream(training.first)
    training.step()


def _computes_on_another(training: _Training, step: int) -> None:
    """The forward is on a side stream, its backward on the main one."""
    with training.on(training.first):
        loss = training.loss(step)
    training.crowd(training.first)
    loss.backward()
    training.crowd(training.first)
    training.step()
    training.crowd(training.first)


def _goes_back_on_another(training: _Training, step: int) -> None:
    """The forward is on the main stream, its backward on a side stream."""
    loss = training.loss(step)
    with training.on(training.first):
        loss.backward()
    training.crowd(training.first)
    training.step()
    training.crowd(training.first)


def _computes_on_two(training: _Training, step: int) -> None:
    """Two forwards on two streams, one backward."""
    losses = []
    for number, side in enumerate((training.first, training.second)):
        with training.on(side, is_joined=False):
            losses.append(training.loss(2 * step + number))
        training.crowd(training.main)
    training.main.wait_stream(training.first)
    training.main.wait_stream(training.second)
    sum(losses).backward()
    training.crowd(training.first, training.second)
    training.step()


def _accumulates_on_two(training: _Training, step: int) -> None:
    """Each micro-batch is on a stream of its own, and the step behind both."""
    for number, side in enumerate((training.first, training.second)):
        with training.on(side):
            training.loss(2 * step + number).backward()
        training.crowd(side)
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
    training.step()


def _edits_beside(training: _Training, step: int) -> None:
    """Parameters are edited on two streams, and what computes with them is behind both."""
    sides = itertools.cycle((training.first, training.second))
    with torch.no_grad():
        for param in training.model.parameters():
            with training.on(next(sides), is_joined=False):
                param.mul_(0.9)
    training.main.wait_stream(training.first)
    training.main.wait_stream(training.second)
    training.loss(step).backward()
    training.step()


def _steps_beside(training: _Training, step: int) -> None:
    """The optimizer is on a side stream."""
    training.loss(step).backward()
    with training.on(training.first):
        training.step()
    training.crowd(training.first)


def _steps_on_a_third(training: _Training, step: int) -> None:
    """The forward and the optimizer are on two side streams, and the first goes on beside the second."""
    with training.on(training.first):
        loss = training.loss(step)
    loss.backward()
    with training.on(training.second, is_joined=False):
        training.step()
    training.crowd(training.first)
    training.main.wait_stream(training.second)


def _reads_beside(training: _Training, step: int) -> None:
    """Whole weights are read on a side stream, joined before the next step."""
    training.loss(step).backward()
    training.step()
    with training.on(training.first, is_joined=False), torch.no_grad():
        for param in training.model.parameters():
            whole = param.full_tensor() if isinstance(param, torch.distributed.tensor.DTensor) else param
            training.found.append(whole.norm().to(training.device))
    training.loss(10 + step).backward()
    training.crowd(training.main)
    training.main.wait_stream(training.first)
    training.optimizer.zero_grad()


def _lives_on_another(training: _Training, step: int) -> None:
    """All of it is on a stream of its own, and the main one does something else."""
    with training.on(training.first, is_joined=False):
        loss = training.loss(step)
        training.crowd(training.main)
        loss.backward()
        training.crowd(training.main)
        training.step()
    training.crowd(training.main)
    if step == _STEPS - 1:
        training.main.wait_stream(training.first)


def _branches(training: _Training, step: int) -> None:
    """The model itself has a side stream."""
    training.loss(step).backward()
    training.crowd(training.main, training.second)
    training.step()


def _splits(training: _Training, step: int) -> None:
    """A block itself has a side stream."""
    training.loss(step).backward()
    training.crowd(training.main, training.second)
    training.step()


def _recomputes(training: _Training, step: int) -> None:
    """The forward is on a side stream, and so is what is computed again in a backward on another."""
    with training.on(training.first):
        loss = training.loss(step)
    with training.on(training.second):
        loss.backward()
    training.crowd(training.first, training.second)
    training.step()


_MODELS: dict[Callable[[_Training, int], None], type[Stack]] = {
    _branches: _Branches,
    _splits: _Splits,
    _recomputes: _Recomputing,
}
_PROGRAMS: tuple[Callable[[_Training, int], None], ...] = (
    _evaluates_beside,
    _evaluates_late,
    _evaluates_between,
    _computes_on_another,
    _goes_back_on_another,
    _computes_on_two,
    _accumulates_on_two,
    _edits_beside,
    _steps_beside,
    _steps_on_a_third,
    _reads_beside,
    _lives_on_another,
    *_MODELS,
)


def _run(program: Any, setting: dict[str, Any], device: torch.device, num_streams: int) -> Tensor:
    """What a program finds, on one stream or on several."""
    torch.manual_seed(0)
    model = _MODELS.get(program, Stack)().to(device)
    zero.shard_model(model, {"units": ["_StackBlock", "_Split"], "timeout_s": 60, **setting})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    main = torch.accelerator.current_stream(device)
    first, second = (torch.Stream(device) if num_streams > 1 else main for _ in range(2))
    for module in model.modules():
        if hasattr(module, "side"):
            module.side = first
    training = _Training(model, optimizer, device, main, first, second)
    for step in range(_STEPS):
        program(training, step)
    torch.accelerator.synchronize()
    rows = [torch_compat.local_of(param.detach()).to(device) for param in model.parameters()]
    return torch.cat([torch.stack(training.found), torch.stack([each.norm() for each in rows])]).cpu()


def streams(device: torch.device) -> dict[str, Any]:
    """Programs of several streams find what they find on one, to the bit."""
    if device.type == "cpu":
        return {}
    wrong = []
    for (name, setting), program in itertools.product(_SETTINGS.items(), _PROGRAMS):
        expected = _run(program, setting, device, 1)
        found = _run(program, setting, device, 2)
        assert expected.isfinite().all(), (name, program.__name__, expected)
        if not torch.equal(expected, found):
            wrong.append(f"{name}: {program.__name__[1:]}: {found.isnan().sum()} of {len(found)} NaN")
    assert not wrong, wrong
    return {}


OF_TWO = (streams,)
