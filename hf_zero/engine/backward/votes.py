"""What the ranks tell each other at the end of a backward, as numbers: bitmaps, and what must be alike on all of them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.errors import CollectiveError, PartitionError

_BITS = 62  # of a bitmap that are sent in one int64


def words(bits: int, count: int) -> list[int]:
    """A bitmap of `count` bits as int64 values."""
    return [bits >> start & (1 << _BITS) - 1 for start in range(0, count, _BITS)]


def bits(of_words: Iterable[int]) -> int:
    """The bitmap that `words` has made of it."""
    return sum(word << place * _BITS for place, word in enumerate(of_words))


def fingerprint(trainable: Sequence[ZeroParameter]) -> int:
    """A number that tells apart which parameters are trainable."""
    return zlib.crc32("\n".join(p.name for p in trainable).encode())


def check_alike(fingerprints: Iterable[int], steps: Iterable[int]) -> None:
    """Refuse ranks that train other parameters, or are in another step.

    Args:
        fingerprints: of what each rank trains.
        steps: that each rank's optimizer has taken.
    """
    counts = list(steps)
    if len(set(counts)) > 1:
        raise CollectiveError(
            f"the ranks have taken different numbers of optimizer steps ({counts}, by rank), so the gradients of different "
            "steps have met: on some rank a backward reached no trainable parameter, or did not run"
        )
    if len(set(fingerprints)) > 1:
        raise PartitionError(
            "the ranks do not train the same parameters: requires_grad must be set alike on all of them"
        )
