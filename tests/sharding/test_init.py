"""`Init`, and the same for a whole program: what is partitioned and what stays whole, what is put back, what may follow.

The bits of constructed and loaded models are the business of test_construct and test_loading.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from transformers import PreTrainedModel

import hf_zero
from hf_zero.sharding import init
from hf_zero.sharding.init import activate, disabled, is_left_whole, is_partitioned, leave_whole, undo
from tests.models import CASES, AwkwardMLP, make_model
from tests.ranks import RankFailure, on_ranks, run_alone, run_ranks
from tests.sharding.test_construct import Problems, collect, differences
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
        list(init._pausable_now),
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


def problems_of_stages(folder: str, stages: list[int]) -> Problems:
    """Runs on a rank: constructed and loaded models of each stage: values, kind, two steps of training."""
    problems: Problems = {}
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = list(range(dist.get_world_size() if dist.is_initialized() else 1))
    for stage in stages:
        is_cut = stage > 0 and len(ranks) > 1
        for name in ("llama", "gpt2", "mlp"):
            for is_loaded in (False, True) if name != "mlp" else (False,):

                def check(name: str = name, is_loaded: bool = is_loaded) -> list[str]:
                    torch.manual_seed(7)
                    reference = load(folder, name) if is_loaded else CASES[name].build()
                    after = torch.get_rng_state()
                    torch.manual_seed(7 if is_cut or not is_loaded else rank)
                    with hf_zero.Init({"stage": stage, "timeout_s": 20}):
                        model = load(folder, name) if is_loaded else CASES[name].build()
                    found = differences(reference, model, is_cut)
                    if not is_loaded and not torch.equal(after, torch.get_rng_state()):
                        found.append("another random state afterwards")
                    if hf_zero.engine_of(model) is not None or not hasattr(model, "no_sync"):
                        found.append("an engine before the first forward, or no seams")
                    losses = train(model.train(), name, [rank])
                    wanted = train(reference.train(), name, ranks)[rank :: len(ranks)]
                    gap = max(farthest(reference, model), *(abs(a - b) for a, b in zip(losses, wanted, strict=True)))
                    if gap > 4e-6 or hf_zero.engine_of(model) is None:
                        found.append(f"{gap} away after training")
                    return found

                collect(problems, f"{name}, stage {stage}, {is_loaded=}", check)
    return problems


def test_every_stage_under_init_trains_as_the_unsharded_model(folder: str) -> None:
    assert run_ranks(problems_of_stages, 2, folder, [0, 1, 2, 3]) == [{}] * 2


def test_a_world_of_one_under_init_is_the_unsharded_model(folder: str) -> None:
    assert run_alone(problems_of_stages, folder, [0, 3]) == {}


def ranks_of_stage_0() -> bool:
    """Runs on a rank: a stage 0 model that was drawn from other seeds, after its engine was made."""
    torch.manual_seed(dist.get_rank())
    with hf_zero.Init({"stage": 0}):
        model = nn.Sequential(nn.Linear(3, 5))
    model(torch.ones(3))
    reference = copy.deepcopy(model[0].weight.data)
    dist.broadcast(reference, 0)
    return torch.equal(reference, model[0].weight)


def test_ranks_start_from_rank_0_in_stage_0_too() -> None:
    assert run_ranks(ranks_of_stage_0, 2) == [True, True]


# --- Init -----------------------------------------------------------------------------------------------------------


def facts_of_init(folder: str) -> dict[str, Any]:
    """Runs on a rank: contexts in contexts, disabled ones, and ones that an exception leaves."""
    before, facts = state_of_libraries(), {}
    with hf_zero.Init(enabled=False):
        facts["enabled=False"] = not is_partitioned(CASES["llama"].build()) and state_of_libraries() == before
        facts["enabled=False, loaded"] = not is_partitioned(load(folder))
    with hf_zero.Init(ZERO_3):
        facts["something is changed"] = state_of_libraries() != before
        outer = CASES["llama"].build()
        with hf_zero.Init({"stage": 3, "keep_whole_numel": 10**9}):
            inner, inner_loaded = CASES["llama"].build(), load(folder)
        last, loaded = CASES["llama"].build(), load(folder)
    facts["put back"] = state_of_libraries() == before
    for name, model, is_cut in (
        ("outer", outer, True),
        ("inner", inner, False),
        ("inner, loaded", inner_loaded, False),
        ("last", last, True),
        ("last, loaded", loaded, True),
    ):
        placed = {param.placements[0].is_shard() for param in model.parameters()}
        facts[name] = placed == {is_cut}
        facts[f"{name} runs"] = train(model.train(), "llama", [0], 1)[0] > 0
    for error_at in ("load", "body"):
        with contextlib.suppress(ZeroDivisionError, OSError), hf_zero.Init(ZERO_3):
            model = CASES["llama"].build()
            if error_at == "body":
                raise ZeroDivisionError
            transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/nothing")
        facts[f"put back after an error: {error_at}"] = state_of_libraries() == before
        facts[f"no hook after an error: {error_at}"] = len(model._forward_pre_hooks) == 0
    facts["plain afterwards"] = not is_partitioned(CASES["llama"].build()) and not is_partitioned(load(folder))
    return facts


def test_init_nests_and_puts_everything_back(folder: str) -> None:
    for facts in run_ranks(facts_of_init, 2, folder):
        assert [name for name, is_true in facts.items() if not is_true] == []


def wrong_inits(kind: str) -> None:
    """Runs on a rank (or alone): an `Init` that is refused; a good one works afterwards."""
    config: dict[str, Any] = {"stage": 3, "timeout_s": 10}
    before = state_of_libraries()
    if kind == "unknown key":
        config["prefetch_byte"] = 3
    if kind == "expected_world_size":
        config["expected_world_size"] = 5
    if kind == "different":
        config["prefetch_bytes"] = 100 + dist.get_rank()
    launched = {"WORLD_SIZE": "2"} if kind == "no group" else {}
    try:
        with mock.patch.dict(os.environ, launched), hf_zero.Init(config):
            pass
    except hf_zero.ZeroError as error:
        assert state_of_libraries() == before
        with hf_zero.Init(ZERO_3):
            model = AwkwardMLP()
        assert is_partitioned(model) is dist.is_initialized()
        raise error


@pytest.mark.parametrize(
    ("kind", "type_name", "message"),
    [
        ("unknown key", "ConfigError", "did you mean 'prefetch_bytes'"),
        ("expected_world_size", "ConfigError", "expected_world_size is 5, but 2 processes run"),
        ("different", "ConfigError", "['prefetch_bytes'] differ"),
    ],
)
def test_a_wrong_configuration_is_refused_on_all_ranks(kind: str, type_name: str, message: str) -> None:
    for failure in run_ranks(wrong_inits, 2, kind, expect_failure=True):
        assert isinstance(failure, RankFailure) and failure.type_name == type_name, failure
        assert message in failure.message


def message_without_a_group() -> str:
    try:
        wrong_inits("no group")
    except hf_zero.UsageError as error:
        return str(error)
    return ""


def test_launched_processes_without_a_group_are_refused() -> None:
    assert "one of 2 launched processes, but there is no process group" in run_alone(message_without_a_group)


# --- for a whole program --------------------------------------------------------------------------------------------


def facts_of_activation(folder: str) -> dict[str, Any]:
    """Runs on a rank: activate, activate again, another one, undo."""
    before, facts = state_of_libraries(), {}
    config = make_model(CASES["llama"]).config
    activate(ZERO_3, CPU)
    first = init._active[-1]
    during = dict(vars(PreTrainedModel))
    activate(hf_zero.ZeroConfig(stage=3, timeout_s=20), CPU)
    facts["the same again"] = init._active == [first] and dict(vars(PreTrainedModel)) == during
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(config)
    model = load(folder)
    torch.manual_seed(3)
    facts["a constructor"] = not is_partitioned(transformers.LlamaForCausalLM(config))
    facts["from_config"] = is_partitioned(made) and differences(make_model(CASES["llama"], 3), made) == []
    facts["from_pretrained"] = is_partitioned(model)
    activate(hf_zero.ZeroConfig(stage=3, timeout_s=20, keep_whole_numel=10**9), CPU)
    other = load(folder)
    facts["another"] = init._active != [first] and len(init._active) == 1
    facts["another's models"] = {param.placements[0].is_shard() for param in other.parameters()} == {False}
    undo()
    facts["undone"] = state_of_libraries() == before
    facts["plain afterwards"] = not is_partitioned(load(folder))
    undo()
    facts["undone twice"] = state_of_libraries() == before
    facts["partitioned stays so"] = is_partitioned(model) and train(model.train(), "llama", [dist.get_rank()])[0] > 0
    return facts


def test_activate_is_idempotent_and_undo_puts_everything_back(folder: str) -> None:
    for facts in run_ranks(facts_of_activation, 2, folder):
        assert [name for name, is_true in facts.items() if not is_true] == []


def activations_across_groups(folder: str) -> bool:
    """Runs on a rank: the same configuration in a process group and, later, in another one."""
    activate(ZERO_3, CPU)
    first = init._active[-1].world
    dist.destroy_process_group()
    store = os.path.join(folder, "store")
    dist.init_process_group("gloo", f"file://{store}", rank=int(os.environ["RANK"]), world_size=2)
    activate(ZERO_3, CPU)
    model = load(folder)
    is_new = init._active[-1].world is not first
    losses = train(model.train(), "llama", [dist.get_rank()])
    undo()
    return is_new and len(losses) == 2


def test_activate_notices_another_process_group(folder: str, tmp_path: Path) -> None:
    (tmp_path / "llama").symlink_to(f"{folder}/llama")
    assert run_ranks(activations_across_groups, 2, str(tmp_path)) == [True, True]


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


def facts_of_whole_models(folder: str, is_activated: bool) -> dict[str, Any]:
    """Runs on a rank: models that are to stay whole."""
    facts, before = {}, state_of_libraries()
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
        facts[f"{name} is whole"] = not is_partitioned(model) and len(model._forward_pre_hooks) == 0
    facts["loaded is left whole"] = is_left_whole(whole) and is_left_whole(again)
    for name, model in (("cut", cut), ("cut_made", cut_made), ("after an error", after_an_error)):
        facts[f"{name} is partitioned"] = is_partitioned(model) and not is_left_whole(model)
        with pytest.raises(hf_zero.UsageError, match="partitioned already"):
            leave_whole(model)
    facts["named"] = leave_whole(plain) is plain and is_left_whole(plain)
    with disabled():
        facts["outside"] = not is_partitioned(load(folder))
    facts["put back"] = state_of_libraries() == before
    return facts


@pytest.mark.parametrize("is_activated", [False, True])
def test_models_loaded_under_disabled_stay_whole(folder: str, is_activated: bool) -> None:
    for facts in run_ranks(facts_of_whole_models, 2, folder, is_activated):
        assert [name for name, is_true in facts.items() if not is_true] == []


# --- between loading and training -----------------------------------------------------------------------------------


def problems_of_lora(folder: str, stage: int) -> list[str]:
    """Runs on a rank: adapters on a loaded model, from ranks with different seeds, trained as the unsharded ones."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "embed_tokens"], lora_dropout=0.0)
    rank, ranks = dist.get_rank(), list(range(dist.get_world_size()))
    found = []
    for is_late in (False, True):
        torch.manual_seed(5)
        reference = get_peft_model(load(folder), copy.deepcopy(lora))
        with hf_zero.Init({"stage": stage, "timeout_s": 20}):
            model = load(folder)
        torch.manual_seed(5 + rank)
        model = get_peft_model(model, copy.deepcopy(lora))
        if not is_late:
            hf_zero.shard_model(model)
            found += differences(reference, model, has_engine=True)
        model(**CASES["llama"].batch(9, rank))  # a late engine comes here, before the optimizer
        losses = train(model.train(), "llama", [rank], 3)
        wanted = train(reference.train(), "llama", ranks, 3)[rank :: len(ranks)]
        gap = max(farthest(reference, model), *(abs(a - b) for a, b in zip(losses, wanted, strict=True)))
        if gap > 4e-6:
            found.append(f"{is_late=}: {gap} away after training")
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        if not trained or any("lora" not in name for name in trained):
            found.append(f"trained: {trained}")
    return found


