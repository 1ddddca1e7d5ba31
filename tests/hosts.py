"""Two hosts on one machine: network, process numbers, host name and shared memory of their own, with a line between them.

`python -m tests.hosts 1gbit 5 ddp fsdp2 "stage 3"` trains over a line of that rate, in 5 rounds, and prints times of a step;
without names, in all ways: local, ddp, fsdp2, and each stage with each wire format.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.ranks import ENVIRONMENT

ADDRESS = "10.77.0.{}"
_ROOT = Path(__file__).parents[1]


class Hosts:
    """What runs programs on one of two hosts; see `two_hosts`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def start(
        self,
        host: int,
        command: Sequence[str],
        folder: Path,
        own: Mapping[Path, Path] | None = None,
        **variables: str,
    ) -> subprocess.Popen[str]:
        """Start a program on a host. Killing it kills all that it has started there, as when a host dies.

        Args:
            host: 0 or 1.
            command: the program.
            folder: where it runs.
            own: folders that the host sees in place of others.
            variables: of its environment.
        """
        mounts = "".join(f"mount --bind {new} {old} && " for old, new in (own or {}).items())
        shell = f'mount -t tmpfs none /dev/shm && {mounts}hostname host{host} && exec "$@"'
        spaces = ["--pid", "--fork", "--kill-child", "--uts", "--ipc", "--mount", "--mount-proc"]
        prefix = ["ip", "netns", "exec", self._names[host], "unshare", *spaces, "sh", "-c", shell, "sh"]
        environment = (
            ENVIRONMENT | {"GLOO_SOCKET_IFNAME": f"{self._names[host]}v", "PYTHONPATH": str(_ROOT)} | variables
        )
        return subprocess.Popen(
            [*prefix, *command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """While active, nothing passes the line between the hosts, and nobody is told."""
        end = self._names[0]
        line = ["ip", "netns", "exec", end, "ip", "link", "set", f"{end}v"]
        _run(*line, "down")
        try:
            yield
        finally:
            _run(*line, "up")


def ranks_on(hosts: Hosts, ranks_a_host: int, command: Sequence[str], folder: Path) -> list[subprocess.Popen[str]]:
    """A program on each rank of both hosts, with the variables that `init_process_group` reads."""
    common = {"MASTER_ADDR": ADDRESS.format(1), "MASTER_PORT": "29500", "WORLD_SIZE": str(2 * ranks_a_host)}
    return [
        hosts.start(rank // ranks_a_host, command, folder, None, RANK=str(rank), **common)
        for rank in range(2 * ranks_a_host)
    ]


def why_not() -> str:
    """Why this machine lets nobody make hosts; empty if it does."""
    missing = [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    name = f"hfz{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.stderr.strip()


@contextlib.contextmanager
def two_hosts(rate: str | None = None) -> Iterator[Hosts]:
    """Two hosts at 10.77.0.1 and 10.77.0.2.

    Args:
        rate: of the line between them, as `tc` writes it; None: as fast as the machine copies.
    """
    names = [f"hfz{os.getpid()}{host}" for host in (0, 1)]
    lines = [f"{name}v" for name in names]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", lines[0], "type", "veth", "peer", "name", lines[1])
        for host, (name, line) in enumerate(zip(names, lines, strict=True)):
            _run("ip", "link", "set", line, "netns", name)
            inside = ["ip", "netns", "exec", name]
            _run(*inside, "ip", "addr", "add", f"{ADDRESS.format(host + 1)}/24", "dev", line)
            for each in (line, "lo"):
                _run(*inside, "ip", "link", "set", each, "up")
            if rate:
                _run(*inside, *f"tc qdisc add dev {line} root tbf rate {rate} burst 512kb latency 50ms".split())
        yield Hosts(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


# --- speed over a slow line -------------------------------------------------------------------------------------------

_SPEED = """
import sys, time, torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
import hf_zero as zero
from hf_zero.bench.step.engines import Setup, build
from hf_zero.plan.models import config_of

torch.set_num_threads(1)
dist.init_process_group("gloo")
wires = {"exact": {}, "bfloat16": {"gather": "bfloat16", "reduce": "bfloat16"}}
wires |= {"int8, bfloat16": {"gather": "int8", "reduce": "bfloat16"}, "int8, int4": {"gather": "int8", "reduce": "int4"}}
ways = {f"stage {stage}, {name}": {"stage": stage, "wire": wire} for stage in (3, 1, 2) for name, wire in wires.items()}
ways |= {"stage 3, native": {"stage": 3, "collectives": "native"}}
ways |= {"stage 3, gathered twice": {"stage": 3, "reshard_after_forward": True}}
ways |= {"local": None, "ddp": None, "fsdp2": None}
rounds, *chosen = sys.argv[1:]
ways = {name: way for name, way in ways.items() if not chosen or name in chosen or name.partition(",")[0] in chosen}
base = "ddp" if "ddp" in ways else next(iter(ways))
times = {name: [] for name in ways}

def make():
    config = config_of("llama-34m")
    config.use_cache = False
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)

for _ in range(int(rounds)):
    for name, way in ways.items():
        if way is None:
            training = build(name, Setup(make, torch.device("cpu"), torch.float32, 1))
            model, backward, step = training.model, training.backward, training.step
        else:
            model, backward = make(), torch.Tensor.backward
            zero.shard_model(model, {"collectives": "pairwise", **way})
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            step = lambda: (optimizer.step(), optimizer.zero_grad())
        tokens = torch.randint(0, 1000, (1, 128))
        for number in range(5):
            if number == 2:
                dist.barrier()
                start = time.perf_counter()
            backward(model(input_ids=tokens, labels=tokens).loss)
            step()
        dist.barrier()
        times[name].append((time.perf_counter() - start) / 3)
        training = model = optimizer = step = None
if dist.get_rank() == 0:
    for name, seconds in times.items():
        ratios = sorted(mine / its for mine, its in zip(seconds, times[base]))
        middle = len(ratios) // 2
        spread = f"{ratios[middle]:.2f} of {base} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"{name:24} {sorted(seconds)[middle] * 1e3:8.0f} ms a step, {spread}")
dist.barrier()
dist.destroy_process_group()
"""


def main() -> None:
    """Print the times of a step over a line of the rate given."""
    rate, rounds, *names = [*sys.argv[1:], "5"] if len(sys.argv) == 2 else sys.argv[1:]
    with two_hosts(rate) as hosts:
        running = ranks_on(hosts, 1, [sys.executable, "-c", _SPEED, rounds, *names], Path.cwd())
        told = [process.communicate()[0] for process in running]
    print(f"llama-34m, 2 hosts with a rank each, {rate}, 1 x 128 tokens, {rounds} rounds")
    print(told[0] if all(process.returncode == 0 for process in running) else "\n".join(told))


if __name__ == "__main__":
    main()
