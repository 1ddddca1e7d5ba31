"""What ranks report at the end of a backward: the same record after it was sent, as long on every rank."""

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(("kind", "length"), [(reduction._Report, 5 + 3), (buckets._Report, 6 + 3)])
def test_messages_are_as_long_as_their_fields_and_the_bitmap(kind: type[Report], length: int) -> None:
    assert len(kind().pack(_NUM_PARAMETERS)) == length
