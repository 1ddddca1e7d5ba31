"""Checkpoints of DeepSpeed (written here in its layout) and of torch's DCP become ours, bit for bit."""

from __future__ import annotations

import decimal
import enum
import functools
import math
import os
import pickle
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_zero as zero
from hf_zero.checkpoint.commit import verify
from hf_zero.checkpoint.importing.convert import import_dcp, import_deepspeed
from hf_zero.checkpoint.model_state import read_model
from hf_zero.checkpoint.optimizer_state import LoadedState, read_state
from hf_zero.checkpoint.ranks.cooperative import read_files
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.engine.ranks.world import World
from hf_zero.errors import CheckpointError
from tests.integrations.accelerate.loops import logged
from tests.models import CASES, make_model
from tests.ranks import run_ranks

# ---- a model that has been trained ----------------------------------------------------------------------------------


class Odd(nn.Module):
    """Sizes that nothing divides, a tied weight, a scalar, frozen parameters, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.frozen.bfloat16().float()  # values that bfloat16 holds: what is computed with is all that is saved of them
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.frozen(self.norm(self.embedding(ids))) * self.gain)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    trained = [param for param in model.parameters() if param.requires_grad]
    decayed = {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1}
    others = {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0, "lr": 3e-3}
    return torch.optim.AdamW([decayed, others], lr=1e-2)


def trained() -> tuple[Odd, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Odd()
    optimizer = optimizer_of(model)
    for _ in range(3):
        model(torch.randint(7, (6,))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.fixture(params=["by value", "by name"])
def pickled_enums(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enumerations are pickled as Python 3.11.4 and later do it, or as those before (Debian 12 has one)."""

    def reduce(member: enum.Enum, protocol: int) -> tuple[Any, ...]:
        return (
            (type(member), (member.value,)) if request.param == "by value" else (getattr, (type(member), member.name))
        )

    monkeypatch.setattr(enum.Enum, "__reduce_ex__", reduce)


def assert_resumes(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer, fresh: nn.Module) -> None:
    """A fresh model and optimizer take the checkpoint's weights and states, and equal the given ones."""
    verify(out, None)
    again = optimizer_of(fresh)
    read_model(fresh, out, World.create(ZeroConfig(stage=0), torch.device("cpu")))
    plan, sources = LoadedState(read_state(out, "optimizer"), again, fresh).install()
    read_files([file.name for file in plan.files], plan.pieces, sources, out, 0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]), name
    left, right = optimizer.state_dict(), again.state_dict()
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for index, state in left["state"].items():
        assert state.keys() == right["state"][index].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(value, right["state"][index][key]) for key, value in state.items())


# ---- DeepSpeed's layout ---------------------------------------------------------------------------------------------


@contextmanager
def deepspeed_classes() -> Iterator[tuple[Any, Any]]:
    """Within: two classes that are pickled under names of DeepSpeed, which is not installed."""
    names = ["deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", "deepspeed.runtime.zero.config"]
    before = {name: sys.modules.get(name) for name in names}
    try:
        sys.modules.update({name: types.ModuleType(name) for name in names})
        members = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
        stage: Any = enum.IntEnum("ZeroStageEnum", members)
        scaler: Any = type("LossScaler", (), {})
        for kind in (stage, scaler):
            kind.__module__, kind.__qualname__ = names[-1], kind.__name__
            setattr(sys.modules[names[-1]], kind.__name__, kind)
        yield stage, scaler
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def dealt(names: list[str], num_ranks: int) -> list[str]:
    """The order that `round_robin_gradients` makes."""
    return [name for rank in range(num_ranks) for name in names[rank::num_ranks]]


def cut_together(tensors: list[Tensor], num_ranks: int, paddings: list[int]) -> list[Tensor]:
    """One flat buffer, each tensor with its padding, all padded to twice the ranks, in equal parts."""
    ends = [torch.full((padding,), 9.0) for padding in paddings]
    flat = torch.cat(
        [part for pair in zip(tensors, ends, strict=True) for part in (pair[0].detach().reshape(-1), pair[1])]
    )
    padded = torch.cat([flat, torch.full((-flat.numel() % (2 * num_ranks),), 9.0)])
    return [part.clone() for part in padded.chunk(num_ranks)]


