"""Optimizers of the Trainer that hold more than the model's parameters, as those of losses with weights of their own do."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer

from hf_zero import ZeroConfig, shard_model
from hf_zero.checkpoint.held_parameters import held_parameters
from hf_zero.checkpoint.optimizer_state import capture
from tests.integrations.refusals import refused
from tests.integrations.trainer.runs import arguments, loaded, logged, trainer_of, undone
from tests.models import CASES, make_model
from tests.ranks import on_ranks


class WeighedLoss(Trainer):
    """Weighs the loss with a parameter that no model has; it stands still, but its moments do not."""

    weight: nn.Parameter

    def create_optimizer(self, model: Any = None) -> Any:
        self.weight = nn.Parameter(torch.tensor([1.0, 0.5]))
        held = [
            {"params": list(self.model.parameters()), "lr": 1e-2},
            {"params": [self.weight], "lr": 0.0, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(held)
        return self.optimizer

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        self.weight.grad = None  # the Trainer clears its model's only
        loss = super().compute_loss(*args, **options)
        return loss * (self.weight.sum() if dist.get_rank() == 0 else 1.5)  # of other data, it may need no weight


def _moments(folder: str, stage: int | None, resume: str | None = None) -> tuple[list[float], list[Tensor]]:
    """The second of two losses, and what the optimizer then keeps for the weight."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "output_dir": f"{folder}/{stage}"}
    options["max_steps"] = 2
    torch.manual_seed(3)
    trainer = trainer_of(loaded(folder), arguments(folder, stage, **options), WeighedLoss)
    trainer.train(resume_from_checkpoint=resume)
    state = trainer.optimizer.state.get(trainer.weight, {})
    return logged(trainer, since=1), [state[key].clone() for key in ("step", "exp_avg", "exp_avg_sq") if key in state]


@on_ranks(2, stage=[0, 1, 3], timeout_s=120)
@undone
def test_states_of_parameters_beside_the_model_are_saved_and_resumed(stage: int, folder: str) -> None:
    losses, moments = _moments(folder, stage)
    found, resumed = _moments(folder, stage, resume=f"{folder}/{stage}/checkpoint-1")
    assert found == losses
    if dist.get_rank() == 0:  # whose moments are saved, as under DDP
        assert resumed[0] == moments[0] == 2
        torch.testing.assert_close(resumed, moments, rtol=1e-5, atol=1e-8)


@on_ranks(2, stage=[0, 1, 3])
def test_states_beside_a_model_are_shared_whatever_models_one_rank_still_holds(stage: int) -> None:
    models = [make_model(CASES["gpt2"]) for _ in range(2)]
    for each in models:
        shard_model(each, ZeroConfig(stage=stage, timeout_s=5))
    model = models.pop()
    if dist.get_rank():
        models.clear()
        gc.collect()
    optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(2))])
    assert capture(optimizer, model, "optimizer")[0].files


@on_ranks(2, stage=[1, 3])
def test_parameters_of_another_partitioned_model_are_refused(stage: int) -> None:
    model, other = (make_model(CASES["gpt2"]) for _ in range(2))
    for each in (model, other):
        shard_model(each, ZeroConfig(stage=stage))
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    refused(lambda: held_parameters(optimizer, model), "CheckpointError", "another partitioned model")
