"""Scripts that know nothing of hf_zero train under it: the launcher, `hf_zero.run`, `with_zero`, `hf-zero config`."""

import contextlib
import io
import json
import os
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Seq2SeqTrainingArguments, TrainingArguments

import hf_zero as zero
from hf_zero import run
from hf_zero.cli import configure
from hf_zero.cli import main as cli
from hf_zero.comm.exchange import named
from hf_zero.engine import engine
from hf_zero.integrations import everywhere
from tests.integrations.trainer.runs import undone
from tests.ranks import ENVIRONMENT, alone, on_ranks, run_alone

TRAINER = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Seq2SeqTrainingArguments, Trainer

args = Seq2SeqTrainingArguments(sys.argv[1], max_steps=3, per_device_train_batch_size=2, report_to=[], logging_steps=1,
    save_strategy="no", use_cpu=True, disable_tqdm=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
shape = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**shape))
generator = torch.Generator().manual_seed(0)
data = [{"input_ids": (x := torch.randint(0, 64, (8,), generator=generator)), "labels": x} for _ in range(32)]
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train()
if args.process_index == 0:
    kind = type(next(trainer.model.parameters())).__name__
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("found", json.dumps([args.world_size, kind, losses]))
"""

# The main thread gives way to no other of Python, as when it runs C code, while one of gloo lets go of a tensor.
ENDING = """
import sys
sys.setswitchinterval(100)
torch.distributed.all_reduce(torch.ones(4))
"""

ACCELERATE = """
import json, torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(64, 4)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for features, labels in loader:
    loss = (model(features) - labels).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(accelerator.reduce(loss.detach(), "mean")))
if accelerator.is_main_process:
    kind = type(next(model.parameters())).__name__
    print("found", json.dumps([accelerator.num_processes, kind, losses]))
