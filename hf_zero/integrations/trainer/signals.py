"""Saves that a signal asks of a Trainer, at the same step on all ranks."""

from __future__ import annotations

import signal
from typing import Any

from hf_zero.engine.ranks.world import World
from hf_zero.host import progress
from hf_zero.integrations.trainer.checkpoint import engine_under


class SignalSaves:
    """Makes all ranks save at the same step on SIGTERM (`enable_jit_checkpoint`), which reaches them at different steps.

    Args:
        manager: the Trainer's `CheckpointManager`, whose request is caught here and repeated on all ranks together.
        world: the ranks.

    Attributes:
        has_asked: whether all ranks know that it has come.
        is_told: whether it has come to this one.
    """

    def __init__(self, manager: Any, world: World) -> None:
        self._manager, self._world, self._is_requested = manager, world, False
        self.has_asked = self.is_told = False
        if progress.name_of_run() is not None:
            manager.kill_wait = 0  # an agent waits for nobody for long
        manager._enable_checkpoint = self._request
        signal.signal(signal.SIGTERM, manager._original_sigterm_handler or signal.SIG_DFL)

    def listen(self) -> None:
        """Hear the signal until the training ends: before, another Trainer may train, and an end is an end."""
        if (
            signal.getsignal(signal.SIGTERM) != self._manager._sigterm_handler
        ):  # a training may begin twice before it ends
            self._manager.setup_signal_handler()

    def _request(self) -> None:
        self._is_requested = self.is_told = True

    def poll(self, control: Any) -> None:
        """Save and stop if any rank has received the signal; called by all ranks after a step."""
        answers = [[int(self._is_requested)]]
        answers = self._world.everyone.agree(answers[0], "a signal to save")
        if any(answer for (answer,) in answers):
            self._is_requested, self.has_asked = False, True
            control.should_save = control.should_training_stop = True


def signal_saves(trainer: Any) -> SignalSaves | None:
    """Take over the saves that a signal asks of a Trainer; None if the Trainer does not listen for signals."""
    engine = engine_under(trainer.model)
    for callback in trainer.callback_handler.callbacks:
        manager = getattr(callback, "jit_manager", None)
        if manager is not None and engine is not None:
            return SignalSaves(manager, engine.world)
    return None
