"""`hf-zero plan`: what each stage would hold and move, what fits, and the configuration for it."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_zero.cli.planning import sequences, timing
from hf_zero.cli.planning.fitting import MARGIN, USUAL_RANKS_A_HOST, chosen_of, fits, fits_device, on_a_host, verdict
from hf_zero.cli.planning.row import Row
from hf_zero.cli.planning.tuning import keys_of, tuned
from hf_zero.config.offload import Offload
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.parameters import parameters_of
from hf_zero.tables import aligned
from hf_zero.tables import size_told as size

if TYPE_CHECKING:
    from torch import nn

    from hf_zero.plan.activations import Kept
    from hf_zero.plan.scale import HostMemory
    from hf_zero.plan.shapes import ModelShape


def add_arguments(parser: argparse.ArgumentParser, size_of: Callable[[str], int]) -> None:
    """The options of the command."""
    parser.add_argument(
        "model", metavar="MODEL", help="a folder with a config.json, a name on the hub, or llama-125m, ..."
    )
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="processes, one a device (default: 8)")
    parser.add_argument(
        "--gpu-memory", "--memory", type=size_of, metavar="SIZE", help="of one rank, such as 80GiB: says what fits"
    )
    parser.add_argument(
        "--seq-len", type=int, metavar="TOKENS", help="of a sequence; without it, activations are left out"
    )
    parser.add_argument(
        "--tile-tokens", type=int, default=0, metavar="N", help="logits of so many tokens at a time (default: of all)"
    )
    parser.add_argument(
        "--tile-mlp", type=int, default=0, metavar="N", help="MLPs of so many tokens at a time (of all)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=1, metavar="B", help="sequences a rank and micro-batch (default: 1)"
    )
    parser.add_argument("--sp", type=int, default=1, metavar="N", help="ranks that share each sequence, as sp_size (1)")
    parser.add_argument("--cp", type=int, default=1, metavar="N", help="likewise, as cp_size; both together (1)")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="ranks that divide all experts, as ep_size (1)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share each layer, as tp_size (1)")
    parser.add_argument("--checkpointing", action="store_true", help="with activation checkpointing only")
    parser.add_argument("--accumulation", action="store_true", help="several micro-batches a step")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="computed in (default: bfloat16)"
    )
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "adam", "lion", "muon", "momentum", "sgd", "adafactor"),
        default="adamw",
        help="(default: adamw)",
    )
    parser.add_argument(
        "--lora", type=int, metavar="R", help="train adapters of rank R on all linear layers (needs PEFT)"
    )
    parser.add_argument(
        "--load-in-4bit", action="store_true", help="with --lora: frozen weights as bitsandbytes packs them (QLoRA)"
    )
    parser.add_argument("--replicate", type=int, default=1, metavar="R", help="replicas of the model (default: 1)")
    parser.add_argument(
        "--disk", metavar="FOLDER", help="also plan with all that can be offloaded in this folder (CPU ranks only)"
    )
    parser.add_argument(
        "--host-memory",
        type=size_of,
        metavar="SIZE",
        help="of one host, such as 512GB: also plan with what rests in it, beside a device (see --ranks-per-host)",
    )
    parser.add_argument(
        "--ranks-per-host", type=int, metavar="N", help="that share its memory (default: 8, or all ranks)"
    )
    timing.add_arguments(parser)
    parser.add_argument("--scale", action="store_true", help="also show 8 to 10,000 ranks, and what limits them first")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the configuration of the first way that fits")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw what a rank holds, by stage; with --scale, by ranks (needs matplotlib)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the plan; returns 0, or 1 if nothing fits.

    Raises:
        ConfigError: the options contradict each other, or a file exists already.
        UsageError: the model is not known.
    """
    from hf_zero.plan.shapes import meta_model

    _check(args)
    if args.gpu is not None and args.gpu_memory is None:
        args.gpu_memory = timing.memory_of(args.gpu)
    model = meta_model(args.model)
    with sequences.shared(model, args):
        return _run(model, args)


