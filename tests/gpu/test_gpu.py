"""The same cases on a GPU (`pytest -m gpu -s tests/gpu`), on CPU ranks, and on a device that is simulated on CPUs (slow)."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gpu.cases import CASES_OF_TWO, NEED_A_FOLDER, run
from tests.ranks import ENVIRONMENT, on_ranks

_LIMIT_S = 120
# What everyday tests ask for.
_DROPPED = {"HF_ZERO_COLLECTIVES", "ACCELERATE_USE_CPU"} if torch.cuda.is_available() else {"HF_ZERO_COLLECTIVES"}
# NCCL refuses two ranks on one device unless each claims to be on a host of its own; they talk over sockets then.
_ON_ONE_DEVICE = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
}


_BY_HAND = {"bf16", "compiled", "recomputation"}  # on CPUs, other tests show the same


@on_ranks(2, name=[name for name in CASES_OF_TWO if name not in _BY_HAND])
def test_on_cpu_ranks(name: str, tmp_path: Path) -> None:
    run(name, "cpu", *_folder(name, tmp_path))


@pytest.mark.slow
@on_ranks(2, name=sorted(_BY_HAND))
def test_the_others_on_cpu_ranks(name: str, tmp_path: Path) -> None:
    run(name, "cpu", *_folder(name, tmp_path))


def _folder(name: str, tmp_path: Path) -> list[str]:
    return [str(tmp_path / "state")] if name in NEED_A_FOLDER else []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", CASES_OF_TWO)
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    print(_launched(name, tmp_path))


@pytest.mark.slow
def test_cases_can_be_launched(tmp_path: Path) -> None:
    assert _launched("resume", tmp_path).startswith("resume: right")


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, ("g++", "ninja"))), reason="nothing to build the device with")
@pytest.mark.parametrize(
    "name", [name for name in CASES_OF_TWO if name != "late"]
)  # its exchanges make the process wait
def test_on_a_simulated_device(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    built = {"TORCH_EXTENSIONS_DIR": str(tmp_path_factory.getbasetemp() / "built")}
    assert _launched(name, tmp_path, "tests.gpu.simulated.run", built).startswith(f"{name}: right")


def _launched(name: str, tmp_path: Path, module: str = "tests.gpu.cases", more: dict[str, str] | None = None) -> str:
    """Two processes on two GPUs, or on the one there is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shares = torch.cuda.device_count() < 2
    words = [sys.executable, "-m", module, name, *_folder(name, tmp_path)]
    ranks, logs = [], [tmp_path / f"rank{rank}" for rank in (0, 1)]
    environment = {key: value for key, value in ENVIRONMENT.items() if key not in _DROPPED} | (more or {})
    for rank, log in enumerate(logs):
        own = environment | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0" if shares else str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if shares:
            own |= _ON_ONE_DEVICE | {"NCCL_HOSTID": f"host{rank}"}
        with log.open("wb") as output:
            ranks.append(subprocess.Popen(words, env=own, stdout=output, stderr=subprocess.STDOUT))
    try:
        deadline = time.monotonic() + _LIMIT_S
        while any(each.poll() is None for each in ranks) and time.monotonic() < deadline:
            if any(each.returncode for each in ranks):
                deadline = min(deadline, time.monotonic() + 10)  # the other may have something to say, too
            time.sleep(0.1)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    texts = [log.read_text(errors="replace") for log in logs]
    assert [each.returncode for each in ranks] == [0, 0], "\n---\n".join(text[-4000:] for text in texts)
    return next(line for line in texts[0].splitlines() if line.startswith(f"{name}: right"))
