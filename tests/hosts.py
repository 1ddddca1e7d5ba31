"""Two hosts on one machine: network, process numbers, host name and shared memory of their own, with a line between them.

`python -m tests.hosts 1gbit` trains over a line of that rate with each wire format, and prints times of a step.
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
from hf_zero.plan.models import config_of

torch.set_num_threads(1)
dist.init_process_group("gloo")
ways = {
    "exact": {},
    "bfloat16": {"wire": {"gather": "bfloat16", "reduce": "bfloat16"}},
    "int8, bfloat16": {"wire": {"gather": "int8", "reduce": "bfloat16"}},
    "int8, int4": {"wire": {"gather": "int8", "reduce": "int4"}},
    "exact, native": {"collectives": "native"},
    "exact, auto": {"collectives": "auto"},
}
ways = {name: way for name, way in ways.items() if len(sys.argv) < 3 or name in sys.argv[2:]}
times = {name: [] for name in ways}
for _ in range(int(sys.argv[1])):
    for name, way in ways.items():
        config = config_of("llama-34m")
        config.use_cache = False
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        engine = zero.shard_model(model, {"stage": 3, "collectives": "pairwise", **way})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tokens = torch.randint(0, 1000, (1, 128))
        for step in range(5):
            if step == 2:
                dist.barrier()
                start = time.perf_counter()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        times[name].append((time.perf_counter() - start) / 3)
        if name == "exact, auto" and dist.get_rank() == 0:
            print(engine.world.shards.name, engine.world.shards.reason)
        del model, engine, optimizer
if dist.get_rank() == 0:
    for name, seconds in times.items():
        ratios = sorted(mine / exact for mine, exact in zip(seconds, times["exact"]))
        middle = len(ratios) // 2
        spread = f"{ratios[middle]:.2f} of exact ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"{name:16} {sorted(seconds)[middle] * 1e3:8.0f} ms a step, {spread}")
dist.barrier()
dist.destroy_process_group()
"""


def main() -> None:
    """Print the times of a step over a line of the rate given, with each wire format."""
    rate, rounds, *names = [*sys.argv[1:], "5"] if len(sys.argv) == 2 else sys.argv[1:]
    with two_hosts(rate) as hosts:
        running = ranks_on(hosts, 1, [sys.executable, "-c", _SPEED, rounds, *names], Path.cwd())
        told = [process.communicate()[0] for process in running]
    print(f"llama-34m, stage 3, 2 hosts with a rank each, {rate}, 1 x 128 tokens, {rounds} rounds")
    print(told[0] if all(process.returncode == 0 for process in running) else "\n".join(told))


if __name__ == "__main__":
    main()
