"""`Init`, and the same for a whole program: what is partitioned and what stays whole, what is put back, what may follow.

The bits of constructed and loaded models are the business of test_construct and test_loading.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from transformers import PreTrainedModel

import hf_zero
from hf_zero.sharding import active, init
from hf_zero.sharding.active import disabled, is_left_whole, is_partitioned, leave_whole
from hf_zero.sharding.init import activate, undo
from tests.engine.twins import STAGES
from tests.models import CASES, AwkwardMLP, make_model
from tests.ranks import alone, by_hand, on_ranks, run_ranks
from tests.sharding.test_construct import differences
from tests.sharding.test_loading import farthest, train

CPU = torch.device("cpu")
ZERO_3 = hf_zero.ZeroConfig(stage=3, timeout_s=20)


def state_of_libraries() -> list[Any]:
    """What partitioning may change in torch and transformers."""
    return [
        len(torch_module._global_parameter_registration_hooks),
        len(torch_module._global_module_registration_hooks),
        len(_get_current_function_mode_stack()),
        dict(vars(PreTrainedModel)),
        {name: value for name, value in os.environ.items() if name.startswith("HF_")},
        list(active._pausable_now),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Checkpoints of a llama (untied) and a gpt2 (tied)."""
    root = tmp_path_factory.mktemp("models")
    for name in ("llama", "gpt2"):
        make_model(CASES[name], seed=3).save_pretrained(root / name)
    return str(root)


def load(folder: str, name: str = "llama") -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{name}")


# --- every stage ----------------------------------------------------------------------------------------------------


KINDS = [("llama", False), ("llama", True), ("gpt2", False), ("gpt2", True), ("mlp", False)]


def check_training(stage: int, kind: tuple[str, bool], folder: str) -> None:
    """A constructed or loaded model of a stage: values, kind, two steps of training."""
    name, is_loaded = kind
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = list(range(dist.get_world_size() if dist.is_initialized() else 1))
    is_cut = stage > 0 and len(ranks) > 1
    torch.manual_seed(7)
    reference = load(folder, name) if is_loaded else CASES[name].build()
    after = torch.get_rng_state()
    torch.manual_seed(7 if is_cut or not is_loaded else rank)
    with hf_zero.Init({"stage": stage, "timeout_s": 20}):
        model = load(folder, name) if is_loaded else CASES[name].build()
    assert differences(reference, model, is_cut) == []
    assert is_loaded or torch.equal(after, torch.get_rng_state())
    assert hf_zero.engine_of(model) is None and hasattr(model, "no_sync")  # before the first forward
    assert_trains_alike(model, reference, name)
    assert hf_zero.engine_of(model) is not None


def assert_trains_alike(model: nn.Module, reference: nn.Module, name: str, num_steps: int = 2) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = list(range(dist.get_world_size() if dist.is_initialized() else 1))
    losses = train(model.train(), name, [rank], num_steps)
    wanted = train(reference.train(), name, ranks, num_steps)[rank :: len(ranks)]
    gap = max(farthest(reference, model), *(abs(a - b) for a, b in zip(losses, wanted, strict=True)))
    assert gap <= 4e-6


@on_ranks(2, stage=STAGES, kind=[("llama", True), ("gpt2", False), ("mlp", False), *by_hand(*KINDS)])
def test_every_stage_under_init_trains_as_the_unsharded_model(stage: int, kind: tuple[str, bool], folder: str) -> None:
    check_training(stage, kind, folder)


@alone(stage=[0, 3], kind=[("llama", True), ("gpt2", False), *by_hand(*KINDS)])
def test_a_world_of_one_under_init_is_the_unsharded_model(stage: int, kind: tuple[str, bool], folder: str) -> None:
    check_training(stage, kind, folder)


@on_ranks(2)
def test_ranks_start_from_rank_0_in_stage_0_too() -> None:
    """From other seeds, after the engine was made."""
    torch.manual_seed(dist.get_rank())
    with hf_zero.Init({"stage": 0}):
        model = nn.Sequential(nn.Linear(3, 5))
    model(torch.ones(3))
    reference = copy.deepcopy(model[0].weight.data)
    dist.broadcast(reference, 0)
    assert torch.equal(reference, model[0].weight)


