"""Whole weights of partitioned models, and the folders that save_pretrained writes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
from hf_zero.checkpoint.export import _whole_state, whole_state_dict, world_of_model
from tests.models import CASES, AwkwardMLP, make_model
from tests.ranks import by_hand, on_ranks, run_ranks

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


def copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in state.items()}


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


@on_ranks(2, stage=[0, 1, 3], name=["llama", "gpt2", "mlp"])
def test_whole_state_dict_is_that_of_the_unsharded_model(stage: int, name: str) -> None:
    model = changed(name)
    oracle = copied(model.state_dict())
    zero.shard_model(model, CONFIG | {"stage": stage})
    state = whole_state_dict(model)
    assert_same(state, oracle)
    assert all(type(value) is Tensor and value.device.type == "cpu" for value in state.values())
    some = whole_state_dict(model, keep=dist.get_rank() == 1, names=list(oracle)[:3])
    assert list(some) == (list(oracle)[:3] if dist.get_rank() == 1 else [])
    if name == "gpt2":
        assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()  # tied: once


@on_ranks(3)
def test_ranks_without_rows_take_part() -> None:
    torch.manual_seed(0)
    model = AwkwardMLP()
    oracle = copied(model.state_dict())
    zero.shard_model(model, CONFIG)
    is_last = dist.get_rank() == 2
    rows = [param.to_local().numel() for param in model.parameters() if hasattr(param, "to_local")]
    assert not is_last or 0 in rows
    assert_same(whole_state_dict(model, keep=is_last), oracle if is_last else {})


@on_ranks(2)
def test_parts_that_are_not_partitioned_are_taken_as_they_are() -> None:
    model = nn.ModuleDict({"ours": nn.Linear(3, 3), "plain": nn.Linear(3, 3)})
    oracle = copied(model.state_dict())
    zero.shard_model(model["ours"], CONFIG)
    state = whole_state_dict(model)
    assert state.keys() == oracle.keys()
    assert all(torch.equal(state[key], value) for key, value in oracle.items() if key.startswith("plain"))
    assert world_of_model(model["plain"]) is None


# ---- save_pretrained ------------------------------------------------------------------------------------------------


def save_models(folder: str, stage: int, max_shard_size: str, names: Sequence[str]) -> None:
    for name in names:
        model = changed(name)
        if dist.get_rank() == 0:
            model.save_pretrained(f"{folder}/{name}/plain", max_shard_size=max_shard_size)
        zero.shard_model(model, CONFIG | {"stage": stage})
        model.save_pretrained(f"{folder}/{name}/ours", max_shard_size=max_shard_size)


@pytest.mark.parametrize(
    ("stage", "max_shard_size", "num_ranks"), [(3, "20KB", 2), (1, "50GB", 2), (3, "50GB", 3), (0, "20KB", 2)]
)
def test_folder_is_that_of_the_unsharded_model(stage: int, max_shard_size: str, num_ranks: int, tmp_path: Path) -> None:
    names = MODELS if (stage, num_ranks) == (3, 2) else ("gpt2", "mixtral", *by_hand("llama", "bert", "t5", "vit"))
    run_ranks(save_models, num_ranks, str(tmp_path), stage, max_shard_size, names)
    for name in names:
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


@on_ranks(2, name=["llama", "gpt2", "mixtral"])
def test_what_was_partitioned_while_loading_is_saved_as_it_was(name: str, tmp_path: Path) -> None:
    """Before any forward."""
    _clear_sharding_prop_cache()  # it may refer to the groups of earlier jobs in this process
    plain, ours = tmp_path / name, tmp_path / f"{name}_ours"
    if dist.get_rank() == 0:
        changed(name).save_pretrained(plain)
    dist.barrier()
    with zero.Init(CONFIG):
        model = AutoModelForCausalLM.from_pretrained(plain)
    assert zero.engine_of(model) is None
    model.save_pretrained(ours)
    dist.barrier()
    found, wanted = (load_file(folder / "model.safetensors") for folder in (ours, plain))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


@on_ranks(2)
def test_a_given_state_dict_is_written(tmp_path: Path) -> None:
    model = changed("llama")
    oracle = copied(model.state_dict())
    zero.shard_model(model, CONFIG)
    values = {key: torch.full_like(value, 2) for key, value in whole_state_dict(model).items()}
    model.save_pretrained(tmp_path / "whole", state_dict=values)
    model.save_pretrained(tmp_path / "sharded", state_dict=model.state_dict())
    model.save_pretrained(tmp_path / "main", is_main_process=dist.get_rank() == 0)
    dist.barrier()
    for name, wanted in (("whole", values), ("sharded", oracle), ("main", oracle)):
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == oracle.keys(), name
        assert all(torch.equal(found[key], value) for key, value in wanted.items()), name


_GIVEN: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "another dtype": lambda state: {name: value.half() for name, value in state.items()},
    "other names": lambda state: {f"student.{name}": value for name, value in state.items()},
    "some": lambda state: {name: value for name, value in state.items() if "layers.1" not in name},
    "computed": lambda state: {name: value * 0.5 + 1 for name, value in state.items()},
    "views": lambda state: {name: value[:1] for name, value in state.items()},
    "mixed": lambda state: {
        n: value if i % 2 else torch.zeros_like(value) for i, (n, value) in enumerate(state.items())
    },
}


@on_ranks(2, given=list(_GIVEN), alone=["nobody", "gives", "gives and calls", "gives another"])
def test_what_is_computed_of_weights_and_given_is_written(given: str, alone: str, tmp_path: Path) -> None:
    """Each rank gives the same, or rank 0 alone gives it: the others nothing, or something else, or do not come."""
    model = changed("llama")
    oracle = {name: value.clone().contiguous() for name, value in _GIVEN[given](copied(model.state_dict())).items()}
    zero.shard_model(model, CONFIG)
    folder = tmp_path / f"{given} {alone}"
    is_first = dist.get_rank() == 0
    with torch.no_grad():
        values = _GIVEN[given](model.state_dict()) if is_first or alone == "nobody" else None
        if alone == "gives another" and not is_first:
            values = model.state_dict()
        if is_first or alone != "gives and calls":
            model.save_pretrained(folder, state_dict=values, is_main_process=is_first)
    dist.barrier()
    found = load_file(folder / "model.safetensors")
    torch.testing.assert_close(found, oracle, rtol=0, atol=0)


def test_parts_of_one_plain_tensor_are_not_taken_for_ties() -> None:
    table = torch.arange(6.0).view(2, 3)
    given = {"all": table, "tied": table.detach(), "first": table[:1], "turned": table.t()}
    found = _whole_state(given, True, None, lambda _: pytest.fail("nothing is at rest"))
    torch.testing.assert_close(found, given, rtol=0, atol=0)
    assert found["all"] is found["tied"]


# ---- on the main process alone ---------------------------------------------------------------------------------------


@on_ranks(2, 3, stage=[1, 2, 3], collectives=["pairwise", "host"])
def test_rank_0_saves_alone_what_all_ranks_save_together(stage: int, collectives: str, tmp_path: Path) -> None:
    case = CASES["gpt2"]
    folder = tmp_path / f"{stage} {collectives} {dist.get_world_size()}"
    model = changed("gpt2")
    zero.shard_model(model, {"stage": stage, "collectives": collectives})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        if dist.get_rank() == 0 and step:  # the others are in the next step
            model.save_pretrained(folder / f"alone{step}", max_shard_size="20KB")
            torch.save(whole_state_dict(model), folder / f"state{step}")
        case.loss(model, case.batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.save_pretrained(folder / f"together{step + 1}", max_shard_size="20KB")
    if dist.get_rank() == 0:  # the others are in the barrier
        model.save_pretrained(folder / "alone3", max_shard_size="20KB")
        model.save_pretrained(folder / "given", max_shard_size="20KB", state_dict=model.state_dict())
        found, saved = ([*map(load_file, (folder / name).glob("*.safetensors"))] for name in ("given", "alone3"))
        assert set().union(*found) == set().union(*saved)  # a tied weight once
        for step in (1, 2, 3):
            wanted = {path.name: path.read_bytes() for path in (folder / f"together{step}").iterdir()}
            assert {path.name: path.read_bytes() for path in (folder / f"alone{step}").iterdir()} == wanted
            loaded = AutoModelForCausalLM.from_pretrained(folder / f"alone{step}").state_dict()
            if step < 3:
                assert_same(torch.load(folder / f"state{step}"), loaded)
    dist.barrier()


def save_where_another_rank_has_come_to_the_step(folder: str) -> None:
    model = changed("llama")
    expected = copied(model.state_dict())
    zero.shard_model(model, CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    CASES["llama"].loss(model, CASES["llama"].batch(0, dist.get_rank())).backward()
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
        saved = type(model).from_pretrained(folder).state_dict()
        torch.testing.assert_close(saved, expected, rtol=0, atol=0)
    optimizer.step()
    CASES["llama"].loss(model, CASES["llama"].batch(0, 1))


def test_rank_0_saves_alone_what_was_before_the_step_that_others_have_come_to(tmp_path: Path) -> None:
    run_ranks(save_where_another_rank_has_come_to_the_step, 2, str(tmp_path), timeout_s=60)


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


@on_ranks(2, stage=[0, 2, 3])
def test_a_model_that_saves_itself_is_whole_meanwhile(stage: int, tmp_path: Path) -> None:
    path = str(tmp_path / f"model{stage}.pt")
    torch.manual_seed(0)
    model = SavesItself()
    oracle = copied(model.state_dict())
    zero.shard_model(model, CONFIG | {"stage": stage})
    at_rest = {key: type(value) for key, value in model.state_dict().items()}
    model.save_pretrained(path, "mine")
    saved = torch.load(path, weights_only=False)
    assert saved["title"] == "mine" and torch.equal(saved["head"], oracle["head.weight"])
    assert all(torch.equal(saved["state"][key], value) for key, value in oracle.items())
    assert {key: type(value) for key, value in model.state_dict().items()} == at_rest
    with pytest.raises(zero.ZeroError, match="rank 0: OSError: no space left"):
        model.save_pretrained(path, "mine", fails=True)
    if stage and dist.get_rank() == 0:
        model.save_pretrained(f"{path} alone", "mine")
        again = torch.load(f"{path} alone", weights_only=False)
        assert all(torch.equal(again["state"][key], value) for key, value in oracle.items())
    dist.barrier()
