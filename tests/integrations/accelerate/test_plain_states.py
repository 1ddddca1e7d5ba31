"""`load_state` of what accelerate itself has saved: training goes on where it was, in weights, states and random numbers."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.checkpointing import save_accelerator_state, save_custom_state
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from tests.integrations.accelerate.loops import Counter, Loop, Setup, numbered_rows, rank
from tests.models import CASES, make_model
from tests.ranks import on_ranks

_STEPS = 2


def _batch(step: int) -> dict[str, torch.Tensor]:
    rows = numbered_rows()[2 * step : 2 * step + 2]
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}


def _save_plainly(case: str, folder: Path, is_safe: bool) -> tuple[nn.Module, torch.optim.AdamW, list[float]]:
    """Train a model that is not sharded, and save as `Accelerator.save_state` does; what comes next of random numbers, too."""
    model = make_model(CASES[case], 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(_STEPS):
        _train(model, optimizer, step)
        scheduler.step()
    torch.manual_seed(50 + rank())
    if rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    states = [model.state_dict()] if rank() == 0 else []
    of_first = [[optimizer], [scheduler], []] if rank() == 0 else [[], [], []]
    save_accelerator_state(str(folder), states, *of_first, rank(), 7, safe_serialization=is_safe)
    if rank() == 0:
        save_custom_state(Counter(steps=_STEPS), str(folder))
    dist.barrier()
    return model, optimizer, torch.rand(2).tolist()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(**_batch(step)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2, stage=[1, 3], case=["llama", "gpt2"], is_safe=[True, False])
def test_what_accelerate_has_saved_goes_on(stage: int, case: str, is_safe: bool, tmp_path: Path) -> None:
    is_named = is_safe and case == "gpt2"
    run = tmp_path / f"{stage} {case} {is_safe}"
    folder = run / "checkpoints" / "checkpoint_10"
    project = ProjectConfiguration(project_dir=str(run), automatic_checkpoint_naming=True)
    loop = Loop(Setup(stage=stage, case=case, seed=1), project)
    model, optimizer, drawn = _save_plainly(case, folder, is_safe)
    is_of_fewer = case == "llama" and not is_safe
    if is_of_fewer and rank() == 0:
        (folder / "random_states_1.pkl").unlink()
    dist.barrier()
    loop.accelerator.load_state(None if is_named else folder)
    assert torch.rand(2).tolist() == drawn or (is_of_fewer and rank() == 1)
    assert loop.counter.values == {"steps": _STEPS} and loop.accelerator.step == 7
    assert loop.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 1e-2
    for module in loop.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    for step in range(_STEPS, _STEPS + 2):
        torch.testing.assert_close(whole_state_dict(loop.model), dict(model.state_dict()))
        _train(model, optimizer, step)
        loss = loop.model(**_batch(step)).loss
        loop.accelerator.backward(loss)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.accelerator.project_configuration.iteration = 11
    loop.accelerator.save_state()
    loop.accelerator.load_state()  # ours from now on
    torch.testing.assert_close(whole_state_dict(loop.model), dict(model.state_dict()))


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _other_groups(folder: Path) -> None:
    state = torch.load(folder / "optimizer.bin")
    state["param_groups"][0]["params"].pop()
    torch.save(state, folder / "optimizer.bin")


def _other_names(folder: Path) -> None:
    """As wrapped models have them; and one is missing."""
    state = {f"module.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    state.pop("module.model.norm.weight")
    save_file(state, folder / "model.safetensors", {"format": "pt"})


_MISSING = "is missing: fewer objects were prepared when accelerate saved this state"


@on_ranks(
    2,
    damage=[
        (_remove("optimizer.bin"), _MISSING),
        (_remove("scheduler.bin"), _MISSING),
        (_remove("custom_checkpoint_0.pkl"), "states of 0 registered objects, but 1 are registered"),
        (_other_groups, "has groups of .* parameters, but this one"),
        (_other_names, "is of another model: model.norm.weight"),
        (_remove("model.safetensors"), "not a complete checkpoint"),
    ],
)
def test_what_accelerate_has_saved_in_part_changes_nothing(
    damage: tuple[Callable[[Path], None], str], tmp_path: Path
) -> None:
    change, message = damage
    folder = next(place for number in range(9) if not (place := tmp_path / str(number)).exists())
    loop = Loop(Setup(stage=3, seed=1))  # all ranks meet: the folder is not there yet on any
    _save_plainly("llama", folder, True)
    if rank() == 0:
        change(folder)
    dist.barrier()
    before = copy.deepcopy(whole_state_dict(loop.model))
    with pytest.raises(zero.CheckpointError, match=message):
        loop.accelerator.load_state(folder)
    torch.testing.assert_close(whole_state_dict(loop.model), before, rtol=0, atol=0)


class _SharesBuffers(nn.Module):
    """Of two buffers over the same memory, safetensors has one; its optimizer has a state that is no parameter's."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)
        self.register_buffer("a", torch.arange(3.0))
        self.register_buffer("b", self.a)


@on_ranks(2)
def test_buffers_that_share_memory_and_states_of_no_parameter(tmp_path: Path) -> None:
    accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=3, collectives="pairwise"))
    torch.manual_seed(rank())
    model = _SharesBuffers()
    saved = copy.deepcopy(model)
    saved.a.mul_(2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, saved)]
    optimizers[1].state["calls"] = 5  # type: ignore[index, assignment]
    model, optimizer = accelerator.prepare(model, optimizers[0])
    if rank() == 0:
        save_accelerator_state(str(tmp_path), [saved.state_dict()], [optimizers[1]], [], [], 0, 3)
    dist.barrier()
    accelerator.load_state(tmp_path)
    assert model.a.tolist() == model.b.tolist() == [0.0, 2.0, 4.0]
    assert optimizer.state["calls"] == 5 and accelerator.step == 3
