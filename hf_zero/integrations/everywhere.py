"""ZeRO for scripts that know nothing of it: plain `TrainingArguments` and plain `Accelerator()` take the configuration.

Two methods are wrapped, and `undo()` puts the originals back:

- `TrainingArguments.__post_init__`: arguments of any class (TRL's, `Seq2SeqTrainingArguments`) do what
  `ZeroTrainingArguments` do.
- `Accelerator.__init__`: an `Accelerator` that a script makes becomes a `ZeroAccelerator`. The Trainer's own stays as it is,
  since its arguments see to it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from accelerate import Accelerator
from transformers import TrainingArguments

from hf_zero.integrations.accelerate.accelerator import ZeroAccelerator
from hf_zero.integrations.trainer import arguments

_originals: dict[type, tuple[str, Any]] = {}


def switch_on() -> None:
    """From now until `undo()`, scripts train under the file that HF_ZERO_CONFIG names; a second call changes nothing."""
    if _originals:
        return
    _wrap(TrainingArguments, "__post_init__", _take_arguments)
    _wrap(Accelerator, "__init__", _take_accelerator)


def undo() -> None:
    """Put the originals back."""
    for owner, (name, original) in _originals.items():
        setattr(owner, name, original)
    _originals.clear()


def _wrap(owner: type, name: str, replacement: Any) -> None:
    original = vars(owner)[name]
    _originals[owner] = (name, original)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        replacement(self, original, *args, **kwargs)

    setattr(owner, name, wrapped)


def _take_arguments(self: TrainingArguments, original: Any) -> None:
    if isinstance(self, arguments.ZeroTrainingArguments):
        original(self)  # they do so themselves
    else:
        arguments.start(self, lambda: original(self))


def _take_accelerator(self: Accelerator, original: Any, *args: Any, **kwargs: Any) -> None:
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if type(self) is Accelerator and caller.partition(".")[0] != "transformers":
        self.__class__ = ZeroAccelerator
        ZeroAccelerator.__init__(self, *args, **kwargs)
    else:
        original(self, *args, **kwargs)
