"""vLLM as TRL sees it, made of plain transformers: an engine in the process, or a server and TRL's client that talks to it.

What TRL imports, passes and reads was recorded from TRL's source (`generation/vllm_generation.py`, `vllm_client.py`), and what
vLLM does with it from vLLM's: an engine that sleeps loses its weights, and the server is told names, dtypes and shapes
before it gets bytes, which come packed, from whoever asks for one tensor after the other.

It generates greedily. Copies of a prompt differ in the first token: the second copy takes the second best, and so on.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_zero as zero
from hf_zero.changes import Changes
from tests.integrations.vllm_stand_in import Loader

PACKED_BYTES = 2000  # vLLM packs a gigabyte at a time


class SamplingParams(SimpleNamespace):
    """What TRL asks for."""


class Engine:
    """`vllm.LLM`: takes what TRL gives it, and no other argument.

    Attributes:
        texts: all token ids that it has generated.
        hand_overs: its weights after each hand-over.
    """

    made: list[Engine] = []  # noqa: RUF012 - where a test finds it

    def __init__(
        self,
        model: str,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        enable_sleep_mode: bool = False,
        model_impl: str = "auto",
        distributed_executor_backend: str | None = None,
        seed: int = 0,
        max_num_batched_tokens: int | None = None,
        logprobs_mode: str = "raw_logprobs",
        quantization: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        assert tensor_parallel_size == 1 and distributed_executor_backend in ("external_launcher", None)
        with zero.disabled():
            self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self.loader = Loader(self._model)
        self._can_sleep, self._asleep = enable_sleep_mode, set[str]()
        self.texts: list[list[int]] = []
        self.hand_overs: list[dict[str, Tensor]] = []
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)),
            model_config=SimpleNamespace(max_model_len=max_model_len),
        )
        Engine.made.append(self)

    def _load(self, weights: Any) -> None:
        assert "weights" not in self._asleep, "weights are loaded into memory that is not there"
        self.loader.load_weights(weights)

    def sleep(self, level: int) -> None:
        assert self._can_sleep and level == 2
        self._asleep = {"weights", "kv_cache"}
        for target in self.loader.targets.values():
            target.fill_(torch.nan)  # level 2 gives them up

    def wake_up(self, tags: list[str]) -> None:
        assert self._can_sleep
        self._asleep -= set(tags)

    def reset_prefix_cache(self) -> None:
        """Called at the end of a hand-over."""
        self.hand_overs.append({name: value.clone() for name, value in self.loader.targets.items()})

    @torch.no_grad()
    def generate(self, prompts: list[Any], sampling_params: SamplingParams, use_tqdm: bool = True) -> list[Any]:
        assert not self._asleep and not use_tqdm
        for name, param in self._model.named_parameters():
            param.copy_(self.loader.parts[name])
        seen: dict[tuple[int, ...], int] = {}
        outputs = []
        for prompt in prompts:
            ids = self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt["prompt_token_ids"]
            found = []
            for _ in range(sampling_params.n):
                seen[tuple(ids)] = seen.get(tuple(ids), -1) + 1
                found.append(self._complete(list(ids), seen[tuple(ids)], sampling_params))
            outputs.append(SimpleNamespace(prompt_token_ids=list(ids), outputs=found))
        return outputs

    def _complete(self, ids: list[int], copy: int, wanted: SamplingParams) -> Any:
        completion: list[int] = []
        logprobs = []
        while len(completion) < wanted.max_tokens and self._tokenizer.eos_token_id not in completion:
            logits = self._model(torch.tensor([ids + completion])).logits[0, -1].float() / wanted.temperature
            chosen = int(logits.topk(copy + 1).indices[-1 if not completion else 0])
            entry = SimpleNamespace(logprob=float(logits.log_softmax(0)[chosen]), rank=1)
            completion.append(chosen)
            logprobs.append({chosen: entry})
        self.texts.append(completion)
        asked = getattr(wanted, "logprobs", None) is not None
        return SimpleNamespace(token_ids=completion, logprobs=logprobs if asked else None)


class Server:
    """`vllm serve` with a weight-transfer engine; what is posted to it is answered in a thread of the client's."""

    def __init__(self, model: str) -> None:
        self.engine, self.name = Engine(model), model
        self.packed: queue.Queue[Tensor] = queue.Queue()
        self._is_updating = False

    def post(self, path: str, json: dict[str, Any]) -> Any:
        return getattr(self, "_" + path.strip("/").replace("/", "_"))(**json)

    def _start_weight_update(self) -> dict[str, Any]:
        assert not self._is_updating
        self._is_updating = True
        return {}

    def _finish_weight_update(self) -> dict[str, Any]:
        assert self._is_updating
        self._is_updating = False
        return {}

    def _update_weights(self, update_info: dict[str, Any]) -> dict[str, Any]:
        assert self._is_updating
        buffer = torch.empty(0, dtype=torch.uint8)
        for name, dtype_name, shape in zip(
            *(update_info[key] for key in ("names", "dtype_names", "shapes")), strict=True
        ):
            dtype = getattr(torch, dtype_name)
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            while buffer.numel() < num_bytes:
                buffer = torch.cat([buffer, self.packed.get(timeout=60)])
            self.engine._load([(name, buffer[:num_bytes].clone().view(dtype).view(shape))])
            buffer = buffer[num_bytes:]
        assert not buffer.numel() and self.packed.empty()
        return {}

    def _reset_prefix_cache(self) -> dict[str, Any]:
        self.engine.reset_prefix_cache()
        return {"success": True}

    def _v1_completions(self, model: str, prompt: list[list[int]], **sampling: Any) -> dict[str, Any]:
        assert model == self.name
        wanted = SamplingParams(**sampling)
        prompts = [each if isinstance(each, str) else {"prompt_token_ids": each} for each in prompt]
        choices = []
        for output in self.engine.generate(prompts, wanted, use_tqdm=False):
            for each in output.outputs:
                known = {"prompt_token_ids": output.prompt_token_ids, "token_ids": each.token_ids}
                choices.append({**known, "logprobs": self._logprobs(each)})
        return {"choices": choices}

    @staticmethod
    def _logprobs(output: Any) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        tokens = [f"token_id:{token}" for token in output.token_ids]
        values = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
        tops = [{token: value} for token, value in zip(tokens, values, strict=True)]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}


