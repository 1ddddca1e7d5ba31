"""Parameters with fewer rows than ranks, cut on the dim that divides: stacked experts, position embeddings.

The models are tiny, so the ranks here take every tensor for worth it.
"""

from __future__ import annotations

import contextlib
import filecmp
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, modeling_utils

import hf_zero as zero
from hf_zero import layout, torch_compat
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.engine.engine import ZeroEngine
from hf_zero.plan.memory import Setting, predict
from hf_zero.plan.shapes import shapes_of
from hf_zero.plan.summary import model_states
from tests.models import train
from tests.ranks import by_hand, on_ranks, run_alone, run_ranks
from tests.sharding.test_loading import CountingFile
from tests.test_memory import live_bytes


class Experts(nn.Module):
    """Two experts stacked in front of each other, a matrix of two rows, and layers of the ordinary kind."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 12)
        self.experts = nn.Parameter(torch.randn(2, 6, 12) * 0.3)
        self.out = nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids % 2) + torch.linspace(-1, 1, 12)
        chosen = torch.einsum("bsh,eoh->ebso", x, self.experts)
        return self.out(torch.where((ids > 5).unsqueeze(-1), chosen[0], chosen[1]).tanh())  # type: ignore[no-any-return]


def _mixtral() -> MixtralForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 37}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 1}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, use_cache=False))


@contextlib.contextmanager
def _balancing_all() -> Iterator[None]:
    with mock.patch.object(layout, "_WORTH_BALANCING", 0):
        yield


def _make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Experts() if kind == "net" else _mixtral()


def _batch(step: int, rank: int) -> Tensor:
    return torch.randint(0, 37, (2, 6), generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).pow(2).mean() if isinstance(model, Experts) else model(input_ids=ids, labels=ids).loss


_train = functools.partial(train, loss=_loss, batch=_batch, clip=0.5)


def _optimizer(name: str, model: nn.Module) -> Any:
    if name == "Adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=1e-2)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=name == "fused")


def _dims(model: nn.Module) -> dict[str, int]:
    """The dims of the parameters that are cut on another one than the first."""
    params = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    dims = {name: getattr(p.placements[0], "dim", 0) for name, p in params.items()}
    return {name: dim for name, dim in dims.items() if dim}


def _furthest(model: nn.Module, oracle: nn.Module) -> float:
    weights = whole_state_dict(model)
    return max(float((weights[name] - value).abs().max()) for name, value in oracle.state_dict().items())


def _assert_like_one_process(kind: str, config: dict[str, Any], optimizer: str, within: float) -> ZeroEngine:
    oracle, model = _make(kind), _make(kind)
    expected, _ = _train(oracle, _optimizer(optimizer, oracle), ranks=range(dist.get_world_size()))
    engine = zero.shard_model(model, {"timeout_s": 30, **config})
    losses, _ = _train(model, _optimizer(optimizer, model))
    assert abs(losses[0] - expected[dist.get_rank()]) < 1e-6
    assert _furthest(model, oracle) < within
    return engine


_EVERYWHERE = [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "offload": "disk"}]
_EXCHANGED = [{"stage": 3, "collectives": "host"}, {"stage": 3, "collectives": "native"}]
_FOUR = [{"stage": 2, "replicate": 2}]
_SECOND = [{"stage": 3, "master_dtype": "float32", "compute_dtype": "float32", "wire": {"secondary": 2}}]


def _assert_balanced(kind: str, config: dict[str, Any], folder: Path) -> None:
    if config.get("offload"):
        config = {**config, "offload": {"optimizer": "disk", "parameters": "disk", "path": str(folder)}}
    with _balancing_all():
        engine = _assert_like_one_process(kind, config, "fused", 1e-4)  # what is wrong is off by 1e-2
        if "replicate" in config:
            return  # over two ranks, two rows divide
        model = engine.model
        names = {"net": {"table.weight", "experts"}, "mixtral": {"model.layers.0.mlp.experts.gate_up_proj"}}[kind]
        assert names <= _dims(model).keys()
        whole = sum(p.numel() for p in model.parameters() if isinstance(p, DTensor)) * 4
        gathered = sum(unit.buffer_nbytes for unit in engine.units) / whole
        assert kind == "net" or gathered < 1.1  # less than a tenth of what is gathered is padding


@on_ranks(3, config=[*_EVERYWHERE, *_EXCHANGED])
def test_training_is_that_of_one_process_on_three_ranks(config: dict[str, Any], tmp_path: Path) -> None:
    _assert_balanced("net", config, tmp_path)


@on_ranks(4, config=[*_EVERYWHERE, *_EXCHANGED, *_FOUR, *_SECOND])
def test_training_is_that_of_one_process_on_four_ranks(config: dict[str, Any], tmp_path: Path) -> None:
    _assert_balanced("net", config, tmp_path)


@on_ranks(4, config=[{"stage": 3}, *by_hand(*_EVERYWHERE), *_FOUR])
def test_training_of_mixtral_is_that_of_one_process(config: dict[str, Any], tmp_path: Path) -> None:
    _assert_balanced("mixtral", config, tmp_path)


@on_ranks(3, optimizer=["AdamW", "Adafactor"])
def test_other_optimizers_see_what_they_see_elsewhere(optimizer: str) -> None:
    with _balancing_all():
        _assert_like_one_process("net", {"stage": 2}, optimizer, 2e-5)


@on_ranks(3, is_given=[False, True])
def test_fused_steps_take_any_gradient(is_given: bool) -> None:
    """Fused steps on gradients that no reduction has left: they look at memory, whatever the strides."""
    with _balancing_all():
        oracle, model = _make("net"), _make("net")
        zero.shard_model(model, {"stage": 1, "timeout_s": 30})
        optimizers = [_optimizer("fused", each) for each in (oracle, model)]
        for step in range(3):
            (sum(_loss(oracle, _batch(step, rank)) for rank in range(3)) / 3).backward()
            with model.no_sync():  # type: ignore[operator]
                _loss(model, _batch(step, dist.get_rank())).backward()
            if is_given:
                for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
                    assert isinstance(p, DTensor) and q.grad is not None
                    p.grad = distribute_tensor(q.grad.clone(), p.device_mesh, p.placements)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert _furthest(model, oracle) < 1e-6


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.ones(2, 64, 300))


@on_ranks(3, stage=[1, 3])
def test_memory_is_what_the_engine_and_the_plan_count(stage: int) -> None:
    with _balancing_all():
        before, model, config = live_bytes(), _Stack(), {"stage": stage, "collectives": "pairwise"}
        planned = predict(shapes_of(model), Setting(zero.ZeroConfig(**config), 3), rank=dist.get_rank())
        engine = zero.shard_model(model, config)
        held, counted = live_bytes(engine) - before, model_states(engine).parameters
    # Rows lie beside the whole copy, in another order.
    assert counted == planned.parameters == pytest.approx(held, abs=4096)


# --- files ----------------------------------------------------------------------------------------------------------


def _save(folder: str, stage: int) -> None:
    with _balancing_all():
        accelerator, model, optimizer = _accelerated("mixtral", stage)
        model.save_pretrained(f"{folder}/weights")
        _train(model, optimizer, steps=range(2))
        accelerator.save_state(f"{folder}/state")


def _accelerated(kind: str, stage: int, replicate: int = 1) -> tuple[Any, Any, Any]:
    config = zero.ZeroConfig(stage=stage, collectives="pairwise", timeout_s=30, replicate=replicate)
    accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(config))
    model = _make(kind)
    return accelerator, *accelerator.prepare(model, _optimizer("fused", model))


def _resume(folder: str, stage: int, balances: bool, replicate: int = 1) -> tuple[float, int]:
    with _balancing_all() if balances else contextlib.nullcontext():
        accelerator, model, optimizer = _accelerated("mixtral", stage, replicate)
        accelerator.load_state(f"{folder}/state")
        oracle = _mixtral()
        oracle.load_state_dict(AutoModelForCausalLM.from_pretrained(f"{folder}/state").state_dict())
        far = _furthest(model, oracle)
        own = {name: optimizer.optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
        moments = sum(float(_whole(each).double().square().sum()) for each in own.values())
        return far, round(moments * 1e9)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _load(folder: str, stage: int) -> tuple[list[str], dict[str, int], bool]:
    opens, CountingFile.num_bytes = modeling_utils.safe_open, 0
    counting = mock.patch.object(modeling_utils, "safe_open", lambda *a, **k: CountingFile(opens(*a, **k)))
    with counting, _balancing_all(), zero.Init({"stage": stage, "collectives": "pairwise"}):
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/weights")
    # What was put together on the dim that is cut is read whole: nothing else is.
    reads = {
        n: p if "gate_up" in n and _dims(model).get(n) == 1 else torch_compat.local_of(p)
        for n, p in model.named_parameters()
    }
    reads_own = CountingFile.num_bytes == sum(each.nbytes for each in reads.values())
    weights, expected = whole_state_dict(model), _make("mixtral").state_dict()
    assert all(torch_compat.local_of(p).is_contiguous() for p in model.parameters())
    return [name for name, value in expected.items() if not torch.equal(weights[name], value)], _dims(model), reads_own


def test_files_are_those_of_any_other_run(tmp_path: Path) -> None:
    run_ranks(_save, 4, str(tmp_path), 3)
    _make("mixtral").save_pretrained(tmp_path / "plain")  # type: ignore[operator]
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert filecmp.cmpfiles(tmp_path / "plain", tmp_path / "weights", names, shallow=False)[0] == names
    found = [
        run_ranks(_resume, n, str(tmp_path), stage, balances)
        for n, stage, balances in ((4, 3, False), *by_hand((3, 2, True)))
    ]
    found += [run_ranks(_resume, 4, str(tmp_path), 2, True, 2), [run_alone(_resume, str(tmp_path), 1, True)]]
    assert {far for each in found for far, _ in each} == {0.0}
    assert len({moments for each in found for _, moments in each}) == 1
    for num_ranks in (2, *by_hand(4)):
        for differ, dims, reads_own in run_ranks(_load, num_ranks, str(tmp_path), 3):
            assert differ == [] and reads_own and "model.layers.0.mlp.experts.gate_up_proj" in dims, dims
