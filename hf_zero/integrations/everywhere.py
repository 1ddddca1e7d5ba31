"""ZeRO for scripts that know nothing of it: plain `TrainingArguments` and plain `Accelerator()` take the configuration.

`hf-zero launch` and `hf_zero.run` switch it on, and so does `import hf_zero` where HF_ZERO_CONFIG names a configuration. Three
methods are wrapped, and `hf_zero.undo()` puts the originals back:

- `TrainingArguments.__post_init__`: arguments of any class (TRL's, `Seq2SeqTrainingArguments`) do what
  `ZeroTrainingArguments` do.
- `Accelerator.__init__`: an `Accelerator` that a script makes becomes a `ZeroAccelerator`. The Trainer's own stays as it is,
  since its arguments see to it.
- `DistributedDataParallel.__init__`: a script that wraps its model itself hears at once that ZeRO would not be used.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_zero.changes import Changes
from hf_zero.errors import UsageError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from transformers import TrainingArguments

_ARGUMENTS, _ACCELERATOR = "transformers.training_args", "accelerate.accelerator"
_DDP = "torch.nn.parallel.distributed"

logger = logging.getLogger(__name__)

_changes = Changes()


def switch_on() -> None:
    """From now until `hf_zero.undo()`, scripts train under the file that HF_ZERO_CONFIG names; a second call changes nothing.

    What a script does not use is not imported for it: that would take seconds.

    Raises:
        UsageError: there are arguments or an accelerator already, which would train without ZeRO.
    """
    if _changes:
        return
    _refuse_what_was_made_before()
    _changes.keep()
    for module, kind, method, replacement in (
        (_ARGUMENTS, "TrainingArguments", "__post_init__", _take_arguments),
        (_ACCELERATOR, "Accelerator", "__init__", _take_accelerator),
        (_DDP, "DistributedDataParallel", "__init__", _refuse_ddp),
    ):
        _changes.once_imported(module, partial(_wrap, kind, method, replacement))


def _wrap(kind: str, method: str, replacement: Callable[..., Any], module: Any) -> None:
    _changes.wrap(getattr(module, kind), method, replacement)


def _refuse_what_was_made_before() -> None:
    names = ((_ARGUMENTS, "TrainingArguments"), (_ACCELERATOR, "Accelerator"))
    kinds = tuple(kind for module, name in names if (kind := getattr(sys.modules.get(module), name, None)) is not None)
    made = {type(found) for found in gc.get_objects()} if kinds else set()
    early = next((each for each in made if issubclass(each, kinds)), None)
    if early is not None:
        raise UsageError(
            f"HF_ZERO_CONFIG asks for ZeRO, but {early.__name__} was made before hf_zero was imported, and would train without "
            "it: import hf_zero at the top of the script, or start the script with `hf-zero launch`"
        )


def _take_arguments(original: Any, self: TrainingArguments) -> None:
    from hf_zero.integrations.trainer import arguments

    if isinstance(self, arguments.ZeroTrainingArguments):
        original(self)  # they do so themselves
    else:
        arguments.start(self, lambda: original(self))


def _take_accelerator(original: Any, self: Accelerator, *args: Any, **kwargs: Any) -> None:
    from accelerate import Accelerator

    from hf_zero.integrations.accelerate.accelerator import ZeroAccelerator

    caller = sys._getframe(2).f_globals.get("__name__", "")
    if isinstance(self, ZeroAccelerator) or caller.partition(".")[0] == "transformers":
        original(self, *args, **kwargs)
        return
    if type(self) is not Accelerator:
        raise UsageError(
            f"HF_ZERO_CONFIG asks for ZeRO, but {type(self).__name__} is an Accelerator of its own, which would train without "
            "it: derive it from hf_zero.ZeroAccelerator"
        )
    self.__class__ = ZeroAccelerator
    ZeroAccelerator.__init__(self, *args, **kwargs)


def _refuse_ddp(original: Any, self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    from hf_zero.engine.engine import number_of_engines
    from hf_zero.sharding.active import is_left_whole

    if not is_left_whole(module):
        what = (
            f"HF_ZERO_CONFIG asks for ZeRO, but DistributedDataParallel wraps {type(module).__name__}, which would train "
            "without it"
        )
        if not number_of_engines():
            raise UsageError(
                f"{what}: call `hf_zero.shard_model(model)` in its place, before the optimizer is made; or, if it is to stay "
                "whole, `hf_zero.leave_whole(model)` first"
            )
        logger.warning("%s", what)
    original(self, module, *args, **kwargs)
