"""What ranks that share the layers of a model must have in common: its inputs, and gradients of what each has whole."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hf_zero import torch_compat
from hf_zero.config.axes import sharing_sequences
from hf_zero.engine.ranks.world import World
from hf_zero.errors import UsageError

_GRADIENTS_EVERY = 100  # steps
_GRADIENT_TOLERANCE = 1e-2  # of a norm: far above rounding, far below what another batch or mask does


class SameInputs:
    """Looks at the first inputs of a model: ranks that share its layers, or sequences, must see the same batch.

    Ranks with batches of their own would train on without an error, on activations that are sums of several batches'.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._size = world.tensor.num_ranks * world.sequence.num_ranks
        self._is_checked = self._size == 1

    def check(self, args: Any, kwargs: Any) -> None:
        """Compare the tensors of a forward's arguments, once; called by all ranks together.

        Raises:
            UsageError: on all ranks, if some that share layers or sequences have others.
        """
        if self._is_checked:
            return
        self._is_checked = True
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if type(each) is Tensor]
        found = self._world.everyone.agree([checksum(tensors)], "the inputs of the model")
        size, ranks = self._size, self._world.everyone.ranks
        config = self._world.config
        key = sharing_sequences(config.sp_size, config.cp_size)
        what = f"each sequence ({key})" if self._world.sequence.num_ranks > 1 else "every layer of the model (tp_size)"
        for first in range(0, len(ranks), size):
            if len({value for (value,) in found[first : first + size]}) > 1:
                raise UsageError(
                    f"ranks {list(ranks[first : first + size])} share {what}, but the inputs of the model "
                    "differ between them: give them the same batch, from a loader that the Trainer or accelerate has "
                    "prepared, or in a loop of your own by engine.world.batch_rank"
                )


class SameGradients:
    """Looks at gradients of parameters that every rank of the tensor axis has whole: they must be the same there.

    Where they are not, the ranks' parameters drift apart without an error: the model's plan is incomplete, or the ranks
    see other batches, or draw other random numbers.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._last = -1

    def check(self, num_steps: int, parameters: Sequence[tuple[str, Tensor]]) -> None:
        """Compare the gradients of now and then a step, the first two among them; called by all ranks together.

        Args:
            num_steps: optimizer steps so far.
            parameters: of the model, by name, with their reduced gradients.

        Raises:
            UsageError: on all ranks, if some that share layers have others.
        """
        is_due = num_steps != self._last and (num_steps < 2 or num_steps % _GRADIENTS_EVERY == 0)
        if self._world.tensor.num_ranks == 1 or not is_due:
            return
        self._last = num_steps
        whole = [(name, param) for name, param in parameters if self._world.cut_of(param).tensor is None]
        norms = [-1.0 if p.grad is None else float(torch_compat.local_of(p.grad).double().norm()) for _, p in whole]
        rows = self._world.tensor.agree_on_floats(norms, "gradients of what is whole on the tensor axis")
        bad = -1
        for index, values in enumerate(zip(*rows, strict=True)):
            if not max(values) - min(values) <= _GRADIENT_TOLERANCE * max(map(abs, values)):
                bad = index
                break
        found = self._world.everyone.agree([bad], "gradients of what is whole on the tensor axis")
        first = max(index for (index,) in found)
        if first >= 0:
            raise UsageError(
                f"the gradients of {whole[first][0]!r} differ between ranks that share its layer (tp_size): give these "
                "the same batches and random numbers (dropout). If they have them, the model's plan for tensor parallelism "
                "is not complete: leave tp_size out"
            )


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number that tells apart other values, of tensors on any device."""
    found = 0
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        found = zlib.crc32(values.numpy().tobytes(), found)
    return found
