"""What a process gives to others whatever its program does: a thread answers questions that they send over sockets.

[Note: service] Exchanges need all ranks at once. Here one rank asks, and a thread of the other answers, while that one's
program waits in an exchange, computes, or is about to exit. The thread sleeps until somebody connects, and nobody does as
long as all ranks make the same calls. Questions are answered at once, one after another: what cannot be answered yet is asked
again. Only processes that know the address, with its secret, are listened to: messages are pickled.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import secrets
import selectors
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_zero.comm.agreements import Agreements
from hf_zero.errors import CollectiveError
from hf_zero.host import beside

_SECRET_BYTES = 32
_SIZES = struct.Struct("<QQ")  # of the pickled message, and of the bytes after it
_LIMIT_S = 30.0  # for one message, once its sender has begun
_PIECE_BYTES = 2**20

Answer = tuple[Any, Tensor | None]
"""What is pickled, and a flat tensor of bytes on the host that is sent as it is."""

_answers: dict[str, Callable[[Any], Answer]] = {}


def answer(subject: str, give: Callable[[Any], Answer]) -> None:
    """Let questions about a subject be answered by `give(question)`, on the thread; it must not wait for anything."""
    _answers[subject] = give


@dataclass(frozen=True)
class _Address:
    host: str
    port: int
    secret: bytes

    def numbers(self) -> list[int]:
        """As int64 values, for an agreement."""
        return [*struct.unpack("<4q", self.secret), *socket.inet_aton(self.host), self.port]

    @staticmethod
    def of(numbers: list[int]) -> _Address:
        """From `numbers`."""
        return _Address(socket.inet_ntoa(bytes(numbers[4:8])), numbers[8], struct.pack("<4q", *numbers[:4]))


class _Service:
    """The socket of this process, and the thread that answers there."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self.address = _Address(host, self._listener.getsockname()[1], secrets.token_bytes(_SECRET_BYTES))
        self.pid = os.getpid()
        self._known: set[socket.socket] = set()  # that have shown the secret
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        ending, ended = socket.socketpair()
        self._selector.register(ended, selectors.EVENT_READ)
        self._ended = ended
        beside.start("hf_zero service", self._serve, ending.close)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                place = key.fileobj
                assert isinstance(place, socket.socket)
                if place is self._ended:
                    return
                if place is self._listener:
                    with contextlib.suppress(OSError):
                        made, _ = place.accept()
                        made.settimeout(_LIMIT_S)
                        _at_once(made)
                        self._selector.register(made, selectors.EVENT_READ)
                else:
                    self._hear(place)

    def _hear(self, place: socket.socket) -> None:
        try:
            if place in self._known:
                (subject, question), _ = _receive(place)
                _send(place, *self._answer(subject, question))
                return
            if hmac.compare_digest(_read(place, _SECRET_BYTES), self.address.secret):
                self._known.add(place)
                return
        except (OSError, EOFError, struct.error):
            pass  # the other one has gone, or is a stranger
        self._selector.unregister(place)
        self._known.discard(place)
        place.close()

    def _answer(self, subject: str, question: Any) -> Answer:
        try:
            return _answers[subject](question)
        except Exception as error:  # the asker raises it
            return CollectiveError(f"{type(error).__name__}: {error}"), None


_service: dict[str, _Service] = {}  # by the address of the host on which it listens


def _of_this_process(host: str) -> _Service:
    if host not in _service or _service[host].pid != os.getpid():
        _service[host] = _Service(host)
    return _service[host]


class Peers:
    """The services of the ranks that train together.

    Args:
        addresses: by number of the rank in the program.
        own: this rank's number.
    """

    def __init__(self, addresses: dict[int, _Address], own: int) -> None:
        self._addresses = addresses
        self._sockets: dict[int, socket.socket] = {}
        self.own = own
        self.others = [rank for rank in addresses if rank != own]

    @staticmethod
    def connect(among: Agreements, is_one_host: bool) -> Peers | None:
        """Tell each other where to ask; called by all ranks together. None if one of them cannot listen."""
        if among.num_ranks == 1:
            return None
        try:
            address = _of_this_process("127.0.0.1" if is_one_host else _own_host()).address
        except OSError:
            address = _Address("0.0.0.0", 0, bytes(_SECRET_BYTES))
        rows = among.agree(address.numbers(), "the addresses of the ranks")
        found = dict(zip(among.ranks, map(_Address.of, rows), strict=True))
        able = all(each.port for each in found.values())
        return Peers(found, among.ranks[among.rank]) if able else None

    def with_sockets_of_its_own(self, known: Peers | None) -> Peers:
        """The same, and those that were known before, for another thread."""
        return Peers({**(known._addresses if known else {}), **self._addresses}, self.own)

    def ask(self, rank: int, subject: str, question: Any) -> tuple[Any, Tensor]:
        """What a rank answers: a value, and bytes.

        Raises:
            CollectiveError: it is gone, or could not answer.
        """
        try:
            place = self._socket(rank)
            _send(place, (subject, question), None)
            found, data = _receive(place)
        except (OSError, EOFError) as error:
            if (broken := self._sockets.pop(rank, None)) is not None:
                broken.close()
            raise CollectiveError(f"rank {self.own} has lost rank {rank}, which it asked for {subject}") from error
        if isinstance(found, CollectiveError):
            raise CollectiveError(f"rank {rank} could not give {subject}: {found}")
        return found, data

    def _socket(self, rank: int) -> socket.socket:
        if rank not in self._sockets:
            address = self._addresses[rank]
            made = socket.create_connection((address.host, address.port), _LIMIT_S)
            _at_once(made)
            made.sendall(address.secret)
            self._sockets[rank] = made
        return self._sockets[rank]


def _own_host() -> str:
    """This host's address, as seen by the one where the program's processes have met."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect((os.environ.get("MASTER_ADDR") or socket.gethostname(), 9))
        return str(probe.getsockname()[0])


def _at_once(place: socket.socket) -> None:
    """Let small messages leave as they come, and not wait 40 ms for more."""
    place.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(place: socket.socket, message: Any, data: Tensor | None) -> None:
    text = pickle.dumps(message)
    view = memoryview(b"" if data is None else data.numpy())  # type: ignore[arg-type]
    place.sendall(_SIZES.pack(len(text), view.nbytes) + text)
    for start in range(0, view.nbytes, _PIECE_BYTES):  # the time limit is for each
        place.sendall(view[start : start + _PIECE_BYTES])


def _receive(place: socket.socket) -> tuple[Any, Tensor]:
    num_text, num_bytes = _SIZES.unpack(_read(place, _SIZES.size))
    message = pickle.loads(_read(place, num_text))
    data = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    _read_into(place, memoryview(data.numpy()))  # type: ignore[arg-type]
    return message, data


def _read(place: socket.socket, count: int) -> bytes:
    room = bytearray(count)
    _read_into(place, memoryview(room))
    return bytes(room)


def _read_into(place: socket.socket, room: memoryview) -> None:
    done = 0
    while done < room.nbytes:
        count = place.recv_into(room[done:], min(_PIECE_BYTES, room.nbytes - done))
        if not count:
            raise EOFError
        done += count