def cut_each(tensors: list[Tensor], num_ranks: int) -> list[Tensor]:
    """Every tensor in equal parts, the last padded; each rank's parts one after the other."""
    parts: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    for tensor in tensors:
        flat, size = tensor.detach().reshape(-1), math.ceil(tensor.numel() / num_ranks)
        padded = torch.cat([flat, torch.full((size * num_ranks - flat.numel(),), 9.0, dtype=flat.dtype)])
        for rank, part in enumerate(padded.split(size)):
            parts[rank].append(part.clone())
    return [torch.cat(own) for own in parts]


def write_deepspeed(
    folder: Path,
    stage: int,
    num_ranks: int,
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    *,
    deals: bool = False,
    extra: Any = None,
) -> Path:
    """Write a checkpoint as DeepSpeed lays it out; returns the folder of its files."""
    names = {id(param): name for name, param in model.named_parameters()}
    params = dict(model.named_parameters())
    groups = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    order = [dealt(group, num_ranks) if deals else group for group in groups]
    paddings: list[list[int]] = []
    ranks: list[dict[str, Any]] = [{"masters": [], "states": {}} for _ in range(num_ranks)]
    for index, group in enumerate(order):
        masters = [params[name] for name in group]
        gaps = [-param.numel() % 4 if deals and param is not masters[-1] else 0 for param in masters]
        paddings.append(gaps)
        steps = {"step": optimizer.state[masters[0]]["step"]}
        tensors = {key: [optimizer.state[param][key] for param in masters] for key in ("exp_avg", "exp_avg_sq")}
        whole = sum(param.numel() for param in masters) + sum(gaps)
        size = math.ceil(whole / (2 * num_ranks)) * 2
        for rank, own in enumerate(ranks):
            stop = min(max(whole - rank * size, 0), size) if stage < 3 else None  # masters are saved without padding
            cut = functools.partial(cut_together, paddings=gaps) if stage < 3 else cut_each
            own["masters"].append(cut(masters, num_ranks)[rank][:stop])
            own["states"][index] = steps | {key: cut(values, num_ranks)[rank] for key, values in tensors.items()}
    tag = folder / "global_step3"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    (folder / "trainer_state.json").write_text("{}")
    options = [{**g, "params": [i]} for i, g in enumerate(optimizer.param_groups)]
    config = {"zero_optimization": {"stage": stage, "round_robin_gradients": deals}}
    with deepspeed_classes() as (stages, scaler):
        for rank, own in enumerate(ranks):
            base = {"state": own["states"], "param_groups": options}
            content = {"zero_stage": stages(stage), "loss_scaler": scaler()}
            if stage == 3:
                content |= {
                    "partition_count": num_ranks,
                    "optimizer_state_dict": base,
                    "fp32_flat_groups": own["masters"],
                }
            else:
                count = [num_ranks] * len(groups)
                content |= {"partition_count": count, "base_optimizer_state": base}
                content |= {"single_partition_of_fp32_groups": own["masters"]}
                content |= {"param_alignment_paddings": paddings} if deals else {}
            saved = {"optimizer_state_dict": content, "ds_config": config, "ds_version": "0.19.8"}
            torch.save(saved, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        _write_model_states(
            tag, stage, num_ranks, model, [{n: params[n].shape for n in group} for group in order], extra
        )
    return tag


def _write_model_states(tag: Path, stage: int, num_ranks: int, model: nn.Module, shapes: Any, extra: Any) -> None:
    frozen = {name: param.bfloat16() for name, param in model.named_parameters() if not param.requires_grad}
    buffers = [name for name, _ in model.named_buffers()]
    module = {name: frozen.get(name, value) for name, value in model.state_dict().items()}
    if stage == 3:
        module = {name: value if name in buffers else torch.empty(0) for name, value in module.items()}
    parts = {name: cut_each([value], num_ranks) for name, value in frozen.items()}
    for rank in range(num_ranks if stage == 3 else 1):
        content = {
            "module": module,
            "buffer_names": buffers,
            "param_shapes": shapes,
            "frozen_param_shapes": {name: value.shape for name, value in frozen.items()} if stage > 1 else None,
            "frozen_param_fragments": None,
            "shared_params": {"head.weight": "embedding.weight"},
            "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.5]},
            "global_steps": 3,
            "dp_world_size": num_ranks,
            "mp_world_size": 1,
            "ds_version": "0.19.8",
            "extra": extra,
        }
        if stage > 1:
            fragments = {name: parts[name][rank] if stage == 3 else value for name, value in frozen.items()}
            content["frozen_param_fragments"] = fragments
        name = "mp_rank_00_model_states.pt" if stage < 3 else f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        torch.save(content, tag / name)


@pytest.mark.parametrize(
    ("stage", "num_ranks", "deals"),
    [(1, 1, False), (1, 2, False), (2, 3, True), (2, 16, False), (3, 2, False), (3, 3, False), (3, 16, False)],
)
@pytest.mark.usefixtures("pickled_enums")
def test_deepspeed_checkpoint_resumes_bit_equal(stage: int, num_ranks: int, deals: bool, tmp_path: Path) -> None:
    model, optimizer = trained()
    write_deepspeed(tmp_path / "checkpoint-3", stage, num_ranks, model, optimizer, deals=deals)
    out = import_deepspeed(tmp_path / "checkpoint-3", tmp_path / "out", False)
    manifest = verify(out, None)
    assert (manifest.step, manifest.world_size, manifest.stage) == (3, num_ranks, stage)
    assert (out / "trainer_state.json").read_text() == "{}"
    assert torch.load(out / "scheduler.pt", weights_only=True) == {"last_epoch": 3, "_last_lr": [0.5]}
    assert_resumes(out, model, optimizer, Odd())


def test_deepspeed_folder_of_the_ranks_files_can_be_given(tmp_path: Path) -> None:
    model, optimizer = trained()
    tag = write_deepspeed(tmp_path / "checkpoint-3", 2, 2, model, optimizer)
    out = import_deepspeed(tag, tmp_path / "out", False)
    assert (out / "trainer_state.json").exists()
    assert_resumes(out, model, optimizer, Odd())
    with pytest.raises(CheckpointError, match="is there already"):
        import_deepspeed(tag, out, False)


def _changed(change: Callable[[Any], None], name: str) -> Callable[[Path], None]:
    def apply(tag: Path) -> None:
        with deepspeed_classes():
            content = torch.load(tag / name, weights_only=False)
            change(content)
            torch.save(content, tag / name)

    return apply


_RANK_1, _MODEL_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"


def _zero(content: Any) -> Any:
    return content["optimizer_state_dict"]


def _cut(tag: Path) -> None:
    os.truncate(tag / _RANK_1, (tag / _RANK_1).stat().st_size // 2)


def _shorter(content: Any) -> None:
    _zero(content)["fp32_flat_groups"][0] = _zero(content)["fp32_flat_groups"][0][:-1]


def _other_step(content: Any) -> None:
    for state in _zero(content)["optimizer_state_dict"]["state"].values():
        state["step"] = torch.tensor(4.0)


def _short_state(content: Any) -> None:
    state = _zero(content)["optimizer_state_dict"]["state"][0]
    state["exp_avg"] = state["exp_avg"][:3]


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "rank_missing": (lambda tag: (tag / _RANK_1).unlink(), f"{_RANK_1} is missing: 2 ranks wrote"),
    "model_missing": (lambda tag: (tag / _MODEL_1).unlink(), f"{_MODEL_1} is missing"),
    "rank_too_many": (
        lambda tag: shutil.copy(tag / _RANK_1, tag / _RANK_1.replace("rank_1", "rank_2")) and None,
        "rank_2_mp_rank_00_optim_states.pt is of more than the 2 ranks",
    ),
    "tensor_parallel": (
        lambda tag: shutil.copy(tag / _RANK_1, tag / _RANK_1.replace("mp_rank_00", "mp_rank_01")) and None,
        "tensor, pipeline and expert parallel",
    ),
    "world_size": (_changed(lambda c: _zero(c).update(partition_count=3), _RANK_1), f"{_RANK_1} has number of ranks 3"),
    "model_world_size": (_changed(lambda c: c.update(dp_world_size=3), _MODEL_1), f"{_MODEL_1} has dp_world_size 3"),
    "stage": (_changed(lambda c: _zero(c).update(zero_stage=7), _RANK_1), f"{_RANK_1} is of ZeRO stage 7"),
    "layout": (_changed(lambda c: c.pop("param_shapes"), _MODEL_1), "layout that is not known"),
    "masters": (_changed(_shorter, _RANK_1), f"{_RANK_1}: group 0 holds 17 elements"),
    "state": (_changed(_short_state, _RANK_1), f"{_RANK_1}: 'exp_avg' of 'embedding.weight'"),
    "step": (_changed(_other_step, _RANK_1), f"{_RANK_1} is of step 4"),
    "truncated": (_cut, f"{_RANK_1} is damaged"),
    "latest": (lambda tag: (tag.parent / "latest").unlink(), "give the folder global_stepN"),
    "elsewhere": (lambda tag: (tag.parent / "latest").write_text("../other") and None, "leaves the folder"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_deepspeed_checkpoint_is_named_and_nothing_written(fault: str, tmp_path: Path) -> None:
    tag = write_deepspeed(tmp_path / "checkpoint-3", 3, 2, *trained())
    damage, message = FAULTS[fault]
    damage(tag)
    with pytest.raises(CheckpointError, match=message.replace(".", r"\.")):
        import_deepspeed(tmp_path / "checkpoint-3", tmp_path / "out", False)
    assert os.listdir(tmp_path) == ["checkpoint-3"]


def test_deepspeed_file_with_other_objects_needs_the_flag(tmp_path: Path) -> None:
    model, optimizer = trained()
    write_deepspeed(tmp_path / "checkpoint-3", 2, 2, model, optimizer, extra=decimal.Decimal(3))
    expected = r"mp_rank_00_model_states\.pt is a pickle with decimal\.Decimal: .* runs code .* --allow-pickle"
    with pytest.raises(CheckpointError, match=expected):
        import_deepspeed(tmp_path / "checkpoint-3", tmp_path / "out", False)
    assert os.listdir(tmp_path) == ["checkpoint-3"]
    assert_resumes(import_deepspeed(tmp_path / "checkpoint-3", tmp_path / "out", True), model, optimizer, Odd())


def test_a_source_that_fails_while_it_is_read_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_deepspeed(tmp_path / "checkpoint-3", 2, 2, *trained())

    def fail(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("hf_zero.checkpoint.files.disk.write_at", fail)
    with pytest.raises(CheckpointError, match="no space left"):
        import_deepspeed(tmp_path / "checkpoint-3", tmp_path / "out", False)
    assert os.listdir(tmp_path) == ["checkpoint-3"]


# ---- torch.distributed.checkpoint -----------------------------------------------------------------------------------


def save_sharded(folder: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train a model under FSDP and save it in three forms; returns whole weights and states."""
    model = make_model(CASES["llama"])
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model)
    for step in range(2):
        model(**CASES["llama"].batch(step, 0)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=f"{folder}/nested")
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=flattened)
    dcp.save({"app": {"model": weights, "optim": states}}, checkpoint_id=f"{folder}/flat")
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/accelerate/pytorch_model_fsdp_0")
    states = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": states}, checkpoint_id=f"{folder}/accelerate/optimizer_0")
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return whole[0], whole[1]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("dcp")
    weights, states = run_ranks(save_sharded, 2, str(folder))[0]
    return folder, weights, states


@pytest.mark.parametrize("form", ["nested", "flat", "accelerate"])
def test_sharded_dcp_checkpoint_resumes_bit_equal(form: str, sharded: Any, tmp_path: Path) -> None:
    folder, weights, states = sharded
    out = import_dcp(folder / form, tmp_path / "out", False)
    assert (verify(out, None).step, verify(out, None).world_size) == (2, 2)
    model = make_model(CASES["llama"], seed=1)
    model.load_state_dict(weights)
    optimizer = optimizer_of(model)
    numbers = {name: index for index, name in enumerate(n for group in states["param_groups"] for n in group["params"])}
    for param, name in ((param, name) for name, param in model.named_parameters()):
        optimizer.state[param] = states["state"][name]
    assert len(numbers) == len(optimizer.state)
    assert_resumes(out, model, optimizer, make_model(CASES["llama"], seed=2))


def _go_on(folder: str, weights: dict[str, Tensor]) -> None:
    """Load an import by `load_state`, and take a step as the model that was saved would."""
    for stage in (1, 2, 3):
        oracle = make_model(CASES["llama"], seed=1)
        oracle.load_state_dict(weights)
        optimizer = optimizer_of(oracle)
        read = LoadedState(read_state(Path(folder), "optimizer"), optimizer, oracle)
        plan, sources = read.install()
        read_files([file.name for file in plan.files], plan.pieces, sources, Path(folder), 0)

        accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=stage, collectives="pairwise"))
        model = make_model(CASES["llama"], seed=2)
        model, ours = accelerator.prepare(model, optimizer_of(model))
        ours, _ = accelerator.prepare(ours, torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 1.0))
        accelerator.register_for_checkpointing(torch.nn.Linear(1, 1))
        before = torch.get_rng_state()
        with logged() as lines:
            accelerator.load_state(folder)
        told = [line for line in lines if "was imported: its weights and optimizer states are loaded" in line]
        assert len(told) == (accelerator.process_index == 0)
        assert all("order of data, schedulers and registered objects begin anew" in line for line in told)
        assert torch.equal(torch.get_rng_state(), before)
        for _ in range(2):
            (sum(oracle(**CASES["llama"].batch(5, rank)).loss for rank in range(2)) / 2).backward()
            accelerator.backward(model(**CASES["llama"].batch(5, accelerator.process_index)).loss)
            for each in (optimizer, ours):
                each.step()
                each.zero_grad()
        for name, value in accelerator.get_state_dict(model).items():
            torch.testing.assert_close(value, oracle.state_dict()[name], rtol=0, atol=2e-6)
        accelerator.free_memory()


def test_load_state_goes_on_from_an_import_and_says_what_is_not_in_it(sharded: Any, tmp_path: Path) -> None:
    folder, weights, _ = sharded
    run_ranks(_go_on, 2, str(import_dcp(folder / "nested", tmp_path / "out", False)), weights)


@pytest.mark.usefixtures("pickled_enums")
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_weights_get_the_names_of_save_pretrained(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(CASES[name])
    model.save_pretrained(tmp_path / "expected")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    shutil.copy(tmp_path / "expected" / "config.json", tmp_path / "saved")
    out = import_dcp(tmp_path / "saved", tmp_path / "out", False)
    expected, found = (load_file(folder / "model.safetensors") for folder in (tmp_path / "expected", out))
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[key]) for key, value in expected.items())
    assert "weights alone" in caplog.text
    assert not (out / "optimizer.json").exists()


def _strange_metadata(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data["strange"] = decimal.Decimal(1)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _other_chunk(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    at = {index: info for index, info in metadata.storage_data.items() if "model.norm.weight" in index.fqn}
    (first, *_), wrong = at, next(i for k, i in metadata.storage_data.items() if "lm_head" in k.fqn)
    metadata.storage_data[first] = wrong
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _cut_chunks(folder: Path) -> None:
    os.truncate(folder / "__1_0.distcp", 100)


DCP_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "file_missing": (lambda folder: (folder / "__0_0.distcp").unlink(), r"__0_0\.distcp is missing"),
    "truncated": (_cut_chunks, r"__1_0\.distcp ends before .*truncated"),
    "metadata_missing": (lambda folder: (folder / ".metadata").unlink(), r"has no \.metadata"),
    "metadata_damaged": (
        lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04]") and None,
        "metadata is damaged",
    ),
    "pickle": (_strange_metadata, r"metadata is a pickle with decimal\.Decimal: .* --allow-pickle"),
    "chunk": (_other_chunk, "a chunk of 'model.model.norm.weight' should be torch.float32 of shape"),
}


@pytest.mark.parametrize("fault", DCP_FAULTS)
def test_damaged_dcp_checkpoint_is_named_and_nothing_written(fault: str, sharded: Any, tmp_path: Path) -> None:
    shutil.copytree(sharded[0] / "nested", tmp_path / "nested")
    damage, message = DCP_FAULTS[fault]
    damage(tmp_path / "nested")
    with pytest.raises(CheckpointError, match=message):
        import_dcp(tmp_path / "nested", tmp_path / "out", False)
    assert os.listdir(tmp_path) == ["nested"]


def test_strange_metadata_is_read_with_the_flag(sharded: Any, tmp_path: Path) -> None:
    shutil.copytree(sharded[0] / "nested", tmp_path / "nested")
    _strange_metadata(tmp_path / "nested")
    out = import_dcp(tmp_path / "nested", tmp_path / "out", True)
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(value, found[name]) for name, value in sharded[1].items())
