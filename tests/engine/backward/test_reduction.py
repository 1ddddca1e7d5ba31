"""Reductions among gathers: whatever the ranks do differently, none waits for what another begins only later."""

import torch.distributed as dist

from tests.engine.twins import Twins
from tests.ranks import on_ranks

_GATHERED_AGAIN = {"reshard_after_forward": True}  # for each backward


@on_ranks(2, stage=[2, 3], collectives=["pairwise", "native"], hooked=[0, 1])
def test_hooks_on_one_rank_are_waited_for_by_the_others(stage: int, collectives: str, hooked: int) -> None:
    """What watches gradients on the main process, while each reduction and each gather is waited for at once."""
    seen = []
    twins = Twins(stage, collectives=collectives, timeout_s=5, bucket_bytes=1, prefetch_bytes=0, **_GATHERED_AGAIN)
    if dist.get_rank() == hooked:
        for p in twins.model.parameters():
            p.register_hook(lambda grad: seen.append(grad.shape) and None)
    twins.step(3)
    assert len(seen) == (3 * len(list(twins.model.parameters())) if dist.get_rank() == hooked else 0)
    if stage == 3:  # learned in the first step: all come at the end of the backward, where nobody waits for a gather
        assert {after for _, after in twins.engine.gathering.reductions.turns} == {len(twins.engine.units)}


@on_ranks(2)
def test_an_order_that_was_too_late_gets_earlier_again() -> None:
    twins = Twins(3, collectives="pairwise", timeout_s=5, prefetch_bytes=0, **_GATHERED_AGAIN)
    handles = [p.register_hook(lambda grad: None) for p in twins.model.parameters()]
    twins.step(2)
    late = [after for _, after in twins.engine.gathering.reductions.turns]
    for handle in handles:
        handle.remove()
    twins.step(3)
    turns = twins.engine.gathering.reductions.turns
    assert len(set(late)) == 1 and [after for _, after in turns] == sorted({after for _, after in turns})
