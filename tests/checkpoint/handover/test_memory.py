"""A hand-over holds two buckets beside the rows, and what an exchange packs: as the allocator tells."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import hf_zero as zero
from hf_zero.checkpoint.handover.bucket import LABEL
from hf_zero.engine.engine import engine_of
from tests.ranks import on_ranks

_WIDTH, _LAYERS = 128, 12
_LAYER = _WIDTH * _WIDTH * 4


class Blocks(nn.Module):
    """Layers of one size."""

    def __init__(self, width: int = _WIDTH, layers: int = _LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def peak_of(run: Callable[[], None]) -> int:
    """Bytes that the allocator has given out at most, beyond what it had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events: Any = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    return max(accumulate(num_bytes for _, num_bytes in changes))


@on_ranks(2, stage=[1, 3], kind=["plain", "lora"], collectives=["host", "pairwise"])
def test_a_hand_over_holds_two_buckets_and_what_an_exchange_packs(stage: int, kind: str, collectives: str) -> None:
    import peft

    model: Any = Blocks()
    if kind == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[f"blocks.{i}" for i in range(_LAYERS)]))
    zero.shard_model(model, {"stage": stage, "collectives": collectives, "keep_whole_numel": 0})
    list(
        zero.whole_parameters(model, bucket_bytes=2 * _LAYER, names="model")
    )  # what the first one makes, such as groups
    engine = engine_of(model)
    assert engine is not None
    engine.world.ledger.reset()
    taken: list[str] = []

    def hand_over() -> None:
        for name, tensor in zero.whole_parameters(model, bucket_bytes=2 * _LAYER, names="model"):
            taken.append(name)
            del tensor

    peak = peak_of(hand_over)
    assert len(taken) == _LAYERS
    bound = 4 if collectives == "host" else 6  # layers; messages between pairs are packed: a bucket on its way twice
    assert peak <= (bound + 0.1) * _LAYER, peak / _LAYER
    assert sum(param.nbytes for param in model.parameters()) > 11 * _LAYER
    if stage == 3:
        received = sum(p.numel() for p in model.parameters()) * 4 // 2  # what the other rank has, once
        assert engine.world.ledger.entries["gather", LABEL].bytes == received