# --- Init -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_init_nests_and_puts_everything_back(folder: str) -> None:
    """Contexts in contexts, disabled ones, and ones that an exception leaves."""
    before = state_of_libraries()
    with hf_zero.Init(enabled=False):
        assert not is_partitioned(CASES["llama"].build()) and state_of_libraries() == before, "enabled=False"
        assert not is_partitioned(load(folder)), "enabled=False, loaded"
    with hf_zero.Init(ZERO_3):
        assert state_of_libraries() != before, "something is changed"
        outer = CASES["llama"].build()
        with hf_zero.Init({"stage": 3, "keep_whole_numel": 10**9}):
            inner, inner_loaded = CASES["llama"].build(), load(folder)
        last, loaded = CASES["llama"].build(), load(folder)
    assert state_of_libraries() == before, "put back"
    for name, model, is_cut in (
        ("outer", outer, True),
        ("inner", inner, False),
        ("inner, loaded", inner_loaded, False),
        ("last", last, True),
        ("last, loaded", loaded, True),
    ):
        placed = {param.placements[0].is_shard() for param in model.parameters()}
        assert placed == {is_cut}, name
        assert train(model.train(), "llama", [0], 1)[0] > 0, f"{name} runs"
    for error_at in ("load", "body"):
        with contextlib.suppress(ZeroDivisionError, OSError), hf_zero.Init(ZERO_3):
            model = CASES["llama"].build()
            if error_at == "body":
                raise ZeroDivisionError
            transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/nothing")
        assert state_of_libraries() == before, f"put back after an error: {error_at}"
        assert len(model._forward_pre_hooks) == 0, f"no hook after an error: {error_at}"
    assert not is_partitioned(CASES["llama"].build()) and not is_partitioned(load(folder)), "plain afterwards"


def wrong_init(changes: dict[str, Any], launched: dict[str, str], kind: str, text: str) -> None:
    """An `Init` that is refused; a good one works afterwards."""
    before = state_of_libraries()
    with pytest.raises(hf_zero.ZeroError, match=re.escape(text)) as caught, mock.patch.dict(os.environ, launched):
        hf_zero.Init({"stage": 3, "timeout_s": 10, **changes}).__enter__()
    assert type(caught.value).__name__ == kind
    assert state_of_libraries() == before
    with hf_zero.Init(ZERO_3):
        model = AwkwardMLP()
    assert is_partitioned(model) is dist.is_initialized()


@on_ranks(2)
def test_a_wrong_configuration_is_refused_on_all_ranks() -> None:
    wrong_init({"prefetch_byte": 3}, {}, "ConfigError", "did you mean 'prefetch_bytes'")
    wrong_init({"expected_world_size": 5}, {}, "ConfigError", "expected_world_size is 5, but 2 processes run")
    wrong_init({"prefetch_bytes": 100 + dist.get_rank()}, {}, "ConfigError", "['prefetch_bytes'] differ")


@alone()
def test_launched_processes_without_a_group_are_refused() -> None:
    text = "one of 2 launched processes, but there is no process group"
    wrong_init({}, {"WORLD_SIZE": "2"}, "UsageError", text)


# --- for a whole program --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_activate_is_idempotent_and_undo_puts_everything_back(folder: str) -> None:
    """Activate, activate again, another one, undo."""
    undo()  # what other tests of this process have changed
    before = state_of_libraries()
    config = make_model(CASES["llama"]).config
    activate(ZERO_3, CPU)
    first = init._active[-1]
    during = dict(vars(PreTrainedModel))
    activate(hf_zero.ZeroConfig(stage=3, timeout_s=20), CPU)
    assert init._active == [first] and dict(vars(PreTrainedModel)) == during, "the same again"
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(config)
    model = load(folder)
    torch.manual_seed(3)
    assert not is_partitioned(transformers.LlamaForCausalLM(config)), "a constructor"
    assert is_partitioned(made) and differences(make_model(CASES["llama"], 3), made) == [], "from_config"
    assert is_partitioned(model), "from_pretrained"
    activate(hf_zero.ZeroConfig(stage=3, timeout_s=20, keep_whole_numel=10**9), CPU)
    other = load(folder)
    assert init._active != [first] and len(init._active) == 1, "another"
    assert {param.placements[0].is_shard() for param in other.parameters()} == {False}, "another's models"
    undo()
    assert state_of_libraries() == before, "undone"
    assert not is_partitioned(load(folder)), "plain afterwards"
    undo()
    assert state_of_libraries() == before, "undone twice"
    assert is_partitioned(model) and train(model.train(), "llama", [dist.get_rank()])[0] > 0, "partitioned stays so"