@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 1), (2, 3), (3, 3)])
def test_adapters_may_be_added_to_a_loaded_model(folder: str, num_ranks: int, stage: int) -> None:
    """Before `shard_model`, and before the first forward."""
    assert run_ranks(problems_of_lora, num_ranks, folder, stage) == [[]] * num_ranks


def problems_of_resizing(folder: str, stage: int) -> Problems:
    """Runs on a rank: more and fewer rows, tied and untied, before the engine and under it, against the unsharded model."""
    problems: Problems = {}
    rank, ranks = dist.get_rank(), list(range(dist.get_world_size()))
    for name in ("llama", "gpt2"):
        for num_rows in (40, 37, 30):
            for has_engine in (False, True):

                def check(name: str = name, num_rows: int = num_rows, has_engine: bool = has_engine) -> list[str]:
                    reference = load(folder, name)
                    with hf_zero.Init({"stage": stage, "timeout_s": 20}):
                        model = load(folder, name)
                    if has_engine:
                        hf_zero.shard_model(model)
                    for each in (reference, model):
                        torch.manual_seed(9)
                        each.resize_token_embeddings(num_rows)
                    hf_zero.shard_model(model)
                    found = differences(reference, model, has_engine=True)
                    if num_rows >= 37:  # the batches' vocabulary
                        losses = train(model.train(), name, [rank])
                        wanted = train(reference.train(), name, ranks)[rank :: len(ranks)]
                        gap = max(farthest(reference, model), *(abs(a - b) for a, b in zip(losses, wanted)))
                        found += [f"{gap} away after training"] if gap > 4e-6 else []
                    return found

                collect(problems, f"{name} to {num_rows}, {has_engine=}", check)
    return problems


