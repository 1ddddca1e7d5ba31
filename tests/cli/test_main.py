"""The command line, run as a user runs it, on checkpoints made without training."""

from __future__ import annotations

import errno
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from hf_zero.checkpoint.files import disk
from hf_zero.checkpoint.files.manifest import MANIFEST, Manifest, extents_of, record_of
from hf_zero.checkpoint.offline import export as offline
from hf_zero.cli import main as cli
from hf_zero.errors import CheckpointError
from tests.models import CASES, make_model

_ROOT = Path(__file__).resolve().parents[2]
INDEX = "model.safetensors.index.json"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "chat_template.jinja",
)
STATE = (
    "optimizer.safetensors", "optimizer.json", "scheduler.pt", "scaler.pt", "rng_state_0.pth", "trainer_state.json",
    "training_args.bin", "data_order.json", "random_states_0.pkl", "custom_checkpoint_0.pkl", "model_1.safetensors",
    MANIFEST,
)  # fmt: skip


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command: its exit code, stdout and stderr."""

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def describe(folder: Path, step: int) -> None:
    """Give a folder the manifest that a save ends with."""
    files = {path.name: record_of(path, extents_of(path)) for path in folder.iterdir() if path.name != MANIFEST}
    manifest = Manifest(step, 4, 3, 32, {}, {"hf_zero": "0.1.0", "torch": "2.12.1"}, files)
    (folder / MANIFEST).write_text(manifest.to_json())


def make_checkpoint(folder: Path, model: nn.Module, step: int = 4, **options: object) -> Path:
    """A folder with all that a checkpoint of the Trainer holds."""
    model.save_pretrained(folder, **options)
    states = {f"{name}.exp_avg": torch.zeros_like(param) for name, param in model.named_parameters()}
    save_file(states, folder / "optimizer.safetensors", {"format": "pt"})
    shutil.copy(folder / "optimizer.safetensors", folder / "model_1.safetensors")
    for name in (*TOKENIZER, *STATE[1:-2]):
        (folder / name).write_text(json.dumps(name))
    describe(folder, step)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of llama, gpt2 (tied) and mixtral; not to be changed."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("llama", "gpt2", "mixtral"):
        make_checkpoint(folder / name, make_model(CASES[name]))
    return folder


@pytest.fixture
def checkpoint(checkpoints: Path, tmp_path: Path) -> Path:
    """A checkpoint of llama that a test may damage."""
    return Path(shutil.copytree(checkpoints / "llama", tmp_path / "checkpoint-4"))


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


# ---- the command itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["export", "--help"], ["--version"], ["verify"]])
def test_help_and_usage_do_not_load_torch(words: list[str]) -> None:
    heavy = "{'torch', 'transformers', 'accelerate', 'yaml', 'numpy'}"
    code = (
        "import sys\nfrom hf_zero.cli.main import main\n"
        f"try:\n    main({words})\nfinally:\n    print('HEAVY', *sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=_ROOT)
    assert done.stdout.splitlines()[-1] == "HEAVY"
    assert done.returncode == (2 if words == ["verify"] else 0)


def test_the_command_is_installed_under_its_name() -> None:
    import tomllib

    scripts = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"hf-zero": "hf_zero.cli.main:main"}


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["inspect"],
        ["dance", "a"],
        ["export", "a", "b", "--dtype", "int8"],
        ["export", "a", "b", "--max-shard-size", "5XB"],
        ["export", "a", "b", "--max-shard-size", "0GB"],
        ["import", "megatron", "a", "b"],
    ],
)
def test_wrong_usage_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: hf-zero" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5mb", 1_500_000), (" 20 KB", 20_000), ("77", 77), ("9B", 9)]
)
def test_sizes_count_as_save_pretrained_does(text: str, size: int) -> None:
    assert cli._size(text) == size


# ---- export ---------------------------------------------------------------------------------------------------------


def assert_same_folder(ours: Path, plain: Path) -> None:
    """Beside the tokenizer, `ours` has the files of `plain`, weights and headers bit by bit."""
    names = sorted(path.name for path in plain.iterdir())
    assert sorted(path.name for path in ours.iterdir() if path.name not in TOKENIZER) == names
    for name in names:
        left, right = (ours / name).read_bytes(), (plain / name).read_bytes()
        assert left == right if name.endswith(".safetensors") else json.loads(left) == json.loads(right), name


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("limit", ["7KB", "5GB"])
@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
def test_export_is_what_save_pretrained_writes(
    case: str, limit: str, dtype: str | None, checkpoints: Path, tmp_path: Path, run: Run
) -> None:
    out, plain = tmp_path / "out", tmp_path / "plain"
    options = ["--max-shard-size", limit, *([] if dtype is None else ["--dtype", dtype])]
    code, text, err = run("export", checkpoints / case, out, *options)
    assert (code, err) == (0, "")
    assert "read again and equal" in text
    model = make_model(CASES[case])
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    model.save_pretrained(plain, max_shard_size=limit)
    assert (plain / INDEX).exists() == (limit == "7KB")
    assert_same_folder(out, plain)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    assert loaded.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value), name


def test_export_leaves_the_training_behind_and_takes_the_tokenizer(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    (checkpoint / MANIFEST).unlink()  # a folder within is not a checkpoint's
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (checkpoint / "runs").mkdir()
    code, text, _ = run("export", checkpoint, tmp_path / "out")
    assert code == 0
    assert "has no manifest" in text
    found = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert found == sorted(
        [*TOKENIZER, "additional_chat_templates", "config.json", "generation_config.json", "model.safetensors"]
    )
    for name in (*TOKENIZER, "additional_chat_templates/tools.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()


def test_export_of_an_export_with_other_files_and_dtypes_is_again_the_models(tmp_path: Path, run: Run) -> None:
    """Several dtypes in one model; the source is divided already, in another way."""
    model = make_model(CASES["mixtral"]).to(torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.gate.float()
        layer.input_layernorm.float()
    source = make_checkpoint(tmp_path / "source", model, max_shard_size="11KB")
    model.save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    assert run("export", source, tmp_path / "out", "--max-shard-size", "20KB")[0] == 0
    assert_same_folder(tmp_path / "out", tmp_path / "plain")
    assert {value.dtype for value in load_file(tmp_path / "out" / "model-00001-of-00003.safetensors").values()} == {
        torch.float32,
        torch.bfloat16,
    }


@pytest.mark.parametrize("architecture", ["NobodysModel", "BertForSequenceClassification", "LlamaModel"])
def test_export_of_an_unknown_model_divides_in_the_order_of_the_files(
    architecture: str, checkpoint: Path, tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    describe(checkpoint, 4)
    assert run("export", checkpoint, tmp_path / "out", "--max-shard-size", "9KB")[0] == 0
    assert "in the order of their files" in caplog.text
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    expected = load_file(checkpoint / "model.safetensors")
    assert index["metadata"] == {"total_size": sum(value.nbytes for value in expected.values())}
    assert index["weight_map"].keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(load_file(tmp_path / "out" / index["weight_map"][name])[name], value)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 3
    assert all(sum(value.nbytes for value in load_file(path).values()) <= 9000 for path in files)


def test_export_passes_rows_through_bounded_chunks(
    checkpoints: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, write_at = [], disk.write_at

    def noted(fd: int, path: Path, data: memoryview, offset: int) -> None:
        sizes.append(len(data))
        write_at(fd, path, data, offset)

    monkeypatch.setattr(disk, "write_at", noted)
    monkeypatch.setattr(offline, "CHUNK_BYTES", 100)  # divides neither rows nor tensors
    for dtype in ("float32", "bfloat16"):
        code, _, _ = run("export", checkpoints / "llama", tmp_path / dtype, "--dtype", dtype)
        assert code == 0
        make_model(CASES["llama"]).to(getattr(torch, dtype)).save_pretrained(tmp_path / f"plain_{dtype}")
        assert_same_folder(tmp_path / dtype, tmp_path / f"plain_{dtype}")
    assert max(sizes) == 100
    assert len(sizes) > 300


def test_values_that_float16_cannot_hold_are_named(tmp_path: Path, run: Run) -> None:
    model = make_model(CASES["llama"])
    with torch.no_grad():
        model.lm_head.weight[3, 2] = 1e5
        model.model.norm.weight[1] = torch.inf
    source = make_checkpoint(tmp_path / "source", model)
    code, _, err = run("export", source, tmp_path / "out", "--dtype", "float16")
    assert code == 0
    assert "1 tensor became partly infinite in float16, like 'lm_head.weight'" in err
    assert run("export", source, tmp_path / "out2", "--dtype", "bfloat16")[2] == ""


def test_quantised_weights_are_not_cast(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    describe(checkpoint, 4)
    code, _, err = run("export", checkpoint, tmp_path / "out", "--dtype", "bfloat16")
    assert (code, "quantised weights, like 'lm_head.weight'" in err) == (1, True)
    assert run("export", checkpoint, tmp_path / "out")[0] == 0


# ---- what export refuses --------------------------------------------------------------------------------------------


def assert_refused(result: tuple[int, str, str], tmp_path: Path, *words: str) -> None:
    """Exit code 1, one line that has these words, and nothing left behind."""
    code, out, err = result
    assert (code, out) == (1, "")
    assert err.startswith("hf-zero: ")
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_out_that_exists_is_left_alone(checkpoints: Path, tmp_path: Path, run: Run) -> None:
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "mine").write_text("mine")
    file.write_text("mine")
    source = checkpoints / "llama"
    assert_refused(run("export", source, full), tmp_path, "full exists and is not empty")
    assert_refused(run("export", source, file), tmp_path, "file exists and is not a folder")
    assert_refused(run("export", source, source / "out"), tmp_path, "lies in")
    assert_refused(run("export", source, source), tmp_path, "not empty")
    assert [path.name for path in full.iterdir()] == ["mine"]
    assert file.read_text() == "mine"
    assert offline.check(source).problems == ()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run("export", source, empty)[0] == 0
    assert (empty / "model.safetensors").exists()


def test_an_error_of_several_lines_is_printed_as_one(
    checkpoints: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(what: str, path: Path) -> None:
        raise CheckpointError("first\n  second")

    monkeypatch.setattr(disk, "on_change", fail)
    assert_refused(run("export", checkpoints / "llama", tmp_path / "out"), tmp_path, "first second")


def test_source_that_is_not_there_is_named(tmp_path: Path, run: Run) -> None:
    assert_refused(run("export", tmp_path / "none", tmp_path / "out"), tmp_path, "none is not a folder")
    (tmp_path / "bare").mkdir()
    assert_refused(run("export", tmp_path / "bare", tmp_path / "out"), tmp_path, "has no model.safetensors")
    assert_refused(run("inspect", tmp_path / "bare"), tmp_path, "has neither safetensors files nor")


def no_bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


DAMAGES = {
    "bit": (lambda folder: flip(folder / "model.safetensors", 9000), "model.safetensors was altered between bytes"),
    "header": (lambda folder: flip(folder / "model.safetensors", 40), "model.safetensors was altered between bytes"),
    "manifest": (lambda folder: flip(folder / MANIFEST, 200), f"{MANIFEST} is damaged"),
    "missing": (lambda folder: (folder / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    "truncated": (lambda folder: no_bytes(folder / "model.safetensors"), "model.safetensors has"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_by_every_command(name: str, checkpoint: Path, tmp_path: Path, run: Run) -> None:
    assert run("verify", checkpoint)[0] == 0
    harm, words = DAMAGES[name]
    harm(checkpoint)
    code, out, err = run("verify", checkpoint)
    assert (code, err) == (1, "")
    assert len(out.splitlines()) == 1
    assert words in out
    assert_refused(run("export", checkpoint, tmp_path / "out"), tmp_path, words)
    code, out, _ = run("inspect", checkpoint)
    assert (code, "DAMAGED" in out, words in out) == (1, True, True)
    if name in ("missing", "truncated", "manifest"):  # found without reading the files
        assert run("inspect", checkpoint, "--no-verify")[0] == 1


def test_verify_has_a_line_for_each_problem(checkpoint: Path, run: Run) -> None:
    for name in ("bit", "missing"):
        DAMAGES[name][0](checkpoint)
    _, out, _ = run("verify", checkpoint)
    lines = out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{checkpoint}/") for line in lines)


def split_source(tmp_path: Path) -> Path:
    """A folder of several files of weights, without a manifest."""
    make_model(CASES["llama"]).save_pretrained(tmp_path / "source", max_shard_size="9KB")
    return tmp_path / "source"


def test_plain_folder_of_several_files_is_exported_into_one(tmp_path: Path, run: Run) -> None:
    assert run("export", split_source(tmp_path), tmp_path / "out")[0] == 0
    make_model(CASES["llama"]).save_pretrained(tmp_path / "plain")
    assert_same_folder(tmp_path / "out", tmp_path / "plain")


@pytest.mark.parametrize("target", ["../secret.safetensors", "/secret.safetensors", "sub/x.safetensors", ".."])
def test_index_whose_names_leave_the_folder_is_refused(target: str, tmp_path: Path, run: Run) -> None:
    source = split_source(tmp_path)
    shutil.copy(source / "model-00001-of-00003.safetensors", tmp_path / "secret.safetensors")
    index = json.loads((source / INDEX).read_text())
    index["weight_map"] = {
        name: file.replace("model-00001-of-00003.safetensors", target) for name, file in index["weight_map"].items()
    }
    (source / INDEX).write_text(json.dumps(index))
    assert_refused(run("export", source, tmp_path / "out"), tmp_path, "leaves the folder", target)
    code, out, _ = run("inspect", source)
    assert (code, "leaves the folder" in out) == (1, True)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "additional_chat_templates"])
def test_links_out_of_the_folder_are_refused(name: str, checkpoint: Path, tmp_path: Path, run: Run) -> None:
    (checkpoint / MANIFEST).unlink()
    if name == "additional_chat_templates":
        (tmp_path / "elsewhere").mkdir()
    else:
        (checkpoint / name).rename(tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    assert_refused(run("export", checkpoint, tmp_path / "out"), tmp_path, name, "symbolic link")


def test_index_and_files_that_disagree_are_refused(tmp_path: Path, run: Run) -> None:
    source = split_source(tmp_path)
    first, second = (source / f"model-0000{number}-of-00003.safetensors" for number in (1, 2))
    name = next(iter(load_file(first)))
    text = (source / INDEX).read_text()
    index = json.loads(text)
    index["weight_map"][name] = second.name
    (source / INDEX).write_text(json.dumps(index))
    assert_refused(run("export", source, tmp_path / "out"), tmp_path, repr(name), "should be in")
    (source / INDEX).write_text(text)
    save_file({**load_file(second), name: torch.zeros(2)}, second, {"format": "pt"})
    assert_refused(run("export", source, tmp_path / "out"), tmp_path, repr(name), f"and in {second.name}")
    second.unlink()
    assert_refused(run("export", source, tmp_path / "out"), tmp_path, f"{second.name} is missing")


# ---- failures while exporting ---------------------------------------------------------------------------------------


def test_a_disk_that_fails_at_any_change_leaves_no_export(
    checkpoints: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("export", checkpoints / "llama", tmp_path / "out", "--max-shard-size", "9KB")
    kinds: list[str] = []
    monkeypatch.setattr(disk, "on_change", lambda what, path: kinds.append(what))
    assert run(*words)[0] == 0
    assert {"make_folder", "write_file", "write_at", "sync_rows", "sync_file", "sync_folder", "rename"} == set(kinds)
    shutil.rmtree(tmp_path / "out")
    for number in range(kinds.index("rename") + 1):
        count = 0

        def fail(what: str, path: Path, number: int = number) -> None:
            nonlocal count
            count += 1
            if count > number and what != "remove_tree":
                raise OSError(errno.ENOSPC, "No space left on device", str(path))

        monkeypatch.setattr(disk, "on_change", fail)
        assert_refused(run(*words), tmp_path, "No space left on device")
    monkeypatch.setattr(disk, "on_change", None)
    assert run(*words)[0] == 0


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("at", [-5, 20])
def test_what_was_written_is_read_again_before_it_gets_its_name(
    file: str, at: int, checkpoints: Path, tmp_path: Path, run: Run, monkeypatch
) -> None:
    def harm(what: str, path: Path) -> None:
        if what == "sync_folder" and (path / file).exists():
            flip(path / file, min(at, (path / file).stat().st_size - 1))

    monkeypatch.setattr(disk, "on_change", harm)
    result = run("export", checkpoints / "llama", tmp_path / "out", "--dtype", "bfloat16")
    assert_refused(result, tmp_path, file, "")


def test_what_an_earlier_export_left_is_replaced(checkpoints: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / ".out.staged").mkdir()
    (tmp_path / ".out.staged" / "half").write_text("")
    assert run("export", checkpoints / "llama", tmp_path / "out")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert not (tmp_path / "out" / "half").exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_on_a_terminal_only(
    checkpoints: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("export", checkpoints / "llama", tmp_path / "out")[2] == ""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert cli.main(["export", str(checkpoints / "llama"), str(tmp_path / "drawn"), "--dtype", "bfloat16"]) == 0
    lines = terminal.getvalue().split("\n")
    assert [line.rsplit("\r", 1)[-1].split()[0] for line in lines if line] == ["verifying", "writing", "comparing"]
    assert lines[1].endswith(f"[{'#' * 30}] 100% of 11.0 KB")
    assert "\r" in lines[1][1:]


# ---- verify and inspect ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["checkpoint-", "checkpoint_"])
def test_verify_lists_the_checkpoints_of_a_run(name: str, checkpoints: Path, tmp_path: Path, run: Run) -> None:
    for step in (2, 10, 9):
        shutil.copytree(checkpoints / "llama", tmp_path / f"{name}{step}")
        describe(tmp_path / f"{name}{step}", step)
    (tmp_path / "runs").mkdir()
    code, out, _ = run("verify", tmp_path)
    assert code == 0
    assert [line.partition(":")[0] for line in out.splitlines()] == [
        f"{tmp_path}/{name}2 is whole",
        f"{tmp_path}/{name}9 is whole",
        f"{tmp_path}/{name}10 is whole",
        "newest valid checkpoint",
    ]
    flip(tmp_path / f"{name}10" / "optimizer.safetensors", -1)
    code, out, _ = run("verify", tmp_path)
    assert code == 1
    assert f"{name}10/optimizer.safetensors was altered" in out
    assert out.splitlines()[-1] == f"newest valid checkpoint: {tmp_path}/{name}9"
    for step in (2, 9):
        (tmp_path / f"{name}{step}" / MANIFEST).unlink()
    code, out, _ = run("verify", tmp_path)
    assert (code, out.splitlines()[-1]) == (1, f"{tmp_path} has no valid checkpoint")
    code, _, err = run("inspect", tmp_path)
    assert (code, "is a run, not a checkpoint" in err) == (1, True)


def test_verify_of_no_checkpoint_says_so(tmp_path: Path, run: Run) -> None:
    code, out, err = run("verify", tmp_path / "none")
    assert (code, err) == (1, "")
    assert "there is no such folder" in out and "take an older checkpoint" not in out


def test_inspect_shows_a_checkpoint(checkpoints: Path, run: Run) -> None:
    folder = checkpoints / "gpt2"
    code, out, err = run("inspect", folder)
    assert (code, err) == (0, "")
    facts = dict(line.strip().split("  ", 1) for line in out.splitlines()[1:7])
    assert {name: value.strip() for name, value in facts.items()} == {
        "step": "4",
        "world size": "4 ranks",
        "ZeRO stage": "3",
        "global batch": "32 samples a step",
        "written with": "hf_zero 0.1.0, torch 2.12.1",
        "health": "whole: every byte of 20 files is as it was written",
    }
    table = {tuple(line.split()) for line in out.splitlines()}
    for path in folder.iterdir():
        assert (path.name, f"{path.stat().st_size:,}") in table
    assert ("total", f"{sum(path.stat().st_size for path in folder.iterdir()):,}") in table
    weights = load_file(folder / "model.safetensors")
    numel = sum(value.numel() for value in weights.values())
    for group in ("model", "optimizer"):
        assert (group, "float32", str(len(weights)), f"{numel:,}", f"{4 * numel:,}") in table
    assert "wte" not in out


def test_inspect_without_verification_says_so(checkpoint: Path, run: Run) -> None:
    flip(checkpoint / "model.safetensors", -1)
    code, out, _ = run("inspect", checkpoint, "--no-verify")
    assert (code, "not verified (--no-verify)" in out, "whole" in out) == (0, True, False)


def test_inspect_lists_tensors_of_a_plain_folder(tmp_path: Path, run: Run) -> None:
    save_file({"a.weight": torch.zeros(3, 5), "b": torch.tensor(2)}, tmp_path / "some.safetensors")
    code, out, _ = run("inspect", tmp_path, "--tensors")
    assert code == 0
    assert "there is no manifest, so nothing was verified" in out
    assert "step" not in out
    rows = [line.split() for line in out.splitlines()]
    assert ["some.safetensors", "a.weight", "float32", "3", "x", "5", "60"] in rows
    assert ["some.safetensors", "b", "int64", "scalar", "8"] in rows
    no_bytes(tmp_path / "some.safetensors")
    code, out, _ = run("inspect", tmp_path)
    assert (code, "some.safetensors is damaged" in out) == (1, True)


def test_inspect_counts_the_files_of_one_model_together(tmp_path: Path, run: Run) -> None:
    source = split_source(tmp_path)
    (source / "broken.safetensors").write_text("no")
    code, out, _ = run("inspect", source)
    assert (code, "broken.safetensors is damaged" in out) == (1, True)
    assert ["model", "float32", "21", "5,488", "21,952"] in [line.split() for line in out.splitlines()]


# ---- import ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["deepspeed", "dcp"])
@pytest.mark.parametrize("allowed", [False, True])
def test_import_passes_its_words_on(kind: str, allowed: bool, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def reader(name: str):
        def read(folder: Path, out: Path, allow_pickle: bool) -> Path:
            calls.append((name, folder, out, allow_pickle))
            return out / "checkpoint-7"

        return read

    stub = ModuleType("hf_zero.checkpoint.importing.convert")
    stub.import_deepspeed, stub.import_dcp = reader("deepspeed"), reader("dcp")
    monkeypatch.setitem(sys.modules, "hf_zero.checkpoint.importing.convert", stub)
    code, out, _ = run("import", kind, "from", "to", *(["--allow-pickle"] if allowed else []))
    assert calls == [(kind, Path("from"), Path("to"), allowed)]
    assert (code, out) == (0, "imported into to/checkpoint-7\n")
