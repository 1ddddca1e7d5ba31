"""`generate` in stage 3: gathered once or for every token, with other lengths on each rank, alone, and between steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

import hf_zero as zero
from tests.engine.twins import EXCHANGES, SHORT_S, whole
from tests.models import CASES, make_model
from tests.ranks import by_hand, on_ranks

CASE = CASES["llama"]


def generated(model: nn.Module, length: int = 6, **options: Any) -> Tensor:
    model.eval()
    ids = torch.full((1, 3), 5)
    tokens = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    output = model.generate(input_ids=ids, **tokens, **options)
    model.train()
    return output


def make_pair(**config: Any) -> tuple[nn.Module, nn.Module, zero.ZeroEngine]:
    plain = make_model(CASE)
    model = copy.deepcopy(plain)
    return plain, model, zero.shard_model(model, {"stage": 3, **config})


def gathers(engine: zero.ZeroEngine) -> int:
    return engine.world.ledger.total("gather").calls


@on_ranks(2, choice=["auto", False, "1KiB", *by_hand(True, "1GiB")])
def test_tokens_are_those_of_plain_with_other_lengths_on_each_rank(choice: Any) -> None:
    is_once = choice in ("auto", True, "1GiB")
    plain, model, engine = make_pair(gather_for_generation=choice)
    for length in (4 + 3 * dist.get_rank(), 9):
        before = gathers(engine)
        assert torch.equal(generated(model, length), generated(plain, length))
        count = gathers(engine) - before
        assert count == len(engine.units) if is_once else count > 4 * len(engine.units)


@on_ranks(2, exchange=EXCHANGES)
def test_generation_between_steps_sees_new_weights_and_changes_nothing(exchange: str) -> None:
    plain, model, _ = make_pair(collectives=exchange)
    optimizers = [torch.optim.SGD(each.parameters(), lr=2.0) for each in (model, plain)]
    seen = []
    for step in range(3):
        CASE.loss(model, CASE.batch(step, dist.get_rank())).backward()
        for rank in range(2):
            (CASE.loss(plain, CASE.batch(step, rank)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen.append(generated(model))
        assert torch.equal(seen[-1], generated(plain))
    assert not torch.equal(seen[0], seen[-1])
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left.full_tensor(), right.detach())


@on_ranks(2)
def test_loaded_model_generates_before_anything_has_started_its_engine() -> None:
    plain = make_model(CASE)
    with zero.Init({"stage": 3}):
        model = type(plain)(plain.config)
    model.load_state_dict(plain.state_dict())
    length = 4 + 3 * dist.get_rank()
    assert torch.equal(generated(model, length), generated(plain, length))
    assert zero.engine_of(model) is not None and not zero.engine_of(model).gathering.holds_all
    assert torch.equal(generated(model, length), generated(plain, length))


@on_ranks(2)
def test_a_rank_that_generates_alone_before_there_is_an_engine_is_told_what_to_do() -> None:
    plain = make_model(CASE)
    with zero.Init({"stage": 3, "timeout_s": SHORT_S}):
        model = type(plain)(plain.config)
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(zero.CollectiveError, match=r"(?s)(?=.*generate)(?=.*rank 1).*GatheredParameters\(model\)"):
            generated(model)


class _Edit(LogitsProcessor):
    """Edits the head after the second token, as a callback of a user might."""

    def __init__(self, head: nn.Module) -> None:
        self.head, self.calls = head, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            with torch.no_grad():
                self.param.mul_(-1)
        return scores


@on_ranks(2)
def test_edit_during_generation_is_an_edit() -> None:
    plain, model, _ = make_pair()
    outputs = []
    for each in (plain, model):
        edit = _Edit(each.lm_head)
        edit.param = each.lm_head.weight
        outputs.append(generated(each, logits_processor=LogitsProcessorList([edit])))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], generated(make_model(CASE)))


class _Score(LogitsProcessor):
    """Runs the model with gradients during generation, as a guided decoder might."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.norms = model, []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = self.model(input_ids=input_ids, labels=input_ids).loss
            loss.backward()
        grads = [whole(param.grad) for param in self.model.parameters()]
        self.norms.append(torch.nn.utils.get_total_norm(grads).item())
        self.model.zero_grad()
        return scores


