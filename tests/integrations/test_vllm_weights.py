"""TRL's hand-over to vLLM gives an engine the weights that it gives in one process, and leaves the model as it is."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hf_zero as zero
from hf_zero.integrations import vllm_weights
from tests.engine.twins import SHARDED, whole
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


@on_ranks(2, stage=SHARDED, mode=["colocate", "server"], kind=["plain", "lora"], case=["llama"])
def test_an_engine_gets_what_it_gets_in_one_process(stage: int, mode: str, kind: str, case: str) -> None:
    import peft

    vllm_weights.install()
    found: list[dict[str, Tensor]] = []
    config = peft.LoraConfig(
        r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False, modules_to_save=["lm_head"]
    )
    models: list[Any] = []
    for _ in range(2):
        base = make_model(CASES[case])
        loader = Loader(base)
        torch.manual_seed(1)
        models.append((peft.get_peft_model(base, config) if kind == "lora" else base, loader))
    with torch.no_grad():
        for model, _ in models:
            for number, param in enumerate(p for p in model.parameters() if p.requires_grad):
                param.add_(0.01 * (number + 1))
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
