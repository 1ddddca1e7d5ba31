"""Two ranks of an engine take their slices of what training ranks hand over, however training cuts and keeps its weights."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.engine.twins import EXCHANGES, STAGES
from tests.ranks import by_hand, on_ranks
from tests.tensor_axis import load, loss_of, shared_folder, tokens

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")


class SlicedEngine:
    """One rank of an engine whose layers are cut over two: its memory holds slices, and it takes nothing else."""

    def __init__(self, rank: int, shapes: dict[str, torch.Size]) -> None:
        self.rank = rank
        self.targets = {name: torch.full(self._empty(name, shape).shape, torch.nan) for name, shape in shapes.items()}

    def _empty(self, name: str, shape: torch.Size) -> Tensor:
        wanted = self.wants(name, tuple(shape))
        return torch.empty(shape, device="meta") if wanted is None else torch.empty(shape, device="meta")[wanted]

    def wants(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """Its rows or columns; the first rank has the odd one."""
        dim = 0 if any(each in name for each in _BY_ROWS) else 1 if any(each in name for each in _BY_COLUMNS) else None
        if dim is None:
            return None
        half = -(-shape[dim] // 2)
        part = slice(0, half) if self.rank == 0 else slice(half, shape[dim])
        return (slice(None),) * dim + (part,)

    def load_weights(self, items: Any) -> None:
        for name, weight in items:
            assert self.targets[name].shape == weight.shape and weight.is_contiguous()
            assert weight.untyped_storage().nbytes() == weight.nbytes, "a slice holds on to the whole"
            self.targets[name].copy_(weight)


def trained(folder: str, config: dict[str, Any] | None) -> nn.Module:
    """After two steps of SGD: partitioned, or one process that sees all batches."""
    if config is None:
        with zero.disabled():
            model = load(folder)
        cells = (0, 1)
    else:
        zero_config = {"collectives": "pairwise", **config}
        if "tp_size" in config:
            with zero.Init(zero_config):
                model = load(folder)
        else:
            model = load(folder)
            zero.shard_model(model, zero_config)
        cells = (dist.get_rank() * 2 // dist.get_world_size(),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for cell in cells:
            (loss_of(model, tokens(step, cell)) / len(cells)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_engines_hold_the_model(config: dict[str, Any], name: str) -> None:
    folder = shared_folder(name)
    reference = trained(folder, None)
    saved = {key: value for key, value in reference.state_dict().items() if not (name == "tied" and "lm_head" in key)}
    ours = trained(folder, config)
    engine = SlicedEngine(dist.get_rank() % 2, {key: value.shape for key, value in saved.items()})
    engine.load_weights(zero.whole_parameters(ours, bucket_bytes=3000, slices=engine.wants))
    for key, value in saved.items():
        wanted = engine.wants(key, tuple(value.shape))
        expected = value if wanted is None else value[wanted]
        torch.testing.assert_close(
            engine.targets[key], expected, rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}"
        )


@on_ranks(2, stage=STAGES, collectives=EXCHANGES, name=["llama", "tied"])
def test_slices_are_those_of_one_process(stage: int, collectives: str, name: str) -> None:
    assert_engines_hold_the_model({"stage": stage, "collectives": collectives}, name)


@on_ranks(
    4,
    config=[{"stage": 3, "tp_size": 2}, {"stage": 3, "replicate": 2}, *by_hand({"stage": 2, "tp_size": 2})],
    name=["llama", "tied"],
)
def test_slices_of_models_on_several_axes_are_those_of_one_process(config: dict[str, Any], name: str) -> None:
    assert_engines_hold_the_model(config, name)


@on_ranks(2, stage=[1, 2, 3])
def test_slices_of_what_lies_on_a_disk_are_those_of_one_process(stage: int) -> None:
    offload = {"optimizer": "disk", "path": tempfile.gettempdir(), "slot_bytes": "256KiB"}
    if stage == 3:
        offload["parameters"] = "disk"
    assert_engines_hold_the_model({"stage": stage, "offload": offload}, "llama")