@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 2), (2, 3), (3, 3)])
def test_embeddings_may_be_resized(folder: str, num_ranks: int, stage: int) -> None:
    assert run_ranks(problems_of_resizing, num_ranks, folder, stage) == [{}] * num_ranks


def facts_of_a_late_engine(is_inference: bool, has_part: bool) -> list[Any]:
    """Runs on a rank: the engine comes with the first forward, with parts that were added before, and is for training."""
    with hf_zero.Init(ZERO_3):
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        part = nn.Linear(2, 2)
    if has_part:
        model.append(part)
    model.append(nn.Linear(2, 6))
    engines = [hf_zero.engine_of(model)]
    with torch.inference_mode() if is_inference else torch.no_grad():
        output = model(torch.ones(3))
    engines.append(hf_zero.engine_of(model))
    model(torch.ones(3)).sum().backward()
    engines.append(hf_zero.engine_of(model))
    is_cut = all(isinstance(param, DTensor) and isinstance(param.grad, DTensor) for param in model.parameters())
    return [engines[0] is None, engines[1] is engines[2] is not None, is_cut, tuple(output.shape) == (6,)]


@pytest.mark.parametrize("is_inference", [False, True])
def test_the_engine_comes_with_the_first_forward(is_inference: bool) -> None:
    assert run_ranks(facts_of_a_late_engine, 2, is_inference, False) == [[True] * 4] * 2


