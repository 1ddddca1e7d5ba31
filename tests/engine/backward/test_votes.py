"""What ranks report at the end of a backward: the same record after it was sent, as long on every rank."""

import gc
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.comm.agreements import Agreements
from hf_zero.comm.ledger import Ledger
from hf_zero.engine.backward import buckets, reduction
from hf_zero.engine.backward.votes import Report

_NUM_PARAMETERS = 130  # more than two words of a bitmap

_KINDS = st.sampled_from([reduction._Report, buckets._Report])


@given(_KINDS, st.integers(0, 2**_NUM_PARAMETERS - 1), st.integers(0, 2**31), st.data())
def test_what_is_unpacked_is_what_was_packed(
    kind: type[Report], used: int, num_steps: int, data: st.DataObject
) -> None:
    defaults = asdict(kind(used=used, num_steps=num_steps))
    report = kind(**{name: not each if isinstance(each, bool) else each for name, each in defaults.items()})
    report = report if data.draw(st.booleans()) else kind(**defaults)
    packed = report.pack(_NUM_PARAMETERS)
    assert kind.unpack(packed) == report and asdict(kind.unpack(packed)) == asdict(report)
    assert len(packed) == len(kind().pack(_NUM_PARAMETERS))


@pytest.mark.parametrize(("kind", "length"), [(reduction._Report, 9 + 3), (buckets._Report, 7 + 3)])
def test_messages_are_as_long_as_their_fields_and_the_bitmap(kind: type[Report], length: int) -> None:
    assert len(kind().pack(_NUM_PARAMETERS)) == length


class _Echo:
    """A group in which all ranks say the same."""

    group_name = "echo"

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: "gloo")

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self._sent = tensors[0].clone()
        return SimpleNamespace(wait=lambda timeout: None)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return SimpleNamespace(wait=lambda timeout: tensors[0].copy_(self._sent[: len(tensors[0])]))


def _calls(num_ranks: int) -> int:
    """Calls of functions, Python's and C's, in an agreement at the end of a backward."""
    group: Any = _Echo()
    axis: Any = SimpleNamespace(
        ranks=tuple(range(num_ranks)), rank=0, mesh=None, group=group, gather_group=group, control_group=group,
        device=torch.device("cpu"), timeout_s=60.0, ledger=Ledger(),
    )  # fmt: skip
    ranks: Any = Agreements(axis)
    report, count = reduction._Report(used=5, num_steps=3), 0

    def see(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # what a collection ends may call functions
    sys.setprofile(see)
    try:
        found = report.agree(ranks, _NUM_PARAMETERS)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert found.lowest == found.highest == report
    return count


def test_the_work_of_an_agreement_grows_with_the_doublings_of_ranks() -> None:
    calls = [_calls(num_ranks) for num_ranks in (64, 128, 256, 1024)]
    doubling = calls[1] - calls[0]
    assert calls == [calls[0], calls[0] + doubling, calls[0] + 2 * doubling, calls[0] + 4 * doubling]
    assert doubling < 100
