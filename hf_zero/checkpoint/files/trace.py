"""What a conversion of weights does to their elements, found by running it on meta tensors. See [Note: pieces]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.checkpoint.files.pieces import Piece
from hf_zero.layout import row_major

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Origin:
    """Where the elements of a storage come from; a source is a storage that comes from itself."""

    keep: Tensor  # its storage's address, which is the key, must not be used again
    source: str | None
    pieces: tuple[Piece, ...] | None  # of the flattened storage; None: not merely moved


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, follows elements of meta tensors through views, copies, `cat` and `stack`.

    Any other operation (arithmetic, a change of dtype) makes a tensor whose pieces are unknown.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins: dict[int, _Origin] = {}

    def source(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A meta tensor that stands for the whole source `name`."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._origins[_key(tensor)] = _Origin(tensor, name, None)
        return tensor

    def pieces(self, tensor: Tensor) -> tuple[Piece, ...] | None:
        """The pieces that `tensor`, written row-major, consists of; None if they are unknown."""
        origin = self._origins.get(_key(tensor))
        if origin is None:
            return None
        shape = tuple(tensor.shape)
        if origin.source is not None:
            return (Piece(shape, origin.source, int(tensor.storage_offset()), tensor.stride(), 0, row_major(shape)),)
        if origin.pieces is None or not tensor.is_contiguous():
            return None
        start = int(tensor.storage_offset())
        found = [part for piece in origin.pieces for part in piece.within("target", start, start + tensor.numel())]
        return tuple(replace(part, target_offset=part.target_offset - start) for part in found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what its result is made of."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.device.type == "meta" and _key(result) not in self._origins:
            self._origins[_key(result)] = _Origin(result, None, self._made_by(func, args, result))
        return result

    def _made_by(self, func: Any, args: Any, result: Tensor) -> tuple[Piece, ...] | None:
        if not result.is_contiguous():
            return None
        if func is _aten.clone.default:
            return self._placed(args[0], result)
        if func is _aten.cat.default:
            dim = args[1] if len(args) > 1 else 0
            sizes = [part.shape[dim] for part in args[0]]
            return self._joined(args[0], torch.split(result, sizes, dim))
        if func is _aten.stack.default:
            return self._joined(args[0], torch.unbind(result, args[1] if len(args) > 1 else 0))
        return None

    def _joined(self, parts: Any, places: Any) -> tuple[Piece, ...] | None:
        found: list[Piece] = []
        for part, place in zip(parts, places, strict=True):
            pieces = self._placed(part, place)
            if pieces is None:
                return None
            found += pieces
        return tuple(found)

    def _placed(self, part: Tensor, place: Tensor) -> tuple[Piece, ...] | None:
        """The pieces of `part`, at the strides of `place` in its storage."""
        pieces = self.pieces(part)
        if pieces is None:
            return None
        shape, offset = tuple(part.shape), int(place.storage_offset())
        if place.is_contiguous():
            return tuple(replace(piece, target_offset=piece.target_offset + offset) for piece in pieces)
        if len(pieces) == 1 and pieces[0].shape == shape and pieces[0].target_strides == row_major(shape):
            return (replace(pieces[0], target_offset=offset, target_strides=place.stride()),)
        return None


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
