"""What most tests train: a small model, and the unsharded one beside it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import hf_zero as zero
from hf_zero.engine.parameters.partitioned_tensor import PartitionedTensor
from hf_zero.engine.ranks.world import own_rows
from tests.ranks import by_hand

SHARDED = (1, *by_hand(2), 3)  # every day, stage 2 has `tests/test_parity.py`, and what is told of it alone
STAGES, EXCHANGES = (0, *SHARDED), ("pairwise", "host")
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


def batch(step: int, rank: int) -> Tensor:
    drawn = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank), device="cpu")
    return drawn.to(torch.get_default_device())


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Near:
    """How far values may lie apart; by default, by the order in which two ranks' gradients are added."""

    rtol: float = 1e-5
    atol: float = 1e-6

    def __call__(self, actual: Tensor, expected: Tensor, what: str, *, equal_nan: bool = False) -> None:
        tolerance = {"rtol": self.rtol, "atol": self.atol, "equal_nan": equal_nan}
        torch.testing.assert_close(actual, expected, **tolerance, msg=lambda text: f"{what}: {text}")


NEAR, SAME_BITS = Near(), Near(0.0, 0.0)


def assert_same(actual: nn.Module, expected: nn.Module, near: Near = NEAR) -> None:
    """All parameters of two models are equal: of partitioned ones, on every rank the rows that it holds."""
    for (name, left), (_, right) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        if isinstance(left, PartitionedTensor):
            assert left.shape == right.shape, name
            near(left.rows, own_rows(right.detach(), left), name)
        else:
            near(whole(left), right.detach(), name)


class Twins:
    """A partitioned model, and the unsharded one that is trained beside it on all ranks' batches.

    Args:
        stage: of the partitioned model; further keys of its configuration are keywords.
        make: the model, from seed 0.
        loss: of a model and a batch.
        draw: a batch for a step and a rank.
        mesh: of the ranks that train, else all.
        optimizer: for each of the two models.
        dtype: in which both compute, over float32 masters: then the unsharded model computes in a copy, `worker`.
        scaler: of losses, for each of the two.
        near: what `update` and `step` take for equal, in weights and losses.
    """

    def __init__(
        self,
        stage: int,
        make: Callable[[], nn.Module] = Net,
        loss: Callable[[nn.Module, Any], Tensor] = square_loss,
        draw: Callable[[int, int], Any] = batch,
        mesh: DeviceMesh | None = None,
        *,
        optimizer: Callable[[nn.Module], Any] = sgd,
        dtype: str = "",
        scaler: Callable[[], torch.amp.GradScaler] | None = None,
        near: Near = NEAR,
        **config: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model, self.loss, self.draw, self.near = make(), loss, draw, near
        self.reference = copy.deepcopy(self.model)
        self.worker = copy.deepcopy(self.model) if dtype else self.reference
        for param in self.worker.parameters() if dtype else ():  # buffers keep their dtypes
            param.data = param.data.to(getattr(torch, dtype))
        if dist.is_initialized():
            dist.barrier(
                None if mesh is None or mesh.ndim > 1 else mesh.get_group()
            )  # a worker that imports for the first time is late, and some tests wait for a short time only
        config |= {"compute_dtype": dtype} if dtype else {}
        self.engine = zero.shard_model(self.model, zero.ZeroConfig(stage=stage, **config), mesh)
        self.rank, self.num_ranks = self.engine.world.rank, self.engine.world.num_ranks
        self.optimizers = [optimizer(model) for model in (self.model, self.reference)]
        self.scalers = [scaler() for _ in self.optimizers] if scaler is not None else []
        self.steps_done = 0

    def own(self) -> Any:
        """This rank's next batch."""
        return self.draw(self.steps_done, self.rank)

    def backward(self) -> Tensor:
        """This rank's loss, which has gone back."""
        loss = self.loss(self.model, self.own())
        (self.scalers[0].scale(loss) if self.scalers else loss).backward()
        return loss.detach()

    def backward_reference(self) -> list[Tensor]:
        """All ranks' losses; their mean has gone back."""
        losses = []
        for rank in range(self.num_ranks):
            loss = self.loss(self.worker, self.draw(self.steps_done, rank))
            if self.worker is self.reference:
                (loss / self.num_ranks).backward()
            else:
                (self.scalers[1].scale(loss) if self.scalers else loss).backward()
                self._move_gradients()
            losses.append(loss.detach())
        return losses

    def _move_gradients(self) -> None:
        """Add the worker's gradients, as a part of the mean, to those of the masters."""
        for master, param in zip(self.reference.parameters(), self.worker.parameters(), strict=True):
            if param.grad is not None:
                grad = param.grad.float() / self.num_ranks
                master.grad = grad if master.grad is None else master.grad + grad
                param.grad = None

    def update(self) -> None:
        for index, optimizer in enumerate(self.optimizers):
            if self.scalers:
                self.scalers[index].step(optimizer)
                self.scalers[index].update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        if self.worker is not self.reference:
            for master, param in zip(self.reference.parameters(), self.worker.parameters(), strict=True):
                param.data.copy_(master.data)
        self.steps_done += 1
        assert_same(self.model, self.reference, self.near)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            loss = self.backward()
            expected = self.backward_reference()[self.rank]
            near = self.near if self.worker is self.reference else replace(self.near, atol=0.0)
            near(loss.float(), expected.float(), f"loss of step {self.steps_done}", equal_nan=bool(self.scalers))
            self.update()

    def assert_same_output(self) -> None:
        x = batch(9, 9)
        with torch.no_grad():
            torch.testing.assert_close(self.model(x), self.reference(x))