@on_ranks(2)
def test_gradients_during_generation_are_those_of_plain() -> None:
    plain, model, _ = make_pair()
    norms, outputs = [], []
    for each in (plain, model):
        score = _Score(each)
        outputs.append(generated(each, logits_processor=LogitsProcessorList([score])))
        norms.append(score.norms)
    assert torch.equal(*outputs)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@on_ranks(2)
def test_adapted_model_generates_as_plain() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    plain = peft.get_peft_model(make_model(CASE), config)
    model = copy.deepcopy(plain)
    zero.shard_model(model, {"stage": 3})
    length = 4 + 3 * dist.get_rank()
    assert torch.equal(generated(model, length), generated(plain, length))


@on_ranks(2, choice=["auto", False])
def test_a_rank_generates_alone_while_the_others_have_gone_on(choice: Any) -> None:
    plain, model, engine = make_pair(gather_for_generation=choice)
    CASE.loss(model, CASE.batch(0, dist.get_rank()))
    dist.barrier()
    if dist.get_rank() == 0:
        before = gathers(engine)
        assert torch.equal(generated(model), generated(plain))
        assert gathers(engine) == before
    dist.barrier()
    assert torch.equal(generated(model), generated(plain))


@on_ranks(2)
def test_a_rank_that_waits_for_others_in_generate_is_told_what_to_do() -> None:
    _, model, _ = make_pair(timeout_s=SHORT_S)
    dist.barrier()
    if dist.get_rank() == 0:  # the other has not gone on, as far as it tells
        with pytest.raises(zero.CollectiveError, match=r"(?s)(?=.*generate)(?=.*rank 1)"):
            generated(model)


@on_ranks(2)
def test_a_rank_generates_alone_inside_gathered_parameters() -> None:
    plain, model, _ = make_pair(timeout_s=SHORT_S)
    with zero.GatheredParameters(model):
        if dist.get_rank() == 0:
            assert torch.equal(generated(model), generated(plain))
    assert torch.equal(generated(model), generated(plain))


class ByHand(nn.Module):
    """A language model with a `generate` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embed(ids).cumsum(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * scale

    def generate(self, ids: Tensor, count: int, **options: float) -> Tensor:
        for _ in range(count):
            ids = torch.cat([ids, self(ids, **options)[:, -1:].argmax(-1)], 1)
        return ids


class Around(nn.Module):
    """A model of transformers inside another one, which hands on what `generate` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model(CASE)

    def forward(self, **given: Any) -> Any:
        return self.inner(**given)

    def generate(self, **given: Any) -> Tensor:
        return self.inner.generate(**given)


@on_ranks(2, is_once=[True, False])
def test_generate_written_by_hand_is_given_its_own_arguments(is_once: bool) -> None:
    torch.manual_seed(0)
    plain = ByHand()
    model = copy.deepcopy(plain)
    zero.shard_model(model, {"stage": 3, "gather_for_generation": is_once})
    ids = torch.tensor([[1, 2]])
    for options in ({}, {"scale": -1.0}):
        expected = plain.generate(ids, 5, **options)
        assert torch.equal(model.generate(ids, 5, **options), expected)


@on_ranks(2, is_once=[True, False])
def test_generate_of_a_model_around_another_keeps_the_ranks_in_step(is_once: bool) -> None:
    plain = Around()
    model = copy.deepcopy(plain)
    zero.shard_model(model, {"stage": 3, "gather_for_generation": is_once})
    length = 4 + 3 * dist.get_rank()
    assert torch.equal(generated(model, length), generated(plain, length))