"""


def _run(*command: str, cwd: Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout)


def _found(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.returncode == 0, result.stdout + result.stderr
    line = next(line for line in result.stdout.splitlines() if line.startswith("found "))
    return json.loads(line.removeprefix("found "))


@pytest.mark.slow  # tests/test_two_hosts.py launches a plain script of the Trainer every day
@pytest.mark.parametrize("name", ["trainer", "accelerate"])
def test_unchanged_scripts_train_under_the_launcher_as_under_ddp(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text({"trainer": TRAINER, "accelerate": ACCELERATE}[name])
    (tmp_path / "zero.yaml").write_text("stage: 3\n")
    launcher = [sys.executable, "-m", "hf_zero.cli.main", "launch", "--num_processes", "2", "--zero", "zero.yaml"]
    (tmp_path / "ours.py").write_text((tmp_path / "script.py").read_text() + ENDING)
    ours = _found(_run(*launcher, "ours.py", "out", cwd=tmp_path))
    plain = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    theirs = _found(_run(*plain, "script.py", "out", cwd=tmp_path))
    assert ours[:2] == [2, "PartitionedTensor"] and theirs[:2] == [2, "Parameter"]
    assert ours[2] == pytest.approx(theirs[2], abs=2e-4)  # the Trainer rounds what it logs


def _launched(axis: str, way: str, cwd: Path) -> tuple[list[str], str]:
    """The launcher of two ranks and the script, which hears of an axis in one of the ways that there are."""
    script, (root, ours) = TRAINER, (Path(zero.__file__).parents[1], "zero.yaml")
    accelerate = ["-m", "accelerate.commands.launch", "--config_file"]
    accelerated, run_ours = str(root / "configs/accelerate/cpu2.yaml"), ["-m", "hf_zero.run", "--zero", ours]
    (cwd / ours).write_text("stage: 3\n" + (f"{axis}: 2\n" if way == "zero" else ""))
    if way == "zero":
        return ["-m", "hf_zero.cli.main", "launch", "--num_processes", "2", "--zero", ours], script
    asks = f"gradient_accumulation_steps=2, parallelism_config=ParallelismConfig({axis}=2))"
    script = "from accelerate import ParallelismConfig\n" + script.replace("gradient_accumulation_steps=2)", asks)
    return [*accelerate, accelerated, *run_ours], script


@pytest.mark.slow
@pytest.mark.parametrize("way", ["zero", "script"])
@pytest.mark.parametrize("axis", ["sp_size", "cp_size"])
def test_launched_scripts_share_sequences_and_train_as_one_process(axis: str, way: str, tmp_path: Path) -> None:
    launcher, script = _launched(axis, way, tmp_path)
    for name, text in (("script.py", script), ("plain.py", TRAINER)):
        (tmp_path / name).write_text(text)
    ours = _run(sys.executable, *launcher, "script.py", "out", cwd=tmp_path, timeout=200)
    theirs = _found(_run(sys.executable, "plain.py", "one", cwd=tmp_path, timeout=200))
    assert "each sequence over 2 ranks" in ours.stderr, ours.stderr
    assert _found(ours)[:2] == [2, "PartitionedTensor"] and theirs[:2] == [1, "Parameter"]
    assert _found(ours)[2] == pytest.approx(theirs[2], rel=1e-6)


@undone
def _train_where_hf_zero_is_new(folder: str) -> tuple[str, str]:
    """What the script prints, and what it writes to stderr, where nothing has imported hf_zero before it."""
    os.chdir(folder)
    os.environ["HF_ZERO_CONFIG"] = '{"stage": 3}'
    imported = sys.modules.pop("hf_zero")
    try:
        with (
            mock.patch.object(sys, "argv", ["script.py", "out"]),
            contextlib.redirect_stdout(io.StringIO()) as printed,
            contextlib.redirect_stderr(io.StringIO()) as said,
        ):
            runpy.run_path("script.py", run_name="__main__")
    finally:
        sys.modules["hf_zero"] = imported
    return printed.getvalue(), said.getvalue()


def test_importing_hf_zero_switches_on_what_the_environment_names(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import hf_zero\n" + TRAINER)
    printed, said = run_alone(_train_where_hf_zero_is_new, str(tmp_path))
    assert "hf_zero: stage 3, world size 1, exchange none (one process)" in said, said
    assert "hf_zero, after 3 steps: " in said
    assert "found [1, " in printed


@pytest.mark.slow
@pytest.mark.parametrize("place", ["top", "late"])
def test_importing_hf_zero_in_a_new_process_switches_on_or_says_that_it_is_late(place: str, tmp_path: Path) -> None:
    before, after = TRAINER.split("torch.manual_seed(0)", 1)
    script = "import hf_zero\n" + TRAINER if place == "top" else f"{before}import hf_zero\ntorch.manual_seed(0){after}"
    (tmp_path / "script.py").write_text(script)
    environment = {**ENVIRONMENT, "HF_ZERO_CONFIG": '{"stage": 3}'}
    result = subprocess.run(
        [sys.executable, "script.py", "out"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    if place == "top":
        assert "hf_zero: stage 3, world size 1, exchange none (one process)" in result.stderr, result.stderr
        assert "hf_zero, after 3 steps: " in result.stderr
        assert _found(result)[0] == 1
    else:
        assert (
            result.returncode == 1 and "Seq2SeqTrainingArguments was made before hf_zero was imported" in result.stderr
        )


def _make_an_accelerator_of_its_own() -> str:
    from accelerate import Accelerator

    from hf_zero.integrations import everywhere

    class Mine(Accelerator):
        pass

    class Ours(zero.ZeroAccelerator):
        pass

    os.environ["HF_ZERO_CONFIG"] = '{"stage": 3}'
    everywhere.switch_on()
    try:
        assert Ours(cpu=True).zero_plugin.config.stage == 3
        Mine(cpu=True)
    except zero.UsageError as error:
        return str(error)
    finally:
        zero.undo()
    return ""


def test_an_accelerator_that_would_train_without_zero_is_refused() -> None:
    assert "Mine is an Accelerator of its own" in run_alone(_make_an_accelerator_of_its_own)


@on_ranks(2)
def test_a_script_that_wraps_its_model_in_ddp_hears_of_it_at_once() -> None:
    os.environ["HF_ZERO_CONFIG"] = '{"stage": 3}'
    everywhere.switch_on()
    try:
        with mock.patch.object(engine, "number_of_engines", lambda: 0):
            with pytest.raises(zero.UsageError, match="DistributedDataParallel wraps Linear"):
                DistributedDataParallel(torch.nn.Linear(2, 2))
            DistributedDataParallel(zero.leave_whole(torch.nn.Linear(2, 2)))
        with mock.patch.object(engine, "number_of_engines", lambda: 1):
            DistributedDataParallel(torch.nn.Linear(2, 2))
    finally:
        zero.undo()


@undone
def _run_idle(folder: str) -> str:
    """What a script prints that makes nothing, before the error that follows."""
    os.chdir(folder)
    made = engine.number_of_engines()  # by other tests in this process
    with (
        mock.patch.object(sys, "argv", [""]),
        mock.patch.object(sys, "path", [*sys.path]),
        mock.patch.object(engine, "number_of_engines", lambda: len(engine._numbers) - made),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        pytest.raises(zero.UsageError, match="has partitioned no model"),
    ):
        run.main(["--zero", '{"stage": 3}', "idle.py", "--lr", "1"])
    return printed.getvalue()


def test_a_script_that_partitions_nothing_ends_in_an_error(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("import sys\nprint(sys.argv)\nsys.exit(0)")
    assert "['idle.py', '--lr', '1']" in run_alone(_run_idle, str(tmp_path))
    with pytest.raises(zero.ConfigError, match="2 processes were asked for, but 1 run"):
        run.main(["--expect", "2", "idle.py"])


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["script.py"], "launch needs --zero before the script"),
        (["--zero", "z.yaml", "--use_fsdp", "script.py"], "cannot be combined with FSDP"),
        (["--zero", "z.yaml", "--no_python", "script"], "Python scripts only"),
    ],
)
def test_launch_refuses_what_it_cannot_do(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", *argv]) == 1
    assert text in capsys.readouterr().err


_GLOO = (
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3021",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:3021: Connection reset by peer",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:510] writev [127.0.0.1]:3021: Broken pipe",
)


def _told_of(cause: str) -> tuple[str, str]:
    """What ends a program whose peer is gone: as it comes from gloo, and as an exchange of ours names it."""
    raw = RuntimeError(cause)
    told = []
    for error in (raw, named(raw, "gather of unit 'head'", 1, 9.0)):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                raise error from (None if error is raw else raw)
            except RuntimeError as caught:
                run._tell(type(caught), caught, caught.__traceback__)
        told.append(said.getvalue())
    return told[0], told[1]


def test_a_peers_end_is_one_sentence_whoever_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    for text in _GLOO:
        raw, ours = _told_of(text)
        assert raw == "hf_zero: a peer has ended in the middle of an exchange: its own error says why\n"
        assert ours == "hf_zero: rank 0 lost rank 1 in gather of unit 'head': its own error says why\n"


def test_a_transports_error_stands_not_beside_ours_that_quotes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    text = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 9000ms for recv operation"
    raw, ours = _told_of(text)
    assert f"RuntimeError: {text}" in raw
    assert ours.count(text) == 1 and "rank 0 waited 9 s for rank 1 in gather of unit 'head'" in ours
    assert "RuntimeError: [" not in ours and "direct cause" not in ours


@alone()
def test_a_script_that_asks_for_the_module_in_ddp_hears_where_it_is() -> None:
    def told_of(model: nn.Module) -> str:
        with pytest.raises(AttributeError) as caught:
            _ = model.module
        with contextlib.redirect_stderr(io.StringIO()) as told:
            run._tell(AttributeError, caught.value, None)
        return told.getvalue()

    model = nn.Linear(2, 2)
    assert "hf_zero" not in told_of(model)
    zero.shard_model(model, {"stage": 3})
    assert "what is model.module under DDP is model itself here" in told_of(model)


# --- arguments of any class -----------------------------------------------------------------------------------------


def test_with_zero_of_the_plain_arguments_is_zero_training_arguments() -> None:
    assert zero.with_zero(TrainingArguments) is zero.ZeroTrainingArguments


def test_with_zero_keeps_the_defaults_of_a_class_and_pickles(tmp_path: Path) -> None:
    from trl import SFTConfig

    made = zero.with_zero(SFTConfig)(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    assert isinstance(made, SFTConfig) and isinstance(made, zero.ZeroTrainingArguments)
    assert made.learning_rate == SFTConfig(output_dir=str(tmp_path), use_cpu=True).learning_rate != 5e-5
    assert made.zero is None and made.zero_config is None
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is type(made) and again.to_dict() == made.to_dict()
    assert zero.with_zero(zero.ZeroTrainingArguments) is zero.ZeroTrainingArguments
    assert zero.with_zero(SFTConfig) is zero.with_zero(SFTConfig)


def test_bases_in_the_order_that_loses_defaults_are_refused() -> None:
    from trl import SFTConfig

    with pytest.raises(zero.UsageError, match=r"write class Mine\(SFTConfig, ZeroTrainingArguments\)"):
        type("Mine", (zero.ZeroTrainingArguments, SFTConfig), {})
    type("Mine", (SFTConfig, zero.ZeroTrainingArguments), {})
    type("Mine", (zero.ZeroTrainingArguments, Seq2SeqTrainingArguments), {})  # has no defaults to lose
    with pytest.raises(zero.UsageError, match="not derived"):
        zero.with_zero(dict)  # type: ignore[type-var]


def test_deepspeed_without_deepspeed_says_who_takes_its_file(tmp_path: Path) -> None:
    with pytest.raises(zero.ConfigError, match="write zero= in place of deepspeed="):
        zero.ZeroTrainingArguments(str(tmp_path), deepspeed="ds.json", report_to=[])


# --- hf-zero config -------------------------------------------------------------------------------------------------


def test_config_asks_and_writes_what_accelerate_and_we_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    places = ["--out", str(tmp_path / "z.yaml"), "--accelerate", str(tmp_path / "a.yaml")]
    answers = iter(["2", "", "no"])
    args = cli._parser().parse_args(["config", *places])
    assert configure.run(args, ask=lambda question: next(answers)) == 0
    config = zero.ZeroConfig.load(tmp_path / "z.yaml")
    assert (config.stage, config.expected_world_size) == (2, 2)
    accelerate = load_config_from_file(str(tmp_path / "a.yaml"))
    assert (accelerate.num_processes, accelerate.mixed_precision) == (2, "no")
    assert f"--config_file {tmp_path / 'a.yaml'}" in capsys.readouterr().out
    assert cli.main(["config", *places]) == 1 and "exists already" in capsys.readouterr().err
    args = cli._parser().parse_args(
        ["config", "--out", str(tmp_path / "b.yaml"), "--accelerate", str(tmp_path / "c.yaml")]
    )
    with pytest.raises(zero.ConfigError, match="'4' is not one of the choices"):
        configure.run(args, ask=lambda question: "4")


def test_config_translates_a_deepspeed_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "ds.json"
    source.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}))
    assert cli.main(["config", "--from", str(source), "--out", str(tmp_path / "z.yaml")]) == 0
    assert yaml.safe_load((tmp_path / "z.yaml").read_text()) == {"stage": 2}
    out = capsys.readouterr().out
    assert re.search(r"zero_optimization.stage +2 +kept", out) and "--per_device_train_batch_size 4" in out
