"""Values that ranks show each other, and work after which all of them go on or all of them fail.

[Note: together] A rank that raises alone looks like a hang to its peers, which wait in the next exchange until the time limit.
So work that may fail on some ranks only (files, memory, a user's function) runs inside `together`, which costs one small
agreement. Values travel pickled, since only ranks of one program meet here.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from hf_zero.comm.agreements import Agreements
from hf_zero.comm.collectives import Collectives
from hf_zero.errors import CollectiveError, ZeroError

Result = TypeVar("Result")


@contextmanager
def together(among: Agreements, what: str, kind: type[ZeroError], timeout_s: float | None = None) -> Iterator[None]:
    """An error in the block on any rank becomes an error on all. See [Note: together].

    Args:
        among: the ranks.
        what: all ranks are doing, in the error.
        kind: the error's class.
        timeout_s: that the ranks wait for each other after the block; None: as for any exchange.

    Raises:
        CollectiveError: in the block, so that the others know already; or a rank did not come.
    """
    error: Exception | None = None
    try:
        yield
    except CollectiveError:
        raise
    except Exception as caught:
        error = caught
    if timeout_s is not None:
        among.meet(what, timeout_s)
    words = b"" if error is None else described(error, kind).encode()
    lengths = among.agree([len(words)], what)
    longest = max(length for (length,) in lengths)
    if longest:
        rows = among.agree([*words, *bytes(longest - len(words))], what)
        numbered = zip(among.ranks, rows, lengths, strict=True)
        said = {rank: bytes(row[:length]).decode(errors="replace") for rank, row, (length,) in numbered}
        texts = {text: rank for rank, text in reversed(said.items()) if text}
        raise kind(f"{what}: " + "; ".join(f"rank {rank}: {text}" for text, rank in texts.items())) from error


def described(error: Exception, kind: type[ZeroError]) -> str:
    """What an error says; with its class, unless that is `kind`, which is what the reader gets."""
    said = str(error) if isinstance(error, kind) else f"{type(error).__name__}: {error}"
    return said or type(error).__name__


def share(among: Collectives, value: Any, what: str, source: int = 0) -> Any:
    """The `value` of one rank, the first one by default, on every rank; the others' values do not matter."""
    data = bytearray(pickle.dumps(value)) if among.rank == source else bytearray()
    lengths = among.agree([len(data)], what)
    text = torch.frombuffer(data or bytearray(lengths[source][0]), dtype=torch.uint8)
    among.broadcast(text, source, what)
    return pickle.loads(text.numpy().tobytes())


def collect(among: Agreements, value: object, what: str) -> list[Any]:
    """Every rank's `value`, by rank, on the first rank (an empty list on the others)."""
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    lengths = [length for (length,) in among.agree([len(own)], what)]
    mail = among.mail("collect", what)
    if among.rank:
        mail.send(own, 0).wait()
        return []
    rooms = [own, *(own.new_empty(length) for length in lengths[1:])]
    for arriving in [mail.receive(room, peer) for peer, room in enumerate(rooms) if peer]:
        arriving.wait()
    return [pickle.loads(room.numpy().tobytes()) for room in rooms]


def from_first(among: Collectives, work: Callable[[], Result], what: str, kind: type[ZeroError]) -> Result:
    """What `work()` returns on the first rank, or its error, on all ranks."""
    result = None
    with together(among, what, kind):
        if among.rank == 0:
            result = work()
    return cast(Result, share(among, result, what))
