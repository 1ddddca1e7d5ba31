"""What is logged beside the loss, and which rank is named as slow."""

from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from transformers import Trainer

import hf_zero as zero
from hf_zero.integrations.trainer import metrics
from hf_zero.integrations.trainer.metrics import Metrics
from hf_zero.plan.summary import peak_of
from tests.models import CASES, make_model
from tests.ranks import on_ranks

_CASE = CASES["llama"]


@on_ranks(2)
def test_training_logs_waiting_traffic_and_peak(tmp_path: Path) -> None:
    rows = [{name: tensor[0] for name, tensor in _CASE.batch(step, 0).items()} for step in range(8)]
    arguments = zero.ZeroTrainingArguments(
        str(tmp_path),
        zero=3,
        logging_steps=2,
        max_steps=4,
        per_device_train_batch_size=1,
        report_to="none",
        eval_strategy="steps",
        eval_steps=4,
    )
    trainer = Trainer(make_model(_CASE), arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    engine = zero.engine_of(trainer.model)
    assert engine is not None
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [2, 4]
    for entry in logs:
        assert 0 <= entry["zero/exposed"] <= entry["zero/waiting"] <= 1
        assert 0 < entry["zero/peak"] <= peak_of(engine.world.device) / 2**30 + 1e-3
        assert entry["zero/traffic"] > 0
    whole = sum(param.numel() * 4 for param in trainer.model.parameters()) / 2**20
    # A gather and a sum of half the model each: its few units all stay whole from the forward to the backward.
    assert logs[0]["zero/traffic"] == pytest.approx(whole, abs=0.002)
    assert not any(
        key.startswith("zero/") for entry in trainer.state.log_history if "loss" not in entry for key in entry
    )


@on_ranks(3)
def test_a_rank_for_which_others_wait_is_named_once() -> None:
    engine = zero.shard_model(make_model(_CASE), 1)
    said: list[str] = []
    with mock.patch.object(metrics.logger, "warning", lambda text, *args: said.append(text % args)):
        found = Metrics(engine, 10)
        for step in range(11, 161):
            engine.world.ledger.add("gather", "unit", 0).seconds += 0.0 if dist.get_rank() == 1 else 1e3
            found.compare(step)
    assert len(said) == (dist.get_rank() == 0)
    assert all(text.startswith("rank 1 is slow: the others waited for it") for text in said)


@on_ranks(2)
def test_ranks_that_wait_alike_are_not_named() -> None:
    engine = zero.shard_model(make_model(_CASE), 1)
    with mock.patch.object(metrics.logger, "warning", lambda *_: pytest.fail("a rank is named")):
        found = Metrics(engine, 0)
        engine.world.ledger.add("gather", "unit", 0).seconds += 1e3
        found.compare(50)
    assert found.since_last(0) == {}
