"""TRL's hand-over to vLLM gives an engine the weights that it gives in one process, and leaves the model as it is."""

from __future__ import annotations

import collections
import importlib
import sys
import threading
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from safetensors.torch import load_file
from torch import Tensor

import hf_zero as zero
from hf_zero.integrations import vllm_weights
from tests.engine.twins import SHARDED, whole
from tests.integrations.trainer.runs import undone
from tests.integrations.vllm_stand_in import Loader
from tests.models import CASES, make_model
from tests.ranks import on_ranks


class Client:
    """What TRL calls of its client: it announces names, dtypes and shapes, and then streams exactly those."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def update_named_params(self, metadata: list[tuple[str, str, list[int]]], named_params: Any) -> None:
        taken = []
        for name, weight in named_params:  # packed as they come: the next step of the iterator may change them
            self.loader.load_weights([(name, weight)])
            taken.append((name, str(weight.dtype).removeprefix("torch."), list(weight.shape)))
        assert metadata == taken

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""


def generation(model: Any, loader: Loader, mode: str) -> Any:
    """TRL's `VLLMGeneration`, as it is after its engine has been made."""
    from trl.generation.vllm_generation import VLLMGeneration

    made: Any = VLLMGeneration.__new__(VLLMGeneration)
    runner = types.SimpleNamespace(model=loader)
    worker = types.SimpleNamespace(model_runner=runner)
    executor = types.SimpleNamespace(driver_worker=worker)
    made.llm = types.SimpleNamespace(
        llm_engine=types.SimpleNamespace(model_executor=executor), reset_prefix_cache=lambda: None
    )
    is_main = dist.get_rank() == 0
    made.accelerator = types.SimpleNamespace(is_main_process=is_main, device=torch.device("cpu"))
    made.model, made.mode, made.enable_sleep_mode, made._weight_metadata = model, mode, False, None
    made.vllm_client = Client(loader) if mode == "server" and is_main else None
    made._dist = types.SimpleNamespace(is_fsdp=False, gather_params=lambda params: torch.no_grad())
    return made


def twins(case: str, kind: str) -> list[tuple[Any, Loader]]:
    """Two models that are alike, with adapters that do something if the kind is "lora"; and what an engine has of each."""
    import peft

    config = peft.LoraConfig(
        r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False, modules_to_save=["lm_head"]
    )
    models: list[tuple[Any, Loader]] = []
    for _ in range(2):
        base = make_model(CASES[case])
        loader = Loader(base)
        torch.manual_seed(1)
        models.append((peft.get_peft_model(base, config) if kind == "lora" else base, loader))
    with torch.no_grad():
        for model, _ in models:
            for number, param in enumerate(p for p in model.parameters() if p.requires_grad):
                param.add_(0.01 * (number + 1))
    return models


@on_ranks(2, stage=SHARDED, mode=["colocate", "server"], kind=["plain", "lora"], case=["llama"])
@undone
def test_an_engine_gets_what_it_gets_in_one_process(stage: int, mode: str, kind: str, case: str) -> None:
    vllm_weights.install()
    found: list[dict[str, Tensor]] = []
    models = twins(case, kind)
    ours, loader = models[1]
    zero.shard_model(ours, {"stage": stage, "collectives": "pairwise"})
    before = {name: whole(value).clone() for name, value in ours.state_dict().items()}
    for model, target in models:
        made = generation(model, target, mode)
        made.sync_weights()
        made.sync_weights()
        found.append({name: value.clone() for name, value in target.targets.items()})
    if mode == "colocate" or dist.get_rank() == 0:
        assert loader.loaded
        for name, value in found[0].items():
            torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-6, msg=name)  # TRL's own merges drift
    assert all(torch.equal(whole(value), before[name]) for name, value in ours.state_dict().items())


class Transfer:
    """TRL's `WeightTransferClient`: another thread takes what comes, which has to be what was announced."""

    def __init__(self, loader: Loader, announced: list[tuple[str, torch.dtype, torch.Size]]) -> None:
        self.loader, self.announced = loader, announced

    def send_weights(self, items: Any) -> None:
        error: list[BaseException] = []

        def take() -> None:
            try:
                for (name, dtype, shape), (found, weight) in zip(self.announced, items, strict=True):
                    assert (found, weight.dtype, weight.shape) == (name, dtype, shape)
                    self.loader.load_weights([(found, weight)])
            except BaseException as each:
                error.append(each)

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        if error:
            raise error[0]

    def pause(self) -> None:
        """Nothing runs."""

    resume = pause


