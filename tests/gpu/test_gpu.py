"""The same cases on a GPU (`pytest -m gpu -s tests/gpu`), on CPU ranks, and on the late device, on CPUs (slow)."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hf_zero.bench.gpu.run import ON_ONE_DEVICE
from tests.gpu import offload, offload_doors, offload_measured, ordinary
from tests.gpu.cases import CASES_OF_FOUR, CASES_OF_TWO, NEED_A_FOLDER, run
from tests.gpu.mistakes import MISTAKES
from tests.ranks import ENVIRONMENT, on_ranks

_LIMIT_S = 300
# What everyday tests ask for.
_DROPPED = {"HF_ZERO_COLLECTIVES", "ACCELERATE_USE_CPU"} if torch.cuda.is_available() else {"HF_ZERO_COLLECTIVES"}


_BY_HAND = {
    *("alone", "bf16", "compiled", "half", "late", "memory", "mixed", "moved", "parity", "raises", "recomputation"),
    "resume",
    "streams",
    *(each.__name__ for each in (*offload.OF_TWO, *offload_doors.OF_TWO, *offload_measured.OF_TWO, *ordinary.OF_TWO)),
}  # on CPUs, other tests show the same


@on_ranks(2, name=[name for name in CASES_OF_TWO if name not in _BY_HAND])
def test_on_cpu_ranks(name: str, tmp_path: Path) -> None:
    run(name, "cpu", *_folder(name, tmp_path))


@pytest.mark.slow
@on_ranks(2, name=sorted(_BY_HAND))
def test_the_others_on_cpu_ranks(name: str, tmp_path: Path) -> None:
    run(name, "cpu", *_folder(name, tmp_path))


def _folder(name: str, tmp_path: Path) -> list[str]:
    return [str(tmp_path / name)] if name in NEED_A_FOLDER else []  # nobody saves over another case


ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
_OF_ONE = [
    "offload",
    "offload_in_chunks",
    "offload_in_parts",
    "offload_is_refused",
    "offload_memory",
    "offload_waits",
    "offload_threads",
    "offload_scaled",
    "offload_doors",
]


@pytest.mark.gpu
@ON_A_GPU
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        *((name, 2) for name in CASES_OF_TWO),
        *((name, 1) for name in ("parity", "memory", *_OF_ONE)),
        *((name, 4) for name in CASES_OF_FOUR),
    ],
)
def test_on_a_gpu(name: str, num_ranks: int, tmp_path: Path) -> None:
    print(_launched(name, tmp_path, num_ranks=num_ranks))


_STEPS = ["--max_steps=10", "--logging_steps=5", "--per_device_train_batch_size=4", "--save_strategy=no"]
_RECIPES: dict[str, tuple[int, list[str]]] = {
    "clm": (2, ["--zero=configs/zero3.yaml", *_STEPS, "--bf16", "--verify_export"]),
    "sft": (1, ["--zero=configs/zero3.yaml", *_STEPS]),
    "lora": (2, ["--zero=configs/zero3.yaml", *_STEPS]),
    "dpo": (1, ["--zero=configs/zero3.yaml", *_STEPS]),
    "grpo": (
        2,
        ["--zero=configs/zero3.yaml", "--max_steps=2", "--save_strategy=no", "--per_device_train_batch_size=8"],
    ),
    "classification": (1, ["--zero=configs/zero2.yaml", *_STEPS]),
    "vit": (2, ["--zero=configs/zero3.yaml", *_STEPS]),
    "seq2seq": (2, ["--zero=configs/zero3.yaml", *_STEPS]),
    "embedding": (2, ["--zero=configs/zero3.yaml", *_STEPS]),
    "moe": (2, ["--zero=configs/expert_parallel.yaml", *_STEPS]),
    "long_context": (2, ["--zero=configs/long_context.yaml", "--max_steps=4", "--seq_len=4096", "--save_strategy=no"]),
    "custom_loop": (2, ["--zero=configs/zero3.yaml", "--max_steps=10"]),
    "muon": (2, ["--zero=configs/zero3.yaml", "--max_steps=10"]),
    "nn_transformer": (2, ["--max_steps=10"]),
    "pipeline": (4, ["--zero=configs/zero1.yaml", "--stages=2", "--max_steps=10"]),
}


@pytest.mark.gpu
@ON_A_GPU
@pytest.mark.parametrize("recipe", _RECIPES)
def test_a_recipe_on_a_gpu(recipe: str, tmp_path: Path) -> None:
    num_ranks, options = _RECIPES[recipe]
    words = [f"recipes/{recipe}.py", "--output_dir", str(tmp_path / "out"), *options]
    print(_ranks(words, tmp_path, num_ranks)[-1500:])


@pytest.mark.slow
def test_cases_can_be_launched(tmp_path: Path) -> None:
    assert _launched("resume", tmp_path).startswith("resume: right")


NEEDS_A_COMPILER = pytest.mark.skipif(
    not all(map(shutil.which, ("g++", "ninja"))),
    reason="g++ and ninja build the late device, and one of them is missing",
)


@pytest.fixture(scope="session")
def late_device() -> None:
    """Build it, which takes a minute or more; nobody ends that, since torch would wait for its lock for ever."""
    subprocess.run([sys.executable, "-m", "tests.gpu.late.device"], env=ENVIRONMENT, check=True)


@pytest.fixture
def built_late_device() -> None:
    """Nobody waits for a build every day."""
    from tests.gpu.late.device import is_built  # which imports what builds extensions

    if not is_built():
        pytest.skip("the late device is not built: `python -m tests.gpu.late.device` does so, in a minute of one core")


@pytest.mark.slow
@NEEDS_A_COMPILER
@pytest.mark.usefixtures("late_device")
@pytest.mark.parametrize("order", ["late", "early"])
@pytest.mark.parametrize("name", [*CASES_OF_TWO, *CASES_OF_FOUR])
def test_on_the_late_device(name: str, order: str, tmp_path: Path) -> None:
    module = ["tests.gpu.late.run", name, order]
    assert _launched(name, tmp_path, module, 4 if name in CASES_OF_FOUR else 2).startswith(f"{name}, {order}: right")


@pytest.mark.slow
@NEEDS_A_COMPILER
@pytest.mark.usefixtures("late_device")
@pytest.mark.parametrize("name", _OF_ONE)
def test_one_rank_on_the_late_device(name: str, tmp_path: Path) -> None:
    shown = _launched(name, tmp_path, ["tests.gpu.late.run", name, "late,early"], num_ranks=1)
    assert [f"{name}, {order}: right" for order in ("late", "early") if f"{name}, {order}: right" not in shown] == []


@NEEDS_A_COMPILER
@pytest.mark.usefixtures("built_late_device")
@pytest.mark.parametrize(
    ("orders", "mistakes"),
    [
        (("late",), ()),
        *(pytest.param(each, tuple(MISTAKES), marks=pytest.mark.slow) for each in (("late", "early"), ("early",))),
    ],
)
def test_the_late_device_trains_right_and_shows_mistakes(
    orders: tuple[str, ...], mistakes: tuple[str, ...], tmp_path: Path
) -> None:
    """Each in the first of the orders in which it shows."""
    names = ["parity", *mistakes]
    shown = _launched("parity", tmp_path, ["tests.gpu.late.run", ",".join(names), ",".join(orders)], last="")
    due = {name: [order for order in orders if order in MISTAKES[name].seen_in] for name in mistakes}
    expected = [f"{name}, {order}: seen" for name, found in due.items() for order in found[:1]]
    expected += [f"parity, {order}: right" for order in orders]
    assert [line for line in expected if line not in shown] == []


def _launched(
    name: str, tmp_path: Path, module: Sequence[str] = (), num_ranks: int = 2, last: str | None = None
) -> str:
    """What rank 0 says of a case.

    Args:
        name: of the case.
        tmp_path: for logs, and for what it saves.
        module: what is run, with its arguments; by default on a GPU.
        num_ranks: how many processes.
        last: what the lines begin with that are given back; by default the name.
    """
    words = ["-m", *(module or ("tests.gpu.cases", name)), *_folder(name, tmp_path)]
    text = _ranks(words, tmp_path, num_ranks, is_late=bool(module))
    return "\n".join(line for line in text.splitlines() if line.startswith(name if last is None else last))


def _ranks(words: Sequence[str], tmp_path: Path, num_ranks: int, is_late: bool = False) -> str:
    """What rank 0 says of a program, of a process a rank: each is on a GPU of its own, or all are on the one there is.

    Args:
        words: for Python.
        tmp_path: for logs.
        num_ranks: how many processes.
        is_late: on the late device, which has two a host.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shares = torch.cuda.device_count() < num_ranks and not is_late
    ranks, logs = [], [tmp_path / f"rank{rank}" for rank in range(num_ranks)]
    environment = {key: value for key, value in ENVIRONMENT.items() if key not in _DROPPED}
    for rank, log in enumerate(logs):
        own = environment | {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": "0" if shares else str(rank % 2 if is_late else rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if shares:
            own |= ON_ONE_DEVICE | {"NCCL_HOSTID": f"host{rank}"}
        elif is_late:
            own["NCCL_HOSTID"] = f"host{rank // 2}"
        with log.open("wb") as output:
            ranks.append(subprocess.Popen([sys.executable, *words], env=own, stdout=output, stderr=subprocess.STDOUT))
    try:
        deadline = time.monotonic() + _LIMIT_S
        while any(each.poll() is None for each in ranks) and time.monotonic() < deadline:
            if any(each.returncode for each in ranks):
                deadline = min(deadline, time.monotonic() + 10)  # the others may have something to say, too
            time.sleep(0.1)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    texts = [log.read_text(errors="replace") for log in logs]
    assert [each.returncode for each in ranks] == [0] * num_ranks, "\n---\n".join(text[-4000:] for text in texts)
    return texts[0]
