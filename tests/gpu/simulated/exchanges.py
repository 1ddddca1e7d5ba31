"""Exchanges of tensors on the device "sim", as NCCL's: in order, averages too, and nothing is there before it is waited for.

Until then what an exchange writes is NaN. The bytes travel over gloo.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor, library

from hf_zero import torch_compat

_Started = tuple[Sequence[Any], Callable[[], None]]


class _Work(dist.Work):
    def __init__(self, starts: Sequence[Callable[[], _Started]]) -> None:
        super().__init__()
        self._under_way = [start() for start in starts]

    def wait(self, *timeout: Any) -> bool:
        assert not timeout, "torch blocks the process when it is given a time"
        for works, finish in self._under_way:
            for work in works:
                work.wait()
            finish()
        self._under_way.clear()
        return True


class Exchanges:
    """Torch's collectives for tensors on the device; for others they stay what they are.

    Args:
        host_of: gives the same memory as a tensor of the host.
    """

    def __init__(self, host_of: Callable[[Tensor], Tensor]) -> None:
        self._host_of = host_of
        self._collected: list[Callable[[], _Started]] | None = None
        self._of_dtensors = library.Library("_c10d_functional", "IMPL")
        self._plain = {name: getattr(dist, name) for name in ("all_reduce", "reduce", "broadcast", "all_to_all")}
        for name, plain in self._plain.items():
            setattr(dist, name, self._either(plain, getattr(self, f"_{name}")))
        for name in ("all_gather_single", "reduce_scatter_single"):
            setattr(torch_compat, name, self._either(getattr(torch_compat, name), getattr(self, f"_{name}")))
        backend_on = torch_compat.backend_on
        torch_compat.backend_on = lambda group, device: "nccl" if device.type == "sim" else backend_on(group, device)
        torch_compat.coalesced = self._coalesced  # type: ignore[assignment]
        for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"):
            self._of_dtensors.impl(name, self._functional(getattr(torch.ops._c10d_functional, name)), "PrivateUse1")
        self._of_dtensors.impl("wait_tensor", lambda tensor: tensor, "PrivateUse1")

    def _either(self, plain: Callable[..., Any], start: Callable[..., Callable[[], _Started]]) -> Callable[..., Any]:
        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            first = args[0][0] if isinstance(args[0], list) else args[0]
            if first.device.type != "sim":
                return plain(*args, async_op=async_op, **kwargs)
            started = start(*args, **kwargs)
            if self._collected is not None:
                return self._collected.append(started)
            work = _Work([started])
            return work if async_op else work.wait()

        return call

    @contextlib.contextmanager
    def _coalesced(self, group: dist.ProcessGroup) -> Iterator[list[dist.Work]]:
        works: list[dist.Work] = []
        self._collected = []
        try:
            yield works
        finally:
            starts, self._collected = self._collected, None
        works.append(_Work(starts))

    def _sum(self, values: Tensor, target: Tensor, op: Any, group: Any, part: slice | None = None) -> _Started:
        """Sum `values` over the ranks into `target`; what is there meanwhile is nobody's to read."""
        averages = op == dist.ReduceOp.AVG
        work = self._plain["all_reduce"](values, dist.ReduceOp.SUM if averages else op, group=group, async_op=True)
        _spoil(self._host_of(target))

        def finish() -> None:
            total = values / dist.get_world_size(group) if averages else values
            self._host_of(target).copy_(total if part is None else total.view(-1)[part].view(target.shape))

        return [work], finish

    def _all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Callable[[], _Started]:
        return lambda: self._sum(self._host_of(tensor).clone(), tensor, op, group)

    def _reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None
    ) -> Callable[[], _Started]:
        assert tensor.dtype == output.dtype and tensor.numel() == output.numel() * dist.get_world_size(group)
        start = dist.get_rank(group) * output.numel()
        own = slice(start, start + output.numel())
        return lambda: self._sum(self._host_of(tensor).clone(), output, op, group, own)

    def _all_gather_single(self, output: Tensor, tensor: Tensor, group: Any = None) -> Callable[[], _Started]:
        def start() -> _Started:
            own = self._host_of(tensor).clone()
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            work = dist.all_gather(parts, own, group=group, async_op=True)
            targets = self._host_of(output).view(-1).chunk(len(parts))
            for rank, target in enumerate(targets):
                if rank != dist.get_rank(group):
                    _spoil(target)

            def finish() -> None:
                for target, part in zip(targets, parts, strict=True):
                    target.copy_(part.view(-1))

            return [work], finish

        return start

    def _reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, group_dst: int = 0
    ) -> Callable[[], _Started]:
        return lambda: self._sum(self._host_of(tensor).clone(), tensor, op, group)  # the others do not read theirs

    def _broadcast(self, tensor: Tensor, group: Any = None, group_src: int = 0) -> Callable[[], _Started]:
        def start() -> _Started:
            values = self._host_of(tensor).clone()
            work = self._plain["broadcast"](values, group=group, group_src=group_src, async_op=True)
            return [work], lambda: self._host_of(tensor).copy_(values)

        return start

    def _all_to_all(self, outputs: list[Tensor], inputs: list[Tensor], group: Any = None) -> Callable[[], _Started]:
        def start() -> _Started:
            own, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
            sent = [self._host_of(each).clone() for each in inputs]
            arriving = [torch.empty_like(self._host_of(each)) for each in outputs]
            arriving[own].copy_(sent[own])
            peers = [peer for peer in range(len(ranks)) if peer != own]
            works = [dist.irecv(arriving[p], ranks[p], group) for p in peers if arriving[p].numel()]
            works += [dist.isend(sent[p], ranks[p], group) for p in peers if sent[p].numel()]
            for each in outputs:
                _spoil(self._host_of(each))

            def finish() -> None:
                for target, values in zip(outputs, arriving, strict=True):
                    self._host_of(target).copy_(values)

            return works, finish

        return start

    def _functional(self, op: Any) -> Callable[..., Tensor]:
        def call(tensor: Tensor, *given: Any) -> Tensor:
            found = torch.ops._c10d_functional.wait_tensor(op(self._host_of(tensor).clone(), *given))
            result = torch.empty(found.shape, dtype=found.dtype, device=tensor.device)
            self._host_of(result).copy_(found)
            return result

        return call


def _spoil(host: Tensor) -> None:
    host.fill_(float("nan") if host.is_floating_point() else 113)
