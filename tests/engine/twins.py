"""What the engine's tests train: a small model, and the unsharded one beside it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import hf_zero as zero

ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SHORT_S = 2.5  # how long ranks wait for a peer in tests where it never comes


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks between two layers; 5 and 3 rows do not divide by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(3))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    """All parameters are equal, up to the order in which two ranks' gradients are added."""
    for (name, left), (_, right) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(whole(left), right.detach(), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


class Twins:
    """A partitioned model, and the unsharded one that is trained beside it on all ranks' batches."""

    def __init__(
        self,
        stage: int,
        make: Callable[[], nn.Module] = Net,
        loss: Callable[[nn.Module, Any], Tensor] = square_loss,
        draw: Callable[[int, int], Any] = batch,
        mesh: DeviceMesh | None = None,
        **config: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model, self.loss, self.draw = make(), loss, draw
        self.reference = copy.deepcopy(self.model)
        if dist.is_initialized():
            dist.barrier(
                None if mesh is None or mesh.ndim > 1 else mesh.get_group()
            )  # a worker that imports for the first time is late, and some tests wait for a short time only
        self.engine = zero.shard_model(self.model, zero.ZeroConfig(stage=stage, **config), mesh)
        self.rank, self.num_ranks = self.engine.world.rank, self.engine.world.num_ranks
        self.optimizers = [
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
            for model in (self.model, self.reference)
        ]
        self.steps_done = 0

    def own(self) -> Any:
        """This rank's next batch."""
        return self.draw(self.rank, self.steps_done)

    def backward_reference(self) -> None:
        for rank in range(self.num_ranks):
            (self.loss(self.reference, self.draw(rank, self.steps_done)) / self.num_ranks).backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.steps_done += 1
        assert_same(self.model, self.reference)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.loss(self.model, self.own()).backward()
            self.backward_reference()
            self.update()

    def assert_same_output(self) -> None:
        x = batch(9, 9)
        with torch.no_grad():
            torch.testing.assert_close(self.model(x), self.reference(x))
