"""`whole_parameters`: an iterator over the whole weights of a partitioned model, in buckets of bounded memory.

[Note: handing over] All ranks gather the same buckets in the same order. One bucket is on its way while the last one is taken,
so besides its rows a rank holds two buckets, and what one layer of adapters takes while it is merged. An exchange that packs
messages holds some more of what is on its way: `pairwise` another bucket, gloo almost two, shared memory nothing.

Before each bucket the ranks meet, for as long as an engine may need for the one before: no exchange is left waiting for a
slow reader, which a device's watchdog would end.

What is handed out is in memory of its own, which nobody writes to again: engines keep tensors until a layer is complete.

[Note: handing over from another thread] Whoever asks for the next tensor makes the gathers, so a reader in another thread makes
them there: then this rank's other threads must run no exchange meanwhile. Where that cannot be promised, `send` is the
way: the calling thread gathers, and the reader's thread only takes.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.export import world_of_model
from hf_zero.checkpoint.files.tensor_file import TensorInfo
from hf_zero.checkpoint.handover.bucket import LABEL, Bucket
from hf_zero.checkpoint.handover.hand import Hand
from hf_zero.checkpoint.handover.parts import Names, Part, Whole, parts_of
from hf_zero.checkpoint.handover.unchanged import on_any_rank
from hf_zero.checkpoint.ranks.background import WRITING_S
from hf_zero.engine.engine import engine_of
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CollectiveError, UsageError

Result = TypeVar("Result")
Slices = Callable[[str, tuple[int, ...]], "tuple[slice, ...] | None"]
Marks = dict[str, list[int | None]]
BUCKET_BYTES = 256 * 2**20


def whole_parameters(
    model: nn.Module,
    bucket_bytes: int = BUCKET_BYTES,
    *,
    dtype: torch.dtype | None = None,
    names: Names = "saved",
    slices: Slices | None = None,
    since: WholeParameters | None = None,
    keep: bool = True,
) -> WholeParameters:
    """The whole weights of a model, one after the other, for an inference engine for example.

    All ranks call it, and go through all of it, between steps. Memory is bounded: see [Note: handing over]. Adapters of PEFT
    are merged into what is handed over, a layer at a time; the model itself stays as it is, to the last bit.

    Args:
        model: partitioned in any stage, or not at all.
        bucket_bytes: of what is gathered together; a single larger tensor is a bucket of its own.
        dtype: of floating-point tensors; their own at rest by default. Smaller ones travel as such.
        names: "saved": names, shapes and tied weights as `save_pretrained` has them, persistent buffers included, and numbers
            for 4-bit weights. "model": the parameters of the model's own modules, each tied one once, and 4-bit bytes.
        slices: what is wanted of a tensor, by its name and its whole shape, such as the rows that an engine's rank computes
            with; None: all of it. It may differ between ranks.
        since: what was handed over last, of the same model. What is frozen, and has not changed since, is left out.
        keep: whether this rank wants the tensors; one that does not takes part in the gathers, and gets nothing.

    Returns:
        An iterator over names and tensors on the model's device, contiguous, outside of any graph.

    Raises:
        UsageError: a forward or backward is under way; or the adapters cannot be merged.
        CollectiveError: a rank did not take part.

    Example:
        for name, weight in zero.whole_parameters(model, dtype=torch.bfloat16):
            engine.load_weights([(name, weight)])
    """
    if bucket_bytes <= 0:
        raise UsageError(f"whole_parameters: bucket_bytes must be positive, not {bucket_bytes}")
    engine = engine_of(model)
    if engine is not None and not engine.is_at_rest:
        raise UsageError("whole_parameters: a forward or a backward of the model is under way; call it between steps")
    return WholeParameters(model, bucket_bytes, parts_of(model, names, dtype, _ranks_of(model)), slices, since, keep)


class WholeParameters(Iterator[tuple[str, Tensor]]):
    """See `whole_parameters`, which makes it.

    Attributes:
        infos: name, dtype and whole shape of everything that is handed over, in order; no communication.
    """

    def __init__(
        self,
        model: nn.Module,
        bucket_bytes: int,
        parts: Sequence[Part],
        slices: Slices | None,
        since: WholeParameters | None,
        keep: bool,
    ) -> None:
        self._world, self._slices, self._keep = _ranks_of(model), slices, keep
        self._model = weakref.ref(model)
        self._cause: BaseException | None = None
        self._seen: Marks = {}
        self._now: Marks | None = None  # taken when weights are asked for, not for names and shapes only
        self._parts = self._changed(parts, since)
        self._buckets = list(_in_buckets(self._parts, bucket_bytes))
        self._arrivals = self._gathered()
        self._items: Iterator[tuple[str, Tensor]] = iter(())
        self._lock = threading.Lock()

    @property
    def infos(self) -> list[TensorInfo]:
        """See the class."""
        return [info for part in self._parts for info, _ in part.handed]

    def _changed(self, parts: Sequence[Part], since: WholeParameters | None) -> list[Part]:
        """The parts that the last hand-over did not have as they are now, on any rank."""
        if since is None:
            return list(parts)
        self._now = marks = _marks_of(parts)
        if since._model() is not self._model():
            raise UsageError("whole_parameters: `since` is a hand-over of another model")
        old = since._seen
        flags = [None in (mark := marks[_key(part)]) or old.get(_key(part)) != mark for part in parts]
        flags = on_any_rank(flags, self._world, f"{LABEL}: what has changed")
        self._seen = {_key(part): marks[_key(part)] for part, flag in zip(parts, flags, strict=True) if not flag}
        return [part for part, flag in zip(parts, flags, strict=True) if flag]

    def __next__(self) -> tuple[str, Tensor]:
        with self._lock, self._on_device():
            while True:
                found = next(self._items, None)
                if found is not None:
                    return found
                self._items = iter(())  # the last bucket is let go of before the next one is asked for
                self._items = next(self._arrivals)

    def send(self, consume: Callable[[Iterator[tuple[str, Tensor]]], Result]) -> Result | None:
        """Let `consume` take everything in a thread of its own, while this thread gathers; called by all ranks together.

        Args:
            consume: gets an iterator; called on ranks that keep the tensors. It may stop early.

        Returns:
            What `consume` has returned; None on ranks that do not keep the tensors.

        Raises:
            CollectiveError: on all ranks, if `consume` failed on any; on that rank, caused by its error.
        """
        with self._lock, self._on_device():
            hand: Hand[Result] | None = Hand(consume) if self._keep else None
            try:
                for items in self._arrivals:
                    if hand is None:
                        list(items)
                    else:
                        hand.give_all(items)
                        self._cause = hand.error
                    del items
            except BaseException as error:
                if hand is not None:
                    hand.close(error)
                raise
            if hand is not None:
                hand.close()
                self._cause = hand.error
            self._meet()
            return None if hand is None else hand.result

    def _gathered(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """The contents of the buckets, of which the next one is on its way while one is looked at."""
        self._now = self._now or _marks_of(self._parts)
        coming: Bucket | None = None
        for index in range(len(self._buckets) + 1):
            wholes = None if coming is None else coming.wait()
            coming = None
            if index < len(self._buckets):
                self._meet()
                coming = Bucket([each for part in self._buckets[index] for each in part.wanted()], self._world)
            if wholes is not None:
                yield self._unpacked(self._buckets[index - 1], wholes)
                del wholes

    def _unpacked(self, parts: Sequence[Part], wholes: list[Whole]) -> Iterator[tuple[str, Tensor]]:
        wholes = wholes[::-1]
        for part in parts:
            own = [wholes.pop() for _ in part.sources]
            if self._keep:
                for name, tensor in self._without_grad(part, own):
                    yield name, self._sliced(name, tensor)
                    del tensor
            own.clear()
            assert self._now is not None
            self._seen[_key(part)] = self._now[_key(part)]

    @staticmethod
    def _without_grad(part: Part, wholes: list[Whole]) -> Iterator[tuple[str, Tensor]]:
        with torch.no_grad():
            items = part.unpack(wholes)
        while True:
            with torch.no_grad():  # not while the reader has the turn
                found = next(items, None)
            if found is None:
                return
            yield found

    def _sliced(self, name: str, tensor: Tensor) -> Tensor:
        wanted = None if self._slices is None else self._slices(name, tuple(tensor.shape))
        if wanted is None:
            return tensor
        part = tensor[wanted]
        return part if part.numel() == tensor.numel() else part.clone(memory_format=torch.contiguous_format)

    def _meet(self) -> None:
        """Wait until all ranks are here; raise on all of them where a reader has failed."""
        world, failed = self._world, [int(self._cause is not None)]
        if world is not None:
            limit_s = max(WRITING_S, world.limit_s)
            failed = [row[0] for row in world.everyone.agree(failed, LABEL, limit_s)]
        if any(failed):
            raise CollectiveError(
                f"{LABEL}: what takes them has failed on rank {failed.index(1)}; the error there tells why"
            ) from self._cause

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Another thread than the first one has another current device."""
        device = None if self._world is None else self._world.device
        index = None if device is None or device.type == "cpu" else device.index
        return contextlib.nullcontext() if index is None else torch.accelerator.device_index(index)


def _ranks_of(model: nn.Module) -> World | None:
    """The ranks that train a model together; None: this one alone, or nobody has told."""
    engine = engine_of(model)
    world = world_of_model(model) if engine is None else engine.world
    return world if world is not None and world.num_ranks > 1 else None


def _key(part: Part) -> str:
    return part.handed[0][0].name


def _marks_of(parts: Sequence[Part]) -> Marks:
    return {_key(part): part.fingerprint() for part in parts}


def _in_buckets(parts: Sequence[Part], bucket_bytes: int) -> Iterator[list[Part]]:
    bucket: list[Part] = []
    num_bytes = 0
    for part in parts:
        if bucket and num_bytes + part.num_bytes > bucket_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(part)
        num_bytes += part.num_bytes
    if bucket:
        yield bucket