def _run(model: nn.Module, args: argparse.Namespace) -> int:
    import torch

    from hf_zero.cli.planning.drawing import draw, draw_scale
    from hf_zero.plan.scale import told
    from hf_zero.plan.shapes import shapes_of, with_adapters

    if args.lora is not None:
        model = with_adapters(model.to(getattr(torch, args.dtype)), args.lora)  # frozen weights need no masters
    shape = shapes_of(model, in_4bit=args.load_in_4bit)
    collectives, machine = timing.machine_of(args, USUAL_RANKS_A_HOST) if timing.predicts(args) else ("native", None)
    rows = rows_of(model, shape, args, collectives)
    if args.measure and int(os.environ.get("RANK", "0")):
        return 0  # a launcher has started several, which have measured together
    clock = None if machine is None else timing.Clock.of(model, shape, machine, args)
    if clock is not None:
        rows = [replace(row, played=clock.time_of(row.setting, row.checkpoints)) for row in rows]
    print("\n".join([_model_told(model, shape), *_told(shape, rows, args, clock)]))
    if args.seq_len is not None:
        ways = [(row.name, row.setting, row.checkpoints) for row in rows if row.setting.config.stage == 3]
        told_of = sequences.told(model, shape, ways, args, lambda each: fits_device(each, args), size)
        print("\n".join(told_of))
    chosen = chosen_of(rows, args)
    if args.best and chosen is not None and clock is not None:
        chosen, lines = tuned(chosen, rows, shape, args, clock)
        print("\n".join(lines), end="\n" if lines else "")
    if args.scale:
        has_limit = args.gpu_memory is not None or args.host_memory is not None
        print("\n" + "\n".join(told(shape, (chosen if chosen and has_limit else rows[-1]).setting, size, _host(args))))
    if args.plot is not None and args.scale:
        draw_scale(shape, rows, args.plot)
        print(f"Drawn in {args.plot}.")
    elif args.plot is not None:
        draw(shape, rows, args.plot)
        print(f"Drawn in {args.plot}.")
    if chosen is None:
        return 1
    if args.write is not None:
        _write(args.write, chosen, args)
        print(f"Wrote {args.write} ({chosen.name}).")
        print(f"Run: hf-zero launch --num_processes {args.ranks} --zero {args.write} script.py")
        if chosen.checkpoints:
            print("with gradient_checkpointing=True in the script (of the Trainer: --gradient_checkpointing).")
    return 0


def _check(args: argparse.Namespace) -> None:
    timing.check(args)
    for name in ("ranks", "batch_size", "seq_len", "sp", "cp", "ep", "tp", "replicate", "lora", "ranks_per_host"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: give 1 or more")
    for name in ("tile_tokens", "tile_mlp"):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}: give 0 or more")
    if args.ranks % args.replicate:
        raise ConfigError(f"--replicate {args.replicate} does not divide --ranks {args.ranks}: give numbers that do")
    in_replica = args.ranks // args.replicate
    for names in (("tp",), ("sp", "cp"), ("ep",)):
        sizes = {name: getattr(args, name) for name in names if getattr(args, name) > 1}
        if in_replica % math.prod(sizes.values()):
            told = " x ".join(f"--{name} {value}" for name, value in sizes.items())
            raise ConfigError(f"{told} does not divide the {in_replica} ranks of a replica: give numbers that do")
    if args.ep > 1 and args.scale:
        raise ConfigError("--scale counts with ranks that do not divide the experts: leave it, or --ep, out")
    unused = {"sp": 1, "cp": 1, "ep": 1, "tile_tokens": 0, "tile_mlp": 0, "lora": None, "scale": False}
    for name, value in unused.items():
        if args.tp > 1 and getattr(args, name) != value:
            told = f"--{name.replace('_', '-')}"
            why = ": its experts are shared either way, and rest alike" if name == "ep" else ""
            raise ConfigError(f"{told} is not planned together with --tp{why}: leave one of them out")
    if args.ranks_per_host is not None and args.host_memory is None:
        raise ConfigError("--ranks-per-host says who shares --host-memory: give that, too")
    if args.host_memory is not None and args.disk is not None:
        raise ConfigError("--disk is for CPU ranks, and --host-memory for ranks on devices: give one of them")
    if args.load_in_4bit and args.lora is None:
        raise ConfigError("--load-in-4bit freezes the weights that it packs, so nothing would train: give --lora R too")
    if args.write is not None and args.write.exists():
        raise ConfigError(f"{args.write} exists already: remove it, or name another file")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")


