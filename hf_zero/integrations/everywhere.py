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
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainingArguments

from hf_zero.changes import Changes
from hf_zero.engine.engine import number_of_engines
from hf_zero.errors import UsageError
from hf_zero.integrations.accelerate.accelerator import ZeroAccelerator
from hf_zero.integrations.trainer import arguments
from hf_zero.sharding.active import is_left_whole

logger = logging.getLogger(__name__)

_changes = Changes()


def switch_on() -> None:
    """From now until `hf_zero.undo()`, scripts train under the file that HF_ZERO_CONFIG names; a second call changes nothing.

    Raises:
        UsageError: there are arguments or an accelerator already, which would train without ZeRO.
    """
    if _changes:
        return
    _refuse_what_was_made_before()
    _changes.keep()
    _changes.wrap(TrainingArguments, "__post_init__", _take_arguments)
    _changes.wrap(Accelerator, "__init__", _take_accelerator)
    _changes.wrap(DistributedDataParallel, "__init__", _refuse_ddp)


def _refuse_what_was_made_before() -> None:
    made = {type(found) for found in gc.get_objects()}
    early = next((each for each in made if issubclass(each, (TrainingArguments, Accelerator))), None)
    if early is not None:
        raise UsageError(
            f"HF_ZERO_CONFIG asks for ZeRO, but {early.__name__} was made before hf_zero was imported, and would train without "
            "it: import hf_zero at the top of the script, or start the script with `hf-zero launch`"
        )


def _take_arguments(original: Any, self: TrainingArguments) -> None:
    if isinstance(self, arguments.ZeroTrainingArguments):
        original(self)  # they do so themselves
    else:
        arguments.start(self, lambda: original(self))


def _take_accelerator(original: Any, self: Accelerator, *args: Any, **kwargs: Any) -> None:
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
