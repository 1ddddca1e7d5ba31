"""The plain Trainer, TRL's SFTTrainer and `ZeroAccelerator` over slices of sequences, against one process."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import TorchContextParallelConfig
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer

import hf_zero as zero
from hf_zero.errors import ConfigError, UsageError
from hf_zero.integrations.accelerate.tensor_axis import with_axes
from tests.integrations.trainer.axis_runs import assert_equal, rows, train
from tests.integrations.trl_inputs import config, text, tokenizer
from tests.ranks import on_ranks, run_alone, run_ranks
from tests.sequence_axis import make


def _train(*args: Any, **options: Any) -> dict[str, Any]:
    return train(functools.partial(make, "llama"), *args, **options)


def test_trainer_trains_evaluates_and_resumes_as_one_process(tmp_path: Path) -> None:
    reference = run_alone(_train, str(tmp_path / "one"), 2, None)
    sliced = run_ranks(_train, 2, str(tmp_path / "a"), 2, {"stage": 3}, sp_size=2, saves=True)
    assert all(each["losses"] == sliced[0]["losses"] for each in sliced)
    assert_equal(sliced[0], reference)
    middle = str(tmp_path / "a" / "checkpoint-2")
    assert_equal(run_alone(_train, str(tmp_path / "b"), 2, {"stage": 2}, resume=middle), reference, first=2)
    by_context = run_ranks(_train, 2, str(tmp_path / "c"), 2, {"stage": 3}, resume=middle, cp_size=2)
    assert_equal(by_context[0], reference, first=2)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["sp_size", "cp_size"])
def test_losses_are_scaled_in_half_precision_as_in_one_process(axis: str, tmp_path: Path) -> None:
    (reference,) = run_ranks(_train, 1, str(tmp_path / "one"), 2, {"stage": 3}, fp16=True)
    for found in run_ranks(_train, 2, str(tmp_path / "two"), 2, {"stage": 3}, fp16=True, **{axis: 2}):
        assert found["step"] == reference["step"]
        for ours, theirs in zip(found["losses"], reference["losses"], strict=True):
            assert ours == pytest.approx(theirs, rel=5e-3)


@pytest.mark.slow
def test_trainer_goes_on_with_slices_and_other_batches_beside_them(tmp_path: Path) -> None:
    reference = run_alone(_train, str(tmp_path / "one"), 2, None)
    run_ranks(_train, 2, str(tmp_path / "a"), 1, {"stage": 1}, saves=True)
    ring = TorchContextParallelConfig(cp_comm_strategy="alltoall")
    for axes in (ParallelismConfig(sp_size=2), ParallelismConfig(cp_size=2, cp_handler=ring)):
        options = {"resume": str(tmp_path / "a" / "checkpoint-2"), "parallelism_config": axes}
        assert_equal(run_ranks(_train, 4, str(tmp_path / "b"), 1, {"stage": 3}, **options)[0], reference, first=2)


def _tune(out: str, packing: bool, zero_config: dict[str, Any] | None, axis: str = "sp_size") -> list[dict[str, float]]:
    """Supervised fine-tuning: packed texts of which no document sees another, or answers to prompts."""
    from trl import SFTConfig, SFTTrainer

    options = {
        "output_dir": out,
        "max_length": 16,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "packing": packing,
        "eval_packing": False,
    }
    kind = SFTConfig if zero_config is None else zero.with_zero(SFTConfig)
    args = kind(**options, **({} if zero_config is None else {"zero": zero_config, axis: 2}))
    texts = {"text": [text(number) for number in range(48)]}
    pairs = {"prompt": [text(number) for number in range(24)], "completion": [text(99 - n) for n in range(24)]}
    rows = Dataset.from_dict(texts if packing else pairs)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(tied=False))
    trainer = SFTTrainer(
        model, args, train_dataset=rows, eval_dataset=rows.select(range(8)), processing_class=tokenizer()
    )
    trainer.train()
    logs = [*trainer.state.log_history[:3], trainer.evaluate()]
    zero.undo()
    names = (
        "loss",
        "grad_norm",
        "entropy",
        "mean_token_accuracy",
        "num_tokens",
        "eval_loss",
        "eval_mean_token_accuracy",
    )
    return [{name: each[name] for name in names if name in each} for each in logs]


@pytest.mark.slow
def test_supervised_fine_tuning_by_context_is_that_of_one_process(tmp_path: Path) -> None:
    reference = run_alone(_tune, str(tmp_path / "one"), True, None)
    for found in run_ranks(_tune, 2, str(tmp_path / "two"), True, {"stage": 3}, "cp_size"):
        for ours, theirs in zip(found, reference, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "completions"])
def test_supervised_fine_tuning_is_that_of_one_process(tmp_path: Path, packing: bool) -> None:
    reference = run_alone(_tune, str(tmp_path / "one"), packing, None)
    for found in run_ranks(_tune, 2, str(tmp_path / "two"), packing, {"stage": 3, "collectives": "pairwise"}):
        for ours, theirs in zip(found, reference, strict=True):
            assert len(theirs) >= 2
            assert ours == pytest.approx(theirs, rel=1e-5)


@on_ranks(2)
def test_arguments_that_cannot_be_sliced_are_refused(tmp_path: Path) -> None:
    def refuses(match: str, config: dict[str, Any], **options: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            zero.ZeroTrainingArguments(output_dir=str(tmp_path), use_cpu=True, zero=config, **options)

    refuses("sp_size is 4 in zero, but 2 in the arguments", {"sp_size": 4}, sp_size=2)
    refuses("sp_size is 3, but 2 processes run", {"sp_size": 3})
    refuses("cp_size is 2 in zero, but 4 in the Para", {"cp_size": 2}, parallelism_config=ParallelismConfig(cp_size=4))
    refuses("label_smoothing_factor .* with cp_size", {"cp_size": 2}, label_smoothing_factor=0.1)
    refuses("label_smoothing_factor", {"sp_size": 2}, label_smoothing_factor=0.1)
    refuses("average_tokens_across_devices=False", {"sp_size": 2}, average_tokens_across_devices=False)
    refuses("tp_size or sp_size", {"sp_size": 2, "tp_size": 2})
    args = zero.ZeroTrainingArguments(output_dir=str(tmp_path), use_cpu=True, zero=3, sp_size=2)

    class Own(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(**inputs).logits.mean()

    with pytest.raises(UsageError, match="compute_loss of Own would see logits of a slice"):
        Own(make("llama"), args)
    zero.undo()


def test_axes_of_accelerate_are_those_of_the_configuration() -> None:
    config = zero.ZeroConfig(stage=3, cp_comm_strategy="alltoall")
    assert with_axes(config, ParallelismConfig(cp_size=2)).cp_comm_strategy == "alltoall"
    ring = TorchContextParallelConfig(cp_comm_strategy="alltoall")
    found = with_axes(zero.ZeroConfig(stage=3), ParallelismConfig(cp_size=2, dp_shard_size=2, cp_handler=ring))
    assert (found.cp_size, found.sp_size, found.cp_comm_strategy) == (2, 1, "alltoall")


@on_ranks(4, axis=["sp_size", "cp_size"], by_launcher=[True, False])
def test_accelerator_deals_out_each_batch_to_the_ranks_that_share_it(axis: str, by_launcher: bool) -> None:
    """The axes are the script's, or those of a `parallelism_config` in the file of `accelerate launch`."""
    said, given = {axis: 2, "dp_shard_size": 2}, {}
    if by_launcher:
        os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        os.environ.update({f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in said.items()})
    else:
        given = {"parallelism_config": ParallelismConfig(**said)}
    plugin = zero.ZeroPlugin(stage=2, collectives="pairwise")
    accelerator = zero.ZeroAccelerator(zero_plugin=plugin, **given)
    model, plain = make("llama"), make("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(rows(8, 0), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    batches = list(DataLoader(rows(8, 0), batch_size=2))  # type: ignore[arg-type]
    rank, seen = accelerator.process_index // 2, 0
    for step, batch in enumerate(loader):
        assert torch.equal(batch["input_ids"], batches[2 * step + rank]["input_ids"])
        loss = model(**batch).loss
        accelerator.backward(loss)
        losses = [plain(**each).loss for each in batches[2 * step : 2 * step + 2]]
        (sum(losses) / 2).backward()
        assert loss.item() == pytest.approx(losses[rank].item(), rel=1e-6)
        assert len(accelerator.gather_for_metrics(batch["input_ids"])) == 4
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        seen += 1
    assert seen == 2
