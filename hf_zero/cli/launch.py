"""`hf-zero launch`: `accelerate launch` with `--zero`, for any script.

It looks at the configuration and the script before it starts processes, and ends with one sentence, not with the launchers'
tracebacks: what went wrong in a process is what that process has printed.
"""

from __future__ import annotations

import ast
import logging
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, cast

from hf_zero.cli import healing
from hf_zero.config import files
from hf_zero.config.files import CONFIG_VARIABLE
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.errors import ConfigError, UsageError

_ELASTIC = "torch.distributed.elastic"  # logs what the sentence says, in other words
_INTERRUPTED = 128 + signal.SIGINT


def launch(argv: Sequence[str]) -> int:
    """Start processes as `accelerate launch` does, each of which runs the script under ZeRO, see `hf_zero.run`.

    On a machine without an accelerator, `--num_processes N` starts N processes on the CPU, which accelerate alone does not.
    With `--max_restarts N`, what has failed is started again, up to N times, and goes on from its newest checkpoint.

    Args:
        argv: options of `accelerate launch`, `--zero CONFIG`, the script, and the script's own arguments.

    Returns:
        The exit code: 0, 1 if a process has failed, 130 after Ctrl-C.

    Raises:
        ConfigError: the configuration has a mistake, or wants another number of processes.
        UsageError: there is no configuration, or the script cannot be run.
    """
    import torch
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.prog = "hf-zero launch"
    parser.add_argument("--zero", metavar="CONFIG", help="a stage (0 to 3), or a file: ours, or DeepSpeed's")
    parser.add_argument(
        "--min_processes",
        type=int,
        metavar="M",
        help="with --max_restarts: go on without hosts that are lost, on M or more",
    )
    parser.add_argument(
        "--save_every", metavar="SHARE", help="save as often as takes this share of the time, such as 2%% (the Trainer)"
    )
    args = parser.parse_args(list(argv))
    if args.save_every is not None:
        os.environ["HF_ZERO_SAVE_EVERY"] = args.save_every
    source = args.zero or os.environ.get(CONFIG_VARIABLE)
    if not source:
        raise UsageError(f"launch needs --zero before the script (a stage, 0 to 3, or a file), or {CONFIG_VARIABLE}")
    if args.no_python:
        raise UsageError("launch runs Python scripts only: leave out --no_python")
    if args.use_fsdp or args.use_deepspeed or args.use_megatron_lm:
        raise UsageError("launch cannot be combined with FSDP, DeepSpeed or Megatron-LM: leave their options out")
    _look_at_configuration(source, args.num_processes)
    _look_at_script(args.training_script, args.module)
    if args.config_file is not None and not os.path.isfile(args.config_file):
        raise UsageError(f"--config_file {args.config_file}: no such file")
    zero = ["--zero", files.from_anywhere(source)]
    if args.num_processes is not None and args.min_processes is None:
        zero += ["--expect", str(args.num_processes)]
    is_module = ["--module"] if args.module else []
    args.training_script_args = [*zero, *is_module, args.training_script, *args.training_script_args]
    args.training_script, args.module = "hf_zero.run", True
    if not torch.accelerator.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        if args.config_file is None and (args.num_processes or 1) > 1:
            args.cpu, args.multi_gpu = False, True  # accelerate starts one process for `--cpu --num_processes 2`
    _fill_in(args)
    sys.stdout.flush()
    healing.check(args)
    if not healing.is_wanted(args):
        return _start(args)
    with healing.healing(args) as healer:
        code = _start(args)
        machines, processes = healing.sizes(args)
        if code == 128 + signal.SIGTERM and healer.has_saved_all(processes // machines):
            print(
                "hf-zero: told to end, and all is saved: another start of this job goes on from there", file=sys.stderr
            )
            return 0
        return code


def _look_at_configuration(source: str, num_processes: int | None) -> None:
    if num_processes is not None and num_processes < 1:
        raise UsageError(f"--num_processes is {num_processes}: give 1 or more")
    content, name = files.read(source)
    # Not `load`, which shows what a DeepSpeed file means: rank 0 will.
    wanted = ZeroConfig.from_dict(cast("Mapping[str, Any]", content), name).expected_world_size
    if None not in (wanted, num_processes) and wanted != num_processes:
        raise ConfigError(
            f"expected_world_size is {wanted}, but --num_processes is {num_processes}: change one of them (`hf-zero plan "
            "--ranks N` says what fits)"
        )


def _look_at_script(script: str, is_module: bool) -> None:
    if is_module:
        if PathFinder.find_spec(script.partition(".")[0], [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"there is no module {script!r} to run")
        return
    path = Path(script)
    if not path.exists():
        raise UsageError(f"{script}: no such script (the working directory is {os.getcwd()})")
    if path.is_file():
        try:
            ast.parse(path.read_bytes(), script)
        except (SyntaxError, ValueError) as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            raise UsageError(f"{script}{line}: is not Python: {getattr(error, 'msg', error)}") from None


def _fill_in(args: Namespace) -> None:
    """Options that were left out as accelerate itself would take them: it tells that in five lines."""
    import torch
    from accelerate.commands.config.config_args import default_config_file

    if args.config_file is not None or (os.path.isfile(default_config_file) and not args.cpu):
        return  # that file says what they are
    if args.num_processes is None:
        args.num_processes = max(torch.accelerator.device_count(), 1)
    if args.num_processes > 1 and not (args.cpu or args.tpu):
        args.multi_gpu = True
    args.num_machines = args.num_machines or 1
    args.mixed_precision = args.mixed_precision or "no"
    args.dynamo_backend = args.dynamo_backend or "no"


def _start(args: Namespace) -> int:
    """Run the processes to their end; what ends them too early is told in one sentence."""
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if not any(name in os.environ for name in ("LOGLEVEL", "TORCH_LOGS")):
        logging.getLogger(_ELASTIC).setLevel(logging.CRITICAL)
    try:
        launch_command(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        print(f"hf-zero: rank {rank} failed first ({how}); what it said is above", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        if error.returncode == -signal.SIGINT:
            raise KeyboardInterrupt from None
        print(f"hf-zero: the script failed (exit code {error.returncode}); what it said is above", file=sys.stderr)
        return 1
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        print(f"hf-zero: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    return 0
