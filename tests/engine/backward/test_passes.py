"""A backward that breaks off ends where it was called, whenever autograd lets go of what it was to call at the end."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_zero import torch_compat
from tests.engine.backward.test_failures import Fragile
from tests.engine.twins import STAGES, Twins, square_loss
from tests.ranks import on_ranks


def _keeping_callbacks(patch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Keep what autograd is to call at the end of a backward, as the thread of a GPU does, which drops it some time later."""
    kept: list[Callable[[], None]] = []
    tell = torch_compat.after_backward
    patch.setattr(torch_compat, "after_backward", lambda callback: (kept.append(callback), tell(callback))[1])
    return kept


@on_ranks(2, stage=STAGES)
def test_the_model_is_at_rest_as_soon_as_a_backward_has_raised(stage: int) -> None:
    twins = Twins(stage, Fragile)
    twins.step()
    at_rest = [id(param) for param in twins.model.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        kept = _keeping_callbacks(patch)
        for _ in range(2):
            twins.model.breaks_in = "backward"
            with pytest.raises(ZeroDivisionError):
                square_loss(twins.model, twins.own()).backward()
            twins.model.breaks_in = ""
            assert kept and twins.engine.backward.session is None
            assert [id(param) for param in twins.model.parameters()] == at_rest
            assert twins.engine.memory.bytes == 0 or stage < 3
    twins.optimizers[0].zero_grad()
    twins.step(2)


@on_ranks(2)
def test_a_backward_of_another_model_that_breaks_off_meanwhile_leaves_this_one_alone() -> None:
    """On a thread of its own, while this one's backward waits in a hook."""
    twins, errors = Twins(3), []

    def break_off() -> None:
        leaf = torch.ones(2, requires_grad=True)
        product = leaf * 2
        product.register_hook(lambda gradient: 1 / 0)
        try:
            product.sum().backward()
        except ZeroDivisionError as error:
            errors.append(error)

    def meanwhile(gradient: Tensor) -> None:
        other = threading.Thread(target=break_off)
        other.start()
        other.join()

    handle = twins.model.blocks[1].register_forward_hook(
        lambda module, args, output: output.register_hook(meanwhile) and None
    )
    twins.step(2)
    handle.remove()
    assert len(errors) == 2
