"""Whole weights of partitioned models, and the folders that save_pretrained writes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import AutoModelForCausalLM

import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict, world_of_model
from tests.models import CASES, AwkwardMLP, make_model
from tests.ranks import run_ranks

CONFIG: dict[str, Any] = {"stage": 3, "collectives": "pairwise"}
MODELS = ("llama", "gpt2", "bert", "t5", "vit", "mixtral")


def changed(case: str) -> nn.Module:
    """A model of which every weight differs from what a constructor would make."""
    model = make_model(CASES[case])
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.add_(0.01 * (number + 1))
    return model


# ---- whole_state_dict -----------------------------------------------------------------------------------------------


def gather_states(stage: int) -> dict[str, Any]:
    rank, results = dist.get_rank(), {}
    for name in ("llama", "gpt2", "mlp"):
        model = changed(name)
        oracle = {key: value.clone() for key, value in model.state_dict().items()}
        zero.shard_model(model, CONFIG | {"stage": stage})
        state = whole_state_dict(model)
        is_equal = list(state) == list(oracle) and all(torch.equal(state[key], value) for key, value in oracle.items())
        some = whole_state_dict(model, keep=rank == 1, names=list(oracle)[:3])
        results[name] = {
            "is_equal": is_equal,
            "some": list(some) == (list(oracle)[:3] if rank == 1 else []),
            "is_plain": all(type(value) is Tensor and value.device.type == "cpu" for value in state.values()),
        }
        if name == "gpt2":
            head, embedding = state["lm_head.weight"], state["transformer.wte.weight"]
            results[name]["tied_once"] = head.data_ptr() == embedding.data_ptr()
    return results


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_whole_state_dict_is_that_of_the_unsharded_model(stage: int) -> None:
    for results in run_ranks(gather_states, 2, stage):
        for name, found in results.items():
            assert all(found.values()), (name, found)


def gather_few_rows() -> tuple[bool, list[int]]:
    torch.manual_seed(0)
    model = AwkwardMLP()
    oracle = {key: value.clone() for key, value in model.state_dict().items()}
    zero.shard_model(model, CONFIG)
    rows = [param.to_local().numel() if hasattr(param, "to_local") else -1 for param in model.parameters()]
    state = whole_state_dict(model, keep=dist.get_rank() == 2)
    wanted = oracle if dist.get_rank() == 2 else {}
    return state.keys() == wanted.keys() and all(torch.equal(state[key], value) for key, value in wanted.items()), rows


def test_ranks_without_rows_take_part() -> None:
    results = run_ranks(gather_few_rows, 3)
    assert [is_equal for is_equal, _ in results] == [True] * 3
    assert 0 in results[2][1]


def gather_mixed() -> tuple[bool, bool]:
    """What is not partitioned is taken as it is."""
    model = nn.ModuleDict({"ours": nn.Linear(3, 3), "plain": nn.Linear(3, 3)})
    oracle = {key: value.clone() for key, value in model.state_dict().items()}
    zero.shard_model(model["ours"], CONFIG)
    state = whole_state_dict(model)
    oracle_of_rank_0 = {key: value for key, value in oracle.items() if key.startswith("plain")}
    is_same = all(torch.equal(state[key], value) for key, value in oracle_of_rank_0.items())
    return is_same and state.keys() == oracle.keys(), world_of_model(model["plain"]) is None


def test_parts_that_are_not_partitioned_are_taken_as_they_are() -> None:
    assert run_ranks(gather_mixed, 2) == [(True, True)] * 2


# ---- save_pretrained ------------------------------------------------------------------------------------------------


def save_models(folder: str, stage: int, max_shard_size: str) -> None:
    for name in MODELS:
        model = changed(name)
        if dist.get_rank() == 0:
            model.save_pretrained(f"{folder}/{name}/plain", max_shard_size=max_shard_size)
        zero.shard_model(model, CONFIG | {"stage": stage})
        model.save_pretrained(f"{folder}/{name}/ours", max_shard_size=max_shard_size)


@pytest.mark.parametrize(
    ("stage", "max_shard_size", "num_ranks"), [(3, "20KB", 2), (1, "50GB", 2), (3, "50GB", 3), (0, "20KB", 2)]
)
def test_folder_is_that_of_the_unsharded_model(stage: int, max_shard_size: str, num_ranks: int, tmp_path: Path) -> None:
    run_ranks(save_models, num_ranks, str(tmp_path), stage, max_shard_size)
    for name in MODELS:
        plain, ours = tmp_path / name / "plain", tmp_path / name / "ours"
        files = sorted(path.name for path in plain.iterdir())
        assert sorted(path.name for path in ours.iterdir()) == files, name
        assert ("model.safetensors.index.json" in files) == (max_shard_size == "20KB"), name
        for file in files:
            if file.endswith(".safetensors"):
                assert (ours / file).read_bytes() == (plain / file).read_bytes(), (name, file)
            else:
                assert json.loads((ours / file).read_text()) == json.loads((plain / file).read_text()), (name, file)
    # The expert weights of Mixtral are merged while they are loaded, and written as they were.
    experts = [key for file in (tmp_path / "mixtral" / "ours").glob("*.safetensors") for key in load_file(file)]
    assert any(".experts.15.w1.weight" in key for key in experts)
    tied = [key for file in (tmp_path / "gpt2" / "ours").glob("*.safetensors") for key in load_file(file)]
    assert "lm_head.weight" not in tied


def load_and_save(source: str, target: str) -> bool:
    """Partitioned while it loads, saved before any forward."""
    _clear_sharding_prop_cache()  # it may refer to the groups of earlier jobs in this process
    with zero.Init(CONFIG):
        model = AutoModelForCausalLM.from_pretrained(source)
    has_engine = zero.engine_of(model) is not None
    model.save_pretrained(target)
    return has_engine


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_what_was_partitioned_while_loading_is_saved_as_it_was(name: str, tmp_path: Path) -> None:
    changed(name).save_pretrained(tmp_path / "plain")
    assert run_ranks(load_and_save, 2, str(tmp_path / "plain"), str(tmp_path / "ours")) == [False, False]
    left, right = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "plain"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], value) for key, value in right.items())


def save_given_values(folder: str) -> None:
    model = changed("llama")
    zero.shard_model(model, CONFIG)
    values = {key: torch.full_like(value, 2) for key, value in whole_state_dict(model).items()}
    model.save_pretrained(f"{folder}/whole", state_dict=values)
    model.save_pretrained(f"{folder}/sharded", state_dict=model.state_dict())
    model.save_pretrained(f"{folder}/main", is_main_process=dist.get_rank() == 0)


def test_a_given_state_dict_is_written(tmp_path: Path) -> None:
    run_ranks(save_given_values, 2, str(tmp_path))
    whole, sharded, main = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "sharded", "main"))
    oracle = changed("llama").state_dict()
    assert all(bool((value == 2).all()) for value in whole.values())
    assert whole.keys() == sharded.keys() == main.keys() == oracle.keys()
    assert all(torch.equal(sharded[key], value) and torch.equal(main[key], value) for key, value in oracle.items())


def save_on_one_rank(folder: str) -> None:
    model = changed("llama")
    zero.shard_model(model, CONFIG | {"timeout_s": 3})
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    else:
        CASES["llama"].loss(model, CASES["llama"].batch(0, 1))


def test_one_rank_alone_is_an_error_that_names_the_call(tmp_path: Path) -> None:
    failures = run_ranks(save_on_one_rank, 2, str(tmp_path), expect_failure=True)
    first = failures[0]
    assert first is not None
    assert first.type_name == "CollectiveError"
    assert "save_pretrained" in first.message
    assert not (tmp_path / "model.safetensors").exists()


# ---- models of libraries that save them in their own way -------------------------------------------------------------


class SavesItself(nn.Module):
    """As sentence-transformers and diffusers do: its `save_pretrained` takes no state dict, but reads the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = AwkwardMLP(), nn.Linear(3, 2)

    def save_pretrained(self, path: str, title: str, fails: bool = False) -> None:
        if fails:
            raise OSError("no space left")
        assert not Path(path).exists()
        torch.save({"title": title, "head": self.head.weight.detach(), "state": self.state_dict()}, path)


def save_itself(path: str, stage: int) -> tuple[bool, str]:
    torch.manual_seed(0)
    model = SavesItself()
    oracle = {key: value.clone() for key, value in model.state_dict().items()}
    zero.shard_model(model, CONFIG | {"stage": stage})
    at_rest = {key: type(value) for key, value in model.state_dict().items()}
    model.save_pretrained(path, "mine")
    saved = torch.load(path, weights_only=False)
    is_whole = saved["title"] == "mine" and torch.equal(saved["head"], oracle["head.weight"])
    is_whole &= all(torch.equal(saved["state"][key], value) for key, value in oracle.items())
    is_whole &= {key: type(value) for key, value in model.state_dict().items()} == at_rest
    try:
        model.save_pretrained(path, "mine", fails=True)
    except zero.ZeroError as error:
        return is_whole, str(error)
    return is_whole, ""


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_that_saves_itself_is_whole_meanwhile(stage: int, tmp_path: Path) -> None:
    for is_whole, told in run_ranks(save_itself, 2, str(tmp_path / "model.pt"), stage):
        assert is_whole
        assert "rank 0: OSError: no space left" in told
