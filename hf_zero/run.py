"""Run a script under ZeRO without changing it: `accelerate launch -m hf_zero.run --zero 3 script.py ...`."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from hf_zero.config.files import CONFIG_VARIABLE
from hf_zero.errors import ConfigError, UsageError, ZeroError

_HELP = ("-h", "--help")
_GONE = ("closed by peer", "reset by peer", "Broken pipe")  # as gloo words it


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script that the command line names, as `python script.py ...` would.

    Its plain `TrainingArguments` (of any class) and `Accelerator` take the configuration. A script that ends well without
    having trained or run any model under ZeRO ends in an error, since that is not what was asked for.

    Args:
        argv: the arguments; those of the process by default.

    Raises:
        ConfigError: the configuration has a mistake, or another number of processes runs than was asked for.
        UsageError: the script has partitioned nothing.
    """
    args = _parser().parse_args(argv)
    if args.zero:
        os.environ[CONFIG_VARIABLE] = args.zero
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if args.expect is not None and args.expect != world_size:
        raise ConfigError(
            f"{args.expect} processes were asked for, but {world_size} run: on CPU, `hf-zero launch` starts them, or "
            "accelerate with a config of `distributed_type: MULTI_GPU` and `use_cpu: true`"
        )
    from hf_zero.config.zero_config import ZeroConfig
    from hf_zero.integrations.everywhere import switch_on

    ZeroConfig.load(None)  # before the script spends time
    switch_on()
    sys.argv = [args.script, *args.rest]
    asks_for_help = any(word in args.rest for word in _HELP)
    try:
        if args.module:
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(args.script).resolve().parent)
            runpy.run_path(args.script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code or asks_for_help:
            raise
    from hf_zero.engine.engine import number_of_engines

    if not number_of_engines():
        raise UsageError(
            f"{args.script} was to run under ZeRO ({os.environ[CONFIG_VARIABLE]}), but it has partitioned no model: it makes "
            "neither TrainingArguments nor an Accelerator, or has run no model; call hf_zero.shard_model in it"
        )


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What ends a program: in one line where its trace would only hide another rank's, or was asked for by Ctrl-C."""
    if issubclass(kind, KeyboardInterrupt):
        places = [f"{each.filename}:{each.lineno}" for each in traceback.extract_tb(trace)]
        at = next((place for place in places if place.startswith(os.path.abspath(sys.argv[0]))), "")
        inside = places[-1] if places else "?"
        print(
            f"hf_zero: interrupted at {at or inside}{f', in {inside}' if at not in ('', inside) else ''}",
            file=sys.stderr,
        )
    elif _is_loss_of_peer(error):
        ours = str(error).partition(". ")[0] if isinstance(error, ZeroError) else ""  # which rank, in which exchange
        print(
            f"hf_zero: {ours or 'a peer has ended in the middle of an exchange'}: its own error says why",
            file=sys.stderr,
        )
    else:
        _leave_out_transport(error)
        _say_where_the_model_is(error)
        sys.__excepthook__(kind, error, trace)


def _is_loss_of_peer(error: BaseException | None) -> bool:
    return "gloo/transport" in str(error) and any(word in str(error) for word in _GONE)


def _leave_out_transport(error: BaseException | None) -> None:
    """Of errors that name what a transport's error means, and quote it, show them alone."""
    while error is not None:
        if isinstance(error, ZeroError) and "gloo/transport" in str(error.__cause__):
            error.__cause__, error.__suppress_context__ = None, True
        error = error.__cause__ or error.__context__


def _say_where_the_model_is(error: BaseException) -> None:
    """A script that was written for DDP alone may ask for `model.module`."""
    if isinstance(error, AttributeError) and error.name == "module":
        from torch import nn

        from hf_zero.sharding.active import is_partitioned

        if isinstance(error.obj, nn.Module) and is_partitioned(error.obj):
            error.add_note(
                "hf_zero wraps no model: what is model.module under DDP is model itself here, and "
                "accelerator.unwrap_model(model) under both"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hf_zero.run", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--zero",
        metavar="CONFIG",
        help=f"a stage (0 to 3), or a file: ours, or DeepSpeed's (default: ${CONFIG_VARIABLE})",
    )
    parser.add_argument("--expect", type=int, metavar="N", help="refuse another number of processes")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as in `python -m`")
    parser.add_argument("script", help="what to run")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="its arguments")
    return parser


if __name__ == "__main__":
    sys.excepthook = _tell  # torch calls it, too, and writes the rank before each line
    main()