@on_ranks(2)
def test_a_model_that_rank_0_makes_alone_after_a_training_is_plain(folder: str) -> None:
    """As adapters are merged into a base model on the main process alone."""
    activate(ZERO_3, CPU)
    model = load(folder)
    train(model.train(), "llama", [dist.get_rank()])
    if dist.get_rank() == 0:
        made, loaded = transformers.AutoModelForCausalLM.from_config(model.config), load(folder)
        with disabled():
            expected = load(folder)
        torch.testing.assert_close(loaded.state_dict(), expected.state_dict(), rtol=0, atol=0)
        for alone in (made, loaded):
            assert not is_partitioned(alone)
            alone(input_ids=torch.arange(4)[None], labels=torch.arange(4)[None]).loss.backward()
    dist.barrier()
    assert is_partitioned(load(folder)), "by all again"
    undo()


@on_ranks(2)
def test_activate_notices_another_process_group(folder: str, tmp_path: Path) -> None:
    activate(ZERO_3, CPU)
    first = init._active[-1].world
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=int(os.environ["RANK"]), world_size=2)
    activate(ZERO_3, CPU)
    model = load(folder)
    assert init._active[-1].world is not first
    assert len(train(model.train(), "llama", [dist.get_rank()])) == 2
    undo()


@contextlib.contextmanager
def partitioning(is_activated: bool) -> Iterator[None]:
    if not is_activated:
        with hf_zero.Init(ZERO_3):
            yield
        return
    activate(ZERO_3, CPU)
    try:
        yield
    finally:
        undo()


@on_ranks(2, is_activated=[False, True])
def test_models_loaded_under_disabled_stay_whole(folder: str, is_activated: bool) -> None:
    before = state_of_libraries()
    config = make_model(CASES["llama"]).config
    with partitioning(is_activated):
        with disabled():
            whole, made = load(folder), transformers.AutoModelForCausalLM.from_config(config)
            plain = nn.Linear(3, 5)
            with disabled():
                pass
            again = load(folder)
        cut, cut_made = load(folder), transformers.AutoModelForCausalLM.from_config(config)
        with contextlib.suppress(ZeroDivisionError), disabled():
            raise ZeroDivisionError
        after_an_error = load(folder)
    for name, model in (("loaded", whole), ("made", made), ("again", again), ("plain", plain)):
        assert not is_partitioned(model) and len(model._forward_pre_hooks) == 0, f"{name} is whole"
    assert is_left_whole(whole) and is_left_whole(again), "loaded is left whole"
    for name, model in (("cut", cut), ("cut_made", cut_made), ("after an error", after_an_error)):
        assert is_partitioned(model) and not is_left_whole(model), f"{name} is partitioned"
        with pytest.raises(hf_zero.UsageError, match="partitioned already"):
            leave_whole(model)
    assert leave_whole(plain) is plain and is_left_whole(plain), "named"
    with disabled():
        assert not is_partitioned(load(folder)), "outside"
    assert state_of_libraries() == before, "put back"


# --- between loading and training -----------------------------------------------------------------------------------


