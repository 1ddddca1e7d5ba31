"""Gradients of plain parameters (stage 0 in one dtype): averaged in buckets while the backward goes on.

[Note: buckets] Buckets are the same on all ranks, and are reduced in the same order: the model's, from its end, of the
parameters that any rank used in the last reduction. A bucket is begun once its gradients have come and the hooks of all of
them have run; it is reduced in the gradients' own memory, which `.grad` lets go meanwhile, so that whatever autograd still
adds goes elsewhere, and is reduced at the end. At the end the ranks agree what anybody has used and which buckets have begun: a
rank gives zeros for what it has not used of them, and what of the rest has been used anywhere is reduced then. What autograd
comes to several times in a backward (under reentrant checkpoints), and what users have given hooks of their own, is in no
bucket from then on: hooks see what they see in a process alone.

[Note: a torn backward] If a backward breaks off, the ranks may have begun different numbers of buckets. Exchanges meet by their
number, so until the ranks have met and made up for those, none begins early. Gradients that were under way are lost, and not a
number until they are cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.comm.agreements import bits, words
from hf_zero.comm.exchange import Exchange
from hf_zero.engine.backward.votes import Report, Reports, bitmap, fingerprint, named_by
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.parameters.user_hooks import post_accumulate_hooks
from hf_zero.engine.ranks import hyperparameters
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CollectiveError

_BUCKET_BYTES = 25 * 2**20  # as under DDP: enough for the network, and early enough for the backward


@dataclass(eq=False)
class _PendingGradient:
    """A parameter's gradient on its way.

    Attributes:
        parameter: whose.
        grad: what `.grad` is to be afterwards, taken from it; None: there was none.
        flat: what is summed.
    """

    parameter: ZeroParameter
    grad: Tensor | None
    flat: Tensor

    @classmethod
    def of(cls, p: ZeroParameter) -> _PendingGradient:
        """Take a gradient, or zeros if there is none. One that was reduced before is given back by the mean over ranks."""
        grad = p.param.grad
        if grad is None:
            return cls.of_zeros(p)
        p.param.grad = None
        return cls(p, grad, grad.contiguous().view(-1))

    @classmethod
    def of_zeros(cls, p: ZeroParameter) -> _PendingGradient:
        """For a parameter of which this rank has no gradient."""
        return cls(p, None, torch.zeros(p.param.numel(), dtype=p.param.dtype, device=p.param.device))

    def put_back(self, is_wanted: bool) -> None:
        """Let `.grad` have the mean, if anybody gave something to it."""
        param = self.parameter.param
        mean, grad = self.flat.view(param.shape), self.grad
        if grad is None:
            param.grad = mean if is_wanted else None  # hooks may drop gradients on all ranks
        else:
            param.grad = grad if grad.data_ptr() == mean.data_ptr() else grad.copy_(mean)


@dataclass(frozen=True)
class _Report(Report):
    """What one rank says of its buckets.

    Attributes:
        num_begun: of this backward.
        num_abandoned: of a torn one.
        is_torn: see [Note: a torn backward].
        has_waiting: gradients have waited for the end that are in a bucket still.
    """

    num_begun: int = 0
    num_abandoned: int = 0
    is_torn: bool = False
    has_waiting: bool = False


class WholeReducer:
    """Averages the gradients of plain parameters over the ranks.

    Args:
        parameters: all of the model.
        world: the ranks.
    """

    def __init__(self, parameters: list[ZeroParameter], world: World) -> None:
        self._parameters = parameters
        self._world = world
        self._used: set[ZeroParameter] = set()  # that autograd has added to since the last reduction
        self._buckets: list[list[ZeroParameter]] = []
        self._bucket_of: dict[ZeroParameter, int] = {}
        self._unbucketed: set[ZeroParameter] = set()  # the same on all ranks
        self._is_torn = False
        self._abandoned: list[Exchange] = []  # of a torn backward: of the first buckets
        self._begin()

    def _begin(self) -> None:
        """Forget what has come of the last backward."""
        self._missing = [len(bucket) for bucket in self._buckets]
        self._arrived: set[ZeroParameter] = set()
        self._under_way: list[tuple[Exchange, list[_PendingGradient]]] = []
        self._waiting: set[ZeroParameter] = set()  # what is not to be reduced before the end
        self._later: set[ZeroParameter] = set()  # what has come after its bucket had begun

    def arrived(self, p: ZeroParameter, is_syncing: bool) -> None:
        """Autograd has added to the gradient of `p`, whose other hooks may still be to run."""
        self._used.add(p)
        if not is_syncing:
            return
        index = self._bucket_of.get(p, -1)
        self._start()
        if 0 <= index < len(self._under_way):
            self._later.add(p)
        is_hooked = len(post_accumulate_hooks(p.param)) > 1  # one is the engine's
        if p in self._arrived or is_hooked:
            self._waiting.add(p)
        elif index >= 0:
            self._missing[index] -= 1
        self._arrived.add(p)

    def _start(self) -> None:
        """Begin the buckets whose turn it is."""
        while not self._is_torn and (index := len(self._under_way)) < len(self._buckets) and not self._missing[index]:
            self._reduce([_PendingGradient.of(p) for p in self._buckets[index]])

    def _reduce(self, parts: list[_PendingGradient]) -> None:
        self._under_way.append((self._all_reduce(parts), parts))

    def _all_reduce(self, parts: list[_PendingGradient]) -> Exchange:
        data = self._world.data
        return data.all_reduce([part.flat for part in parts], "gradients", data.num_ranks)

    def finish(self, num_steps: int, takes_part: Callable[[ZeroParameter], bool]) -> None:
        """Average the gradients that any rank has; a parameter that none has used keeps `.grad = None`.

        Args:
            num_steps: that the optimizer has taken.
            takes_part: whether a parameter may have a gradient to be averaged; the same on every rank.
        """
        try:
            self._finish(num_steps, [*filter(takes_part, self._parameters)])
        except BaseException:
            self.abandon()
            raise

    def _finish(self, num_steps: int, trainable: list[ZeroParameter]) -> None:
        self._start()
        given = {part.parameter for _, parts in self._under_way for part in parts if part.grad is not None}
        waiting = (self._waiting | self._later) - self._unbucketed
        report = _Report(
            used=bitmap(trainable, {p for p in self._used if p in given or p.param.grad is not None}),
            num_steps=num_steps,
            trained=fingerprint(trainable),
            stepped=hyperparameters.fingerprint(self._world),
            num_begun=len(self._under_way),
            num_abandoned=len(self._abandoned),
            is_torn=self._is_torn,
            has_waiting=bool(waiting),
        )
        reports = report.agree(self._world.everyone, len(self._parameters))
        hyperparameters.check(self._world, reports.are_alike("stepped"))
        if reports.highest.is_torn:
            self._make_up(reports)
        anywhere = dict.fromkeys(named_by(reports.highest.used, trainable))
        while len(self._under_way) < reports.highest.num_begun:
            self._reduce([_PendingGradient.of(p) for p in self._buckets[len(self._under_way)]])
        have_begun = {part.parameter for _, parts in self._under_way for part in parts}
        later: list[ZeroParameter] = []
        if reports.highest.has_waiting:
            self._unbucketed.update(self._agree_on(waiting, trainable))
            later = [p for p in self._agree_on(self._later, trainable) if p in anywhere]
        # Taken now: `_complete` gives `.grad` back what the bucket has averaged.
        extra = [_PendingGradient.of(p) if p in self._later else _PendingGradient.of_zeros(p) for p in later]
        for bucket in self._divided([p for p in reversed(anywhere) if p not in have_begun]):
            self._reduce([_PendingGradient.of(p) for p in bucket])
        self._complete(anywhere)
        if extra:
            self._add_later(extra)
        self._used.clear()
        self._expect([p for p in reversed(anywhere) if p not in self._unbucketed])

    def _add_later(self, extra: list[_PendingGradient]) -> None:
        """Average what has come after its bucket had begun, and add it to the averages that `.grad` has."""
        params = [part.parameter.param for part in extra]
        firsts = [param.grad for param in params]
        self._reduce(extra)
        self._complete({part.parameter for part in extra})
        for param, first in zip(params, firsts, strict=True):
            assert first is not None and param.grad is not None
            param.grad = first.add_(param.grad)

    def abandon(self) -> None:
        """The backward broke off: see [Note: a torn backward]."""
        self._is_torn = True
        for exchange, parts in self._under_way:
            self._abandoned.append(exchange)
            for part in parts:
                if part.grad is not None:  # exchanges still write to it
                    part.parameter.param.grad = torch.full_like(part.grad, torch.nan)
        self._begin()

    def _make_up(self, reports: Reports[_Report]) -> None:
        """Take part in the exchanges of a torn backward that other ranks have begun, and drop what they give.

        Raises:
            CollectiveError: on all ranks, where some have begun to reduce this backward, which met the others' torn one.
        """
        most = reports.highest.num_abandoned
        if most and (reports.highest.num_begun or most > len(self._buckets)):
            rows = self._world.everyone.agree([len(self._abandoned)], "buckets of a torn backward")
            torn = [rank for rank, (count,) in enumerate(rows) if count]
            raise CollectiveError(
                f"a backward broke off on ranks {torn} while gradients were averaged, and not on all ranks, so the gradients "
                "of different backwards have met: call `zero_grad()` on all ranks and go on with the next batch"
            )
        for bucket in self._buckets[len(self._abandoned) : most]:
            self._abandoned.append(self._all_reduce([_PendingGradient.of_zeros(p) for p in bucket]))
        while self._abandoned:
            self._abandoned[0].wait()
            self._abandoned.pop(0)
        self._is_torn = False

    def _complete(self, wanted: Collection[ZeroParameter]) -> None:
        while self._under_way:
            exchange, parts = self._under_way[0]
            exchange.wait()
            for part in parts:
                part.put_back(part.parameter in wanted)
            self._under_way.pop(0)

    def _agree_on(self, mine: set[ZeroParameter], trainable: list[ZeroParameter]) -> list[ZeroParameter]:
        """The parameters that any rank names."""
        named = words(bitmap(trainable, mine), len(self._parameters))
        found = self._world.everyone.combine(named, "gradients that wait for the end")
        return named_by(bits(found.any_bits), trainable)

    def _expect(self, parameters: list[ZeroParameter]) -> None:
        """Next time the gradients of these are to come, in this order, the same on every rank."""
        if [p for bucket in self._buckets for p in bucket] != parameters:
            self._buckets = self._divided(parameters)
            self._bucket_of = {p: index for index, bucket in enumerate(self._buckets) for p in bucket}
        self._begin()

    def _divided(self, parameters: list[ZeroParameter]) -> list[list[ZeroParameter]]:
        """Buckets of one dtype each."""
        limit = min(self._world.config.bucket_bytes, _BUCKET_BYTES)
        buckets: list[list[ZeroParameter]] = []
        num_bytes = 0
        for p in parameters:
            if not buckets or num_bytes + p.whole_nbytes > limit or buckets[-1][0].param.dtype != p.param.dtype:
                buckets.append([])
                num_bytes = 0
            buckets[-1].append(p)
            num_bytes += p.whole_nbytes
        return buckets
