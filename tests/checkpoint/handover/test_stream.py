"""Whole weights are handed over as `save_pretrained` would write them, in buckets, in every stage."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.checkpoint.handover.bucket import LABEL
from hf_zero.engine.engine import engine_of
from tests.checkpoint.test_export import changed
from tests.engine.twins import EXCHANGES, STAGES, whole
from tests.models import CASES, AwkwardMLP, make_model
from tests.ranks import by_hand, on_ranks


def written(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """What the plain library writes of the plain model."""
    if dist.get_rank() == 0:
        with zero.disabled():
            model.save_pretrained(folder)  # type: ignore[operator]
    dist.barrier()
    return load_file(folder / "model.safetensors")


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
        assert type(found[name]) is Tensor and found[name].is_contiguous() and not found[name].requires_grad


def taken(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    items = list(zero.whole_parameters(model, **options))
    assert len({name for name, _ in items}) == len(items)
    return dict(items)


@on_ranks(2, 3, stage=STAGES, name=["llama", "gpt2", "mixtral", *by_hand("t5")])
def test_names_and_values_are_those_of_save_pretrained(stage: int, name: str, tmp_path: Path) -> None:
    model = changed(name)
    wanted = written(model, tmp_path / f"{stage}{name}")
    zero.shard_model(model, {"stage": stage, "collectives": "pairwise"})
    for bucket_bytes in (1, 3000, 1 << 30):
        assert_same(taken(model, bucket_bytes=bucket_bytes), wanted)


@on_ranks(2, stage=STAGES, collectives=EXCHANGES)
def test_after_steps_new_values_arrive(stage: int, collectives: str) -> None:
    case = CASES["gpt2"]  # tied
    model = make_model(case)
    zero.shard_model(model, {"stage": stage, "collectives": collectives})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    last: dict[str, Tensor] = {}
    for step in range(2):
        case.loss(model, case.batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        found = taken(model, bucket_bytes=5000)
        state = {name: whole(value) for name, value in model.state_dict().items() if name in found}
        assert_same(found, state)
        assert not last or not torch.equal(found["transformer.wte.weight"], last["transformer.wte.weight"])
        last = found


@on_ranks(2, stage=[1, 3])
def test_names_of_the_model_are_those_of_its_parameters(stage: int) -> None:
    model = changed("gpt2")
    wanted = {name: param.detach().clone() for name, param in model.named_parameters()}
    zero.shard_model(model, {"stage": stage, "collectives": "pairwise"})
    assert_same(taken(model, names="model"), wanted)


@on_ranks(3)
def test_models_that_are_not_of_transformers_and_ranks_without_rows() -> None:
    torch.manual_seed(0)
    model = AwkwardMLP()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    zero.shard_model(model, {"stage": 3, "collectives": "pairwise"})
    found = taken(model, bucket_bytes=64)
    assert set(found) <= set(wanted)
    assert_same(found, {name: wanted[name] for name in found})
    assert {id(p) for n, p in model.named_parameters(remove_duplicate=False) if n in found} == set(
        map(id, model.parameters())
    )


@on_ranks(2, stage=[2, 3])
def test_each_byte_is_gathered_once_in_the_dtype_asked_for(stage: int) -> None:
    model = changed("llama")
    wanted = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    zero.shard_model(model, {"stage": stage, "collectives": "pairwise"})
    engine = engine_of(model)
    assert engine is not None
    layouts = [engine.world.layout_of(param) for param in model.parameters()]
    received = sum(layout.numel - layout.local_numel(dist.get_rank()) for layout in layouts if layout.num_ranks > 1)
    for dtype, size in ((None, 4), (torch.bfloat16, 2)):
        engine.world.ledger.reset()
        found = taken(model, bucket_bytes=4000, dtype=dtype)
        line = engine.world.ledger.entries.get(("gather", LABEL))
        if stage == 3:
            assert line is not None
            assert line.bytes == received * size  # what the other rank has, once
        else:
            assert line is None  # they are whole on every rank
    assert_same(found, wanted)


@on_ranks(2)
def test_no_more_than_two_buckets_are_whole_at_a_time() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    model = Blocks()
    zero.shard_model(model, {"stage": 3, "collectives": "pairwise", "keep_whole_numel": 0})
    size = 64 * 64 * 4
    alive: list[int] = []
    held: dict[int, int] = {}
    allocate = torch.empty

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        made = allocate(*args, **kwargs)
        if made.nbytes >= size:
            storage = made.untyped_storage()
            key = storage._cdata
            held[key] = made.nbytes
            weakref.finalize(made, held.pop, key, None)
        alive.append(sum(held.values()))
        return made

    torch.empty = counting
    try:
        for _, tensor in zero.whole_parameters(model, bucket_bytes=2 * size):
            alive.append(sum(held.values()))
            del tensor
    finally:
        torch.empty = allocate
    assert 2 * size < max(alive) <= 4 * size


@on_ranks(2, stage=[1, 3])
def test_what_is_frozen_and_unchanged_is_not_sent_again(stage: int) -> None:
    case = CASES["llama"]
    model = make_model(case)
    model.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]
    zero.shard_model(model, {"stage": stage, "collectives": "pairwise"})
    first = zero.whole_parameters(model, bucket_bytes=4000)
    names = {name for name, _ in first}
    second = zero.whole_parameters(model, bucket_bytes=4000, since=first)
    assert names - {name for name, _ in second} == {"model.embed_tokens.weight"}
    with torch.no_grad():
        model.get_input_embeddings().weight[0, 0] += 1  # type: ignore[operator]
    third = zero.whole_parameters(model, bucket_bytes=4000, since=second)
    assert {name for name, _ in third} == names


@on_ranks(2, stage=[1, 3])
def test_another_thread_takes_what_this_one_gathers(stage: int) -> None:
    model = changed("llama")
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    zero.shard_model(model, {"stage": stage, "collectives": "pairwise"})
    is_first = dist.get_rank() == 0
    threads: list[int] = []

    def read(items: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        threads.append(threading.get_ident())
        return dict(items)

    found = zero.whole_parameters(model, bucket_bytes=3000, keep=is_first).send(read)
    assert (found is None) == (not is_first) and threading.get_ident() not in threads
    if found is not None:
        assert_same(found, wanted)

    def fail(items: Iterator[tuple[str, Tensor]]) -> None:
        next(items)
        raise ValueError("the engine is gone")

    with pytest.raises(zero.CollectiveError, match="failed on rank 0") as caught:
        zero.whole_parameters(model, bucket_bytes=3000, keep=is_first).send(fail)
    assert isinstance(caught.value.__cause__, ValueError) == is_first


@on_ranks(2, stage=[0, 1, 3], kind=["lora", "dora", "saved"])
def test_adapters_are_merged_into_what_is_handed_over_only(stage: int, kind: str) -> None:
    import peft

    options = {"dora": {"use_dora": True}, "saved": {"modules_to_save": ["lm_head"]}}.get(kind, {})
    made = [make_model(CASES["llama"]) for _ in range(2)]
    config = {"r": 3, "target_modules": ["q_proj", "embed_tokens"], "init_lora_weights": False, **options}
    if kind == "dora":
        config["target_modules"] = ["q_proj"]
    adapted = []
    for each in made:
        torch.manual_seed(1)
        adapted.append(peft.get_peft_model(each, peft.LoraConfig(**config)))
    plain, ours = adapted
    wanted = {name: value.clone() for name, value in plain.merge_and_unload().state_dict().items()}
    zero.shard_model(ours, {"stage": stage, "collectives": "pairwise"})
    before = {name: whole(value).clone() for name, value in ours.state_dict().items()}
    assert_same(taken(ours, bucket_bytes=3000), wanted)
    assert all(torch.equal(whole(value), before[name]) for name, value in ours.state_dict().items())