def test_a_part_made_under_init_is_run_by_the_engine_of_the_whole() -> None:
    assert run_ranks(facts_of_a_late_engine, 2, False, True) == [[True] * 4] * 2


def facts_of_copies() -> list[bool]:
    """Runs on a rank: deep copies of a constructed model, made inside and after `Init`, train by themselves.

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
    facts = []
    for each in (model, inside, after):
        train(each.train(), "gpt2", [rank])
        facts += [farthest(reference, each) < 4e-6, each.lm_head.weight is each.transformer.wte.weight]
    storages = {each.lm_head.weight.to_local().data_ptr() for each in (model, inside, after)}
    return [*facts, len(storages) == 3]


def test_copies_of_a_constructed_model_are_models_of_their_own() -> None:
    assert run_ranks(facts_of_copies, 2) == [[True] * 7] * 2


def moved_models() -> list[str]:
    """Two models under Init, each given to `shard_model` after it was moved, which drops parameters' attributes."""
    models = []
    for stage in (1, 3):
        with hf_zero.Init({"stage": stage, "timeout_s": 20.0}):
            models.append(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    found = []
    for model in models:
        for param in model.parameters():
            vars(param).clear()
        found.append(str(hf_zero.shard_model(model.to("cpu")).world.config.stage))
    return found


def test_a_moved_model_is_still_that_of_its_own_ranks_and_configuration() -> None:
    for num_ranks in (1, 2):
        assert all(found == ["1", "3"] for found in run_ranks(moved_models, num_ranks))


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
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
