"""`hf-zero launch`: `accelerate launch` with `--zero`, for any script."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hf_zero.config.files import CONFIG_VARIABLE
from hf_zero.errors import UsageError


def launch(argv: Sequence[str]) -> int:
    """Start processes as `accelerate launch` does, each of which runs the script under ZeRO, see `hf_zero.run`.

    On a machine without an accelerator, `--num_processes N` starts N processes on the CPU, which accelerate alone does not.

    Args:
        argv: options of `accelerate launch`, `--zero FILE`, the script, and the script's own arguments.

    Raises:
        UsageError: there is no configuration, or the script is no Python script.
    """
    import torch
    from accelerate.commands.launch import launch_command, launch_command_parser

    parser = launch_command_parser()
    parser.prog = "hf-zero launch"
    parser.add_argument("--zero", metavar="FILE", help="the ZeRO configuration: ours, or DeepSpeed's")
    args = parser.parse_args(list(argv))
    source = args.zero or os.environ.get(CONFIG_VARIABLE)
    if not source:
        raise UsageError(f"launch needs --zero FILE before the script, or {CONFIG_VARIABLE}")
    if args.no_python:
        raise UsageError("launch runs Python scripts only: leave out --no_python")
    if args.use_fsdp or args.use_deepspeed or args.use_megatron_lm:
        raise UsageError("launch cannot be combined with FSDP, DeepSpeed or Megatron-LM: leave their options out")
    zero = ["--zero", os.path.abspath(source) if os.path.exists(source) else source]
    if args.num_processes is not None:
        zero += ["--expect", str(args.num_processes)]
    is_module = ["--module"] if args.module else []
    args.training_script_args = [*zero, *is_module, args.training_script, *args.training_script_args]
    args.training_script, args.module = "hf_zero.run", True
    if not torch.accelerator.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        if args.config_file is None and (args.num_processes or 1) > 1:
            args.cpu, args.multi_gpu = False, True  # accelerate starts one process for `--cpu --num_processes 2`
    sys.stdout.flush()
    launch_command(args)
    return 0
