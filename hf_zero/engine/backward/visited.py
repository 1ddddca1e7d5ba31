"""A backward on a device: autograd runs each node on the stream of its forward, see [Note: one home]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from hf_zero.engine.backward.backward import Backward
from hf_zero.engine.backward.plain import PlainBackward
from hf_zero.engine.backward.session import Session
from hf_zero.engine.parameters.records import ZeroParameter
from hf_zero.engine.ranks.world import World
from hf_zero.engine.units.calls.call import Call
from hf_zero.engine.units.reading import Read
from hf_zero.engine.units.unit import Unit


class VisitedBackward(Backward):
    """A backward whose events may come on any stream."""

    def on_root_gradient(self, gradient: Tensor) -> None:
        """See `Backward`."""
        with self.gathering.home:
            super().on_root_gradient(gradient)

    def on_call_begin(self, call: Call, tensors: list[Tensor]) -> None:
        """See `Backward`."""
        if self.gathering.home.is_here():
            return super().on_call_begin(call, tensors)
        with self.gathering.home:
            super().on_call_begin(call, tensors)

    def on_gradients(self, call: Call, gradients: Sequence[Tensor | None]) -> Mapping[ZeroParameter, Tensor]:
        """See `Backward`."""
        if self.gathering.home.is_here():
            return super().on_gradients(call, gradients)
        with self.gathering.home as home:
            home.take(gradients)
            asked = super().on_gradients(call, gradients)
            home.hand_out(asked.values())
            return asked

    def on_read_gradient(self, read: Read, gradient: Tensor) -> Tensor | None:
        """See `Backward`."""
        with self.gathering.home as home:
            home.take([gradient])
            return super().on_read_gradient(read, gradient)

    def on_gradient(self, p: ZeroParameter, gradient: Tensor) -> None:
        """See `Backward`."""
        with self.gathering.home as home:
            home.take([gradient])
            super().on_gradient(p, gradient)

    def make_whole(self, unit: Unit, epoch: int) -> None:
        """See `Backward`."""
        with self.gathering.home:
            super().make_whole(unit, epoch)

    def recover(self) -> None:
        """See `Backward`."""
        with self.gathering.home:
            super().recover()

    def _end(self) -> None:
        session = self.session
        with self.gathering.home as home:
            super()._end()
            if session is not None:  # the program, on its own stream, has the gradients now
                home.hand_out(grad for p in self._given(session) if (grad := p.param.grad) is not None)

    def _given(self, session: Session) -> Iterable[ZeroParameter]:
        return session.gradients.given()


class VisitedPlainBackward(VisitedBackward, PlainBackward):
    """The same where nothing is partitioned."""

    def _on_sum(self, p: ZeroParameter) -> None:
        with self.gathering.home as home:
            home.take([p.param.grad])
            super()._on_sum(p)

    def _given(self, session: Session) -> Iterable[ZeroParameter]:
        return self._trained  # autograd does not tell


def kind_of_backward(world: World, parameters: Iterable[ZeroParameter]) -> type[Backward]:
    """What runs the backward passes of a model with these parameters."""
    # Modules can compute with the parameters as they are at rest.
    is_plain = not world.partitions and all(p.rests_as_computed for p in parameters)
    is_plain = is_plain and (world.data.num_ranks == 1 or world.config.gradient_reduction == "mean")
    if world.device.type == "cpu":
        return PlainBackward if is_plain else Backward
    return VisitedPlainBackward if is_plain else VisitedBackward
