"""What `hf-zero plan --gpu` and `--measure` tell: the time of a step, for each way to train."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_zero.cli.planning import sequences
from hf_zero.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from hf_zero.plan.memory import Setting
    from hf_zero.plan.shapes import ModelShape
    from hf_zero.plan.timing.machines import Machine
    from hf_zero.plan.timing.predicting import Counted
    from hf_zero.plan.timing.schedule import Played

MEASURED_OPTIMIZERS = ("adamw", "adam", "sgd", "momentum")
HEADS = ["step", "tokens/s", "waits", "MFU"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command that are about time."""
    from hf_zero.plan.timing.speeds import speed

    parser.add_argument("--gpu", metavar="NAME", help="such as h100: also predict the time of a step (needs --seq-len)")
    parser.add_argument(
        "--network", type=speed, metavar="SPEED", help="that a host receives from others, such as 400gbit; with --gpu"
    )
    parser.add_argument("--measure", action="store_true", help="predict by rates measured here, with --ranks processes")
    parser.add_argument(
        "--collectives",
        choices=("auto", "host", "pairwise", "native"),
        default="auto",
        help="the exchange that --measure measures (default: auto, what training would take here)",
    )
    parser.add_argument("--best", action="store_true", help="choose the fastest that fits; with --gpu or --measure")


def check(args: argparse.Namespace) -> None:
    """Raise for options that contradict each other."""
    if args.gpu is not None and args.measure:
        raise ConfigError("--gpu states rates, and --measure measures them: give one of them")
    if args.network is not None and args.gpu is None:
        raise ConfigError("--network goes with --gpu; --measure measures the exchanges of this machine")
    if args.collectives != "auto" and not args.measure:
        raise ConfigError("--collectives says what --measure measures: give that, too")
    if args.measure:
        _check_measured(args)
    if not predicts(args):
        if args.best:
            raise ConfigError("--best compares times: give --gpu or --measure, too")
        return
    if args.seq_len is None:
        raise ConfigError("the time of a step depends on the tokens: give --seq-len, too")
    for name, value in (
        ("sp", args.sp > 1),
        ("cp", args.cp > 1),
        ("ep", args.ep > 1),
        ("tp", args.tp > 1),
        ("tile-mlp", args.tile_mlp),
        ("load-in-4bit", args.load_in_4bit),
        ("tile-tokens", args.tile_tokens),
    ):
        if value:
            raise ConfigError(
                f"the time of a step is not predicted with --{name}: leave it, or --gpu and --measure, out"
            )


def _check_measured(args: argparse.Namespace) -> None:
    """Raise for what is not measured: the prediction would be another training's."""
    if args.replicate > 1 or args.lora is not None:
        name = "lora" if args.lora is not None else "replicate"
        raise ConfigError(f"--measure does not measure --{name}: leave one of them out, or give --gpu")
    if args.optimizer not in MEASURED_OPTIMIZERS:
        known = ", ".join(MEASURED_OPTIMIZERS)
        raise ConfigError(f"--measure knows the time of {known}, not of {args.optimizer}: give one of these, or --gpu")
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched not in (1, args.ranks):
        raise ConfigError(
            f"a launcher has started {launched} processes, which measure together: give --ranks {launched}"
        )


def memory_of(gpu: str) -> int:
    """Bytes of a card.

    Raises:
        ConfigError: it is not known.
    """
    from hf_zero.plan.timing.machines import card

    return card(gpu).memory


def predicts(args: argparse.Namespace) -> bool:
    """Whether times are asked for."""
    return args.gpu is not None or args.measure


@dataclass(frozen=True)
class Clock:
    """Predicts the time of a step.

    Attributes:
        machine: that ranks run on.
        counted: what the model computes.
        shape: of the model.
        tokens: of a step, over all ranks.
    """

    machine: Machine
    counted: Counted
    shape: ModelShape
    tokens: int

    @classmethod
    def of(cls, model: nn.Module, shape: ModelShape, machine: Machine, args: argparse.Namespace) -> Clock:
        """For a batch of the command.

        Raises:
            UsageError: the model does not train without values.
        """
        from hf_zero.plan.timing.predicting import Counted

        batch = sequences.batch_of(model, args.batch_size, args.seq_len, args.dtype)
        return cls(machine, Counted.of(model, shape, batch), shape, args.ranks * args.batch_size * args.seq_len)

    def time_of(self, setting: Setting, checkpoints: bool) -> Played | None:
        """Seconds of a step; None where they are not known."""
        from hf_zero.plan.timing.predicting import time_of

        return time_of(self.shape, setting, self.counted, checkpoints, self.machine)

    def cells(self, played: Played | None) -> list[str]:
        """For `HEADS`."""
        if played is None:
            return ["?"] * len(HEADS)
        peak = self.machine.peak_operations
        used = "?" if peak is None else f"{self.counted.operations / played.total / peak:.0%}"
        waits = f"{played.waiting / played.total:.0%}"
        return [f"{played.total * 1e3:,.1f} ms", f"{self.tokens / played.total:,.0f}", waits, used]

    def told(self) -> str:
        """What the predictions rest on."""
        from hf_zero.plan.timing.machines import OF_LINKS, OF_MEMORY, OF_PRODUCTS

        if self.machine.peak_operations is None:
            return (
                f"step: predicted for {self.machine.name}, by the time of a layer, of an optimizer's step and of exchanges "
                "here; one micro-batch."
            )
        return (
            f"step: predicted for {self.machine.name} by its data sheet, not measured: {OF_PRODUCTS:.0%} of its matrix "
            f"products, {OF_MEMORY:.0%} of its memory's and {OF_LINKS:.0%} of its links' speed; eager kernels, one "
            "micro-batch.\n"
            "waits: what exchanges add to it. MFU: of the data sheet, without what is computed again."
        )


def machine_of(args: argparse.Namespace, usual_on_a_host: int) -> tuple[str, Machine]:
    """What ranks run on, and the exchange that they use.

    Raises:
        ConfigError: the card is not known, or several hosts have no network.
        UsageError: what is to be measured is no causal language model.
        BenchError: a process that measures failed.
    """
    from hf_zero.plan.timing.machines import stated

    if args.measure:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        from hf_zero.bench.rates.run import measure
        from hf_zero.plan.shapes import configuration

        config = configuration(args.model)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not hasattr(config, "num_hidden_layers"):
            raise UsageError(f"--measure runs causal language models, and {args.model!r} is none: give --gpu")
        return measure(
            args.model, args.ranks, args.batch_size, args.seq_len, args.dtype, args.optimizer, args.collectives
        )
    on_a_host = args.ranks_per_host or usual_on_a_host
    num_shards = args.ranks // args.replicate
    is_float32 = args.dtype == "float32"
    return "native", stated(args.gpu, args.network, args.ranks, num_shards, on_a_host, is_float32)