@on_ranks(2, stage=SHARDED, kind=["plain", "lora"], name=["grpo", "distillation"])
@undone
def test_asynchronous_trainers_hand_over_and_leave_the_model_as_it_is(stage: int, kind: str, name: str) -> None:
    vllm_weights.install()
    module: Any = importlib.import_module(f"trl.experimental.async_{name}.async_{name}_trainer")
    trainer = next(
        value for key, value in vars(module).items() if key in ("AsyncGRPOTrainer", "AsyncDistillationTrainer")
    )
    (reference, _), (ours, loader) = twins("llama", kind)
    zero.shard_model(ours, {"stage": stage, "collectives": "pairwise"})
    is_main = PartialState().is_main_process  # TRL's log asks for the state
    announced = [(key, each.dtype, each.shape) for key, each in module._iter_vllm_named_params(ours)]
    made: Any = trainer.__new__(trainer)
    made.accelerator = types.SimpleNamespace(
        is_main_process=is_main,
        device=torch.device("cpu"),
        unwrap_model=lambda model: model,
        wait_for_everyone=dist.barrier,
    )
    made.model, made._lora_sync, made._metrics = ours, False, {"train": collections.defaultdict(list)}
    made.weight_transfer = Transfer(loader, announced) if is_main else None
    made.rollout_worker, made.model_version = None, 0
    before = {key: whole(value).clone() for key, value in ours.state_dict().items()}
    made._sync_weight()
    assert all(torch.equal(whole(value), before[key]) for key, value in ours.state_dict().items())
    assert not is_main or (made.model_version == 1 and sorted(set(loader.loaded)) == sorted(loader.parts))
    if is_main:
        plain = reference.merge_and_unload() if kind == "lora" else reference
        for key, value in plain.named_parameters():
            torch.testing.assert_close(loader.parts[key], value.data, rtol=0, atol=0, msg=key)


@on_ranks(2)
@undone
def test_undo_puts_back_what_trl_had() -> None:
    names = list(vllm_weights._WRAPPERS)
    modules: list[Any] = [importlib.import_module(name) for name in names]
    owners = [
        *(value for module in modules for value in vars(module).values() if isinstance(value, type)),
        *modules,
    ]
    before = [dict(vars(owner)) for owner in owners]
    vllm_weights.install()
    vllm_weights.install()
    changed = [
        f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"
        for owner, old in zip(owners, before, strict=True)
        for name, value in vars(owner).items()
        if old.get(name) is not value
    ]
    assert {name.rpartition(".")[2] for name in changed} == {
        *("_iter_named_params", "sync_weights", "_move_model_to_vllm_inner"),
        *("_iter_vllm_named_params", "_streaming_iter", "_sync_weight_merged"),
    }
    zero.undo()
    assert [dict(vars(owner)) for owner in owners] == before
    assert not any(type(finder).__module__.startswith("hf_zero") for finder in sys.meta_path)


@on_ranks(2, stage=SHARDED)
@undone
def test_an_adapter_goes_alone_where_the_server_takes_adapters(stage: int, tmp_path: Path) -> None:
    import peft
    from trl.experimental.async_grpo.async_grpo_trainer import save_lora_adapter

    vllm_weights.install()
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        models.append(peft.get_peft_model(make_model(CASES["llama"]), lora))
    ours, plain = models
    zero.shard_model(ours, {"stage": stage, "collectives": "pairwise"})
    accelerator = types.SimpleNamespace(device=torch.device("cpu"), is_main_process=dist.get_rank() == 0)
    folder = tmp_path / f"policy{stage}"
    save_lora_adapter(ours, accelerator, "default", str(folder))  # a file is written by the main process alone
    dist.barrier()
    found = load_file(folder / "adapter_model.safetensors")
    wanted = peft.get_peft_model_state_dict(plain)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