def rows_of(model: nn.Module, shape: ModelShape, args: argparse.Namespace, collectives: str = "native") -> list[Row]:
    """The ways to train a model, in the order of what they cost: exchanges first, then what is computed again."""
    from hf_zero.plan.activations import NOTHING
    from hf_zero.plan.memory import Setting, predict

    kept = {False: NOTHING}
    if args.seq_len is not None:
        kept = sequences.activations_of(model, args, args.seq_len, args.tile_tokens)
    if args.checkpointing:
        kept = {True: kept.get(True, NOTHING)}
    common = {"compute_dtype": args.dtype, "collectives": collectives, "replicate": args.replicate}
    common |= {"tile_tokens": args.tile_tokens, "tile_mlp": args.tile_mlp}
    common |= {"sp_size": args.sp, "cp_size": args.cp, "ep_size": args.ep, "tp_size": args.tp}
    rows = []
    for (offloads, checkpoints), found in _ways(kept, args):
        for stage in (0, 1, 2, 3):
            if stage == 0 and (args.replicate > 1 or args.ep > 1 or args.tp > 1 or offloads != "none"):
                continue
            for offload in _offloads(offloads, stage, args):
                config = ZeroConfig(stage=stage, offload=offload, **common)
                setting = Setting(config, args.ranks // args.tp, args.optimizer, args.accumulation)
                rows.append(Row(setting, checkpoints, predict(shape, setting, found), found))
    return rows


def _ways(kept: dict[bool, Kept], args: argparse.Namespace) -> list[tuple[tuple[str, bool], Kept]]:
    """Where things are, and whether activations are computed again: what waits for the host, or for a disk, comes last."""
    places = ["none", *(["host"] if args.host_memory else []), *(["disk"] if args.disk else [])]
    return [((place, checkpoints), found) for place in places for checkpoints, found in kept.items()]


def _offloads(place: str, stage: int, args: argparse.Namespace) -> list[Offload]:
    if place == "disk":
        return [Offload("disk", "disk" if stage == 3 else "none", path=args.disk)]
    if place == "host":
        return [Offload("host"), Offload("host", "host")] if stage == 3 else [Offload("host")]
    return [Offload()]


# ---- what is told ----------------------------------------------------------------------------------------------------


def _model_told(model: nn.Module, shape: ModelShape) -> str:
    sizes = [(param.numel(), param.requires_grad) for param in parameters_of(model)]
    trained = sum(numel for numel, trains in sizes if trains)
    total = sum(numel for numel, _ in sizes)
    return f"{shape.name}: {total:,} parameters ({trained:,} trainable), {len(shape.units)} units"


def _told(shape: ModelShape, rows: list[Row], args: argparse.Namespace, clock: timing.Clock | None) -> list[str]:
    from hf_zero.plan.memory import balance

    how = f"{args.ranks:,} {'rank' if args.ranks == 1 else 'ranks'}, {args.dtype}, {args.optimizer}"
    how += ", accumulation" if args.accumulation else ""
    how += f", LoRA of rank {args.lora}" + (" on 4-bit weights" if args.load_in_4bit else "") if args.lora else ""
    how += f", {args.batch_size} x {args.seq_len} tokens a rank" if args.seq_len else ""
    head = ["a rank", "parameters", "gradients", "optimizer", "gathered", "activations", "peak", "received a step"]
    head += ["disk"] if args.disk else []
    head += ["on the host"] if args.host_memory else []
    head += timing.HEADS if clock else []
    has_limit = args.gpu_memory is not None or args.host_memory is not None
    table = [[*head, "fits"] if has_limit else head]
    for row in rows:
        h = row.holding
        known = size(h.activations) if args.seq_len else "?"
        sizes = [size(n) for n in (h.parameters, h.gradients, h.optimizer, h.gathered)]
        moved = size(h.in_replica) + (f" + {size(h.between_replicas)}" if h.between_replicas else "")
        cells = [row.name, *sizes, known, size(h.peak), moved, *([size(h.on_disk)] if args.disk else [])]
        cells += [size(h.on_host)] if args.host_memory else []
        cells += clock.cells(row.played) if clock else []
        table.append([*cells, "yes" if fits(row, args) else "no"] if has_limit else cells)
    lines = [how, "", aligned(table, "<>", margin="  "), ""]
    cut = rows[-1].setting
    lines.append(f"Balance: the fullest rank holds {balance(shape, cut):.3f} times the mean of the parameters.")
    if not args.seq_len:
        lines.append("Activations are left out: give --seq-len.")
    if args.gpu_memory is not None:
        lines += verdict(shape, rows, args)
    if args.host_memory is not None:
        lines.append(
            "on the host: a rank's rows, states and gradients, and what goes up and comes down; "
            f"a host has {size(args.host_memory)} for {on_a_host(args)} of them, of which a tenth is kept free."
        )
    if args.disk:
        lines.append(
            "disk: optimizer states, masters and (stage 3) parameters at rest; the peak has the slots of a step."
        )
    lines.append(
        "parameters: with the whole copies that stages 0 to 2 compute with. gathered: units that stage 3 has whole at once.\n"
        "peak: in the backward, without the device's own context. Not counted: where memory is left, stage 3 keeps units\n"
        "whole for the backward, and receives up to a third less (`reshard_after_forward: auto`)."
    )
    lines += [clock.told()] if clock else []
    return lines


def _host(args: argparse.Namespace) -> HostMemory | None:
    from hf_zero.plan.scale import HostMemory

    if args.host_memory is None:
        return None
    return HostMemory(MARGIN * args.host_memory, args.ranks_per_host or USUAL_RANKS_A_HOST)


def _write(path: Path, row: Row, args: argparse.Namespace) -> None:
    import yaml

    values: dict[str, Any] = {
        "stage": row.setting.config.stage,
        "compute_dtype": args.dtype,
        "expected_world_size": args.ranks,
    }
    for key in ("replicate", "tp_size", "sp_size", "cp_size", "ep_size", "tile_tokens", "tile_mlp"):
        value = getattr(row.setting.config, key)
        if value > (0 if key.startswith("tile") else 1):
            values[key] = value
    values |= keys_of(row)
    if row.setting.config.offload.is_anything:
        offload = row.setting.config.offload
        values["offload"] = {"optimizer": offload.optimizer, "parameters": offload.parameters}
        if offload.path is not None:
            values["offload"]["path"] = offload.path
    text = f"# For {args.model}: hf-zero plan\n" + yaml.safe_dump(values, sort_keys=False)
    if row.checkpoints:
        text += "# With the Trainer's gradient_checkpointing=True.\n"
    path.write_text(text)