def broadcast_packed(
    iterator: Iterator[tuple[str, Tensor]], group: Any, src: int, post_iter_func: Callable[[Any], Tensor]
) -> None:
    """As vLLM's `packed_nccl_broadcast_producer`: tensors are kept until there are enough, and then go as one."""
    assert src == 0
    kept: list[Tensor] = []
    for item in iterator:
        kept.append(post_iter_func(item).contiguous().view(torch.uint8).view(-1))
        if sum(each.numel() for each in kept) > PACKED_BYTES:
            group.put(torch.cat(kept))
            kept = []
    if kept:
        group.put(torch.cat(kept))


def client_of(server: Callable[[], Server]) -> type:
    """TRL's client, which reaches the server without a network.

    Args:
        server: makes the server when the client is made.
    """
    from trl.generation.vllm_client import VLLMClient

    class Client(VLLMClient):  # type: ignore[misc]
        def __init__(self, base_url: str, group_port: int = 0, connection_timeout: float = 0.0) -> None:
            self.base_url, self.group_port, self.communicator = base_url, group_port, None
            self._updating_weights = False
            self.server = server()
            self.model = self.server.name

        def _post(self, url: str, **kwargs: Any) -> Any:
            return self.server.post(url.removeprefix(self.base_url), kwargs.get("json", {}))

        def get_server_info(self) -> dict[str, Any]:
            return {
                "model_config": {"logprobs_mode": "processed_logprobs"},
                "weight_transfer_config": {"backend": "nccl"},
            }

        def init_communicator(self, device: Any = 0) -> None:
            self.communicator = self.server.packed

    return Client


class _WithAccelerator:
    """`torch` for online DPO, which asks for an accelerator before it makes a server's client."""

    accelerator = SimpleNamespace(current_accelerator=lambda: torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def vllm(folder: str) -> Iterator[list[Engine]]:
    """Within: TRL finds vLLM. Gives the engines that are made.

    Args:
        folder: of the model that the server serves.
    """
    generation: Any = importlib.import_module("trl.generation.vllm_generation")
    client: Any = importlib.import_module("trl.generation.vllm_client")
    names = ["trl.experimental.online_dpo.online_dpo_trainer", "trl.trainer.distillation_trainer"]
    modules = [generation, client, *(importlib.import_module(name) for name in names)]
    made = client_of(lambda: Server(folder))
    with Changes() as changes:
        for module in modules:
            changes.replace(module, "is_vllm_available", lambda min_version=None: True)
            changes.replace(module, "LLM", Engine)
            changes.replace(module, "SamplingParams", SamplingParams)
            if module is not client:
                changes.replace(module, "VLLMClient", made)
        changes.replace(client, "_HAS_STATEFUL_TRAINER_ENGINE", True)
        changes.replace(client, "_HAS_RESET_PREFIX_CACHE_SUCCESS", True)
        changes.replace(client, "packed_nccl_broadcast_producer", broadcast_packed)
        changes.replace(modules[2], "torch", _WithAccelerator())
        Engine.made = []
        yield Engine.made
        Engine.made = []