def check_lora(stage: int, is_late: bool, folder: str) -> None:
    """Adapters on a loaded model, from ranks with different seeds, trained as the unsharded ones."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "embed_tokens"], lora_dropout=0.0)
    torch.manual_seed(5)
    reference = get_peft_model(load(folder), copy.deepcopy(lora))
    with hf_zero.Init({"stage": stage, "timeout_s": 20}):
        model = load(folder)
    torch.manual_seed(5 + dist.get_rank())
    model = get_peft_model(model, copy.deepcopy(lora))
    if not is_late:
        hf_zero.shard_model(model)
        assert differences(reference, model, has_engine=True) == []
    model(**CASES["llama"].batch(9, dist.get_rank()))  # a late engine comes here, before the optimizer
    assert_trains_alike(model, reference, "llama", 3)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained and all("lora" in name for name in trained)


@on_ranks(2, 3, stage=[1, 3], is_late=[False, True])
def test_adapters_may_be_added_to_a_loaded_model(stage: int, is_late: bool, folder: str) -> None:
    """Before `shard_model`, and before the first forward."""
    check_lora(stage, is_late, folder)


@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 2), (2, 3), (3, 3)])
def test_embeddings_may_be_resized(folder: str, num_ranks: int, stage: int) -> None:
    """To more and fewer rows, tied and untied, before the engine and under it, against the unsharded model."""
    run_ranks(check_resizing, num_ranks, folder, stage)


def check_resizing(folder: str, stage: int) -> None:
    """Tied, and untied; to as many rows too where there is no engine, as a library may ask for."""
    cases = [("llama", 40, True), ("llama", 30, False), ("gpt2", 40, False), ("gpt2", 37, False), ("gpt2", 30, True)]
    cases += by_hand(*itertools.product(("llama", "gpt2"), (40, 37, 30), (False, True)))
    for name, num_rows, has_engine in cases:
        reference = load(folder, name)
        with hf_zero.Init({"stage": stage, "timeout_s": 20}):
            model = load(folder, name)
        if has_engine:
            hf_zero.shard_model(model)
        for each in (reference, model):
            torch.manual_seed(9)
            each.resize_token_embeddings(num_rows)
        hf_zero.shard_model(model)
        assert differences(reference, model, has_engine=True) == [], (name, num_rows, has_engine)
        if num_rows >= 37:  # the batches' vocabulary
            assert_trains_alike(model, reference, name)


@on_ranks(2, how=["no_grad", "inference", "with a part that was made apart"])
def test_the_engine_comes_with_the_first_forward_for_all_parts_and_for_training(how: str) -> None:
    with hf_zero.Init(ZERO_3):
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        part = nn.Linear(2, 2)
    if "part" in how:
        model.append(part)
    model.append(nn.Linear(2, 6))
    assert hf_zero.engine_of(model) is None
    with torch.inference_mode() if how == "inference" else torch.no_grad():
        assert model(torch.ones(3)).shape == (6,)
    engine = hf_zero.engine_of(model)
    model(torch.ones(3)).sum().backward()
    assert engine is hf_zero.engine_of(model) is not None
    assert all(isinstance(param, DTensor) and isinstance(param.grad, DTensor) for param in model.parameters())


@on_ranks(2)
def test_copies_of_a_constructed_model_are_models_of_their_own() -> None:
    """Deep copies, made inside and after `Init`, train by themselves.

    `Init` does not see that a model is copied inside, so that copy does not get its engine by itself.
    """
    rank, ranks = dist.get_rank(), list(range(dist.get_world_size()))
    torch.manual_seed(2)
    with hf_zero.Init(ZERO_3):
        model = CASES["gpt2"].build()
        inside = copy.deepcopy(model)
    after = copy.deepcopy(model)
    hf_zero.shard_model(inside)
    reference = make_model(CASES["gpt2"], 2)
    train(reference, "gpt2", ranks)
    for each in (model, inside, after):
        train(each.train(), "gpt2", [rank])
        assert farthest(reference, each) < 4e-6
        assert each.lm_head.weight is each.transformer.wte.weight
    assert len({each.lm_head.weight.to_local().data_ptr() for each in (model, inside, after)}) == 3


@on_ranks(1, 2)
def test_a_moved_model_is_still_that_of_its_own_ranks_and_configuration() -> None:
    """Two models under Init, each given to `shard_model` after it was moved, which drops parameters' attributes."""
    models = {}
    for stage in (1, 3):
        with hf_zero.Init({"stage": stage, "timeout_s": 20.0}):
            models[stage] = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for stage, model in models.items():
        for param in model.parameters():
            for name in set(vars(param)) - {"_is_param"}:
                del vars(param)[name]
        assert hf_zero.shard_model(model.to("cpu")).world.config.stage == stage


@on_ranks(2, stage=[3, *by_hand(1)])
def test_parts_of_a_loaded_model_and_its_forward_can_be_called_first(stage: int) -> None:
    """As libraries do that put a model into one of their own."""
    plain = make_model(CASES["bert"]).eval()
    batch = CASES["bert"].batch(0, 0)
    calls: list[Callable[[Any], Tensor]] = [
        lambda model: model.bert(batch["input_ids"]).last_hidden_state,
        lambda model: model.forward(**batch).logits,
        lambda model: model.bert.encoder.layer[0](model.bert.embeddings(batch["input_ids"])),
        lambda model: model(**batch).logits,
    ]
    for call in calls:
        with hf_zero.Init({"stage": stage, "timeout_s": 20}):
            model = make_model(CASES["bert"]).eval()
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(call(model), call(plain))
        model(**batch).loss.backward()
        plain.zero_grad()
        plain(**batch).loss.backward()
        for left, right in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(left.grad.full_tensor(), right.grad)
