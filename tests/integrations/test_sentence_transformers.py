"""A model of sentence-transformers, trained by its own trainer and saved in all of its ways, beside DDP."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import hf_zero as zero
from tests.integrations.trainer.runs import arguments
from tests.ranks import by_hand, on_ranks

WORDS = ["make", "take", "open", "close", "read", "write", "file", "line", "name", "list", "tree", "code", "set"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny BERT and its tokenizer."""
    pytest.importorskip("sentence_transformers")
    path = tmp_path_factory.mktemp("bert")
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(path)
    return str(path)


def trained(folder: str, zero_config: dict[str, Any] | None) -> tuple[nn.Module, list[float]]:
    """A model with a layer of its own on a BERT, after two steps of the library's trainer, and its losses."""
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Dense

    kind = (
        SentenceTransformerTrainingArguments
        if zero_config is None
        else zero.with_zero(SentenceTransformerTrainingArguments)
    )
    options = {} if zero_config is None else {"zero": zero_config}
    args = arguments(folder, None, kind, max_steps=2, optim="adamw_torch", **options)
    model = SentenceTransformer(folder, device="cpu")
    torch.manual_seed(1)
    model.append(Dense(16, 5))
    texts = [" ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, 7)) for number in range(16)]
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict({"anchor": texts, "positive": texts[::-1]}),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    return model, [row["loss"] for row in trainer.state.log_history if "loss" in row]


@functools.cache
def oracle(folder: str) -> tuple[dict[str, Tensor], list[float]]:
    """What DDP makes of it."""
    model, losses = trained(folder, None)
    return {name: value.clone() for name, value in model.state_dict().items()}, losses


def assert_saved(path: Path, expected: dict[str, Tensor]) -> None:
    from sentence_transformers import SentenceTransformer

    with zero.disabled():
        found = SentenceTransformer(str(path), device="cpu").state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)


@on_ranks(2, stage=[1, 3, *by_hand(0, 2)], collectives=["pairwise"], timeout_s=120)
def test_training_and_every_way_of_saving_equal_ddp(stage: int, collectives: str, folder: str, tmp_path: Path) -> None:
    expected, losses = oracle(folder)
    try:
        model, found = trained(folder, {"stage": stage, "collectives": collectives})
        assert found == pytest.approx(losses, rel=1e-5)
        place = tmp_path / str(stage)
        model.save_pretrained(str(place / "whole"))
        model.save(str(place / "modules"))
        model[0].model.save_pretrained(place / "part")
        dist.barrier()
        for name in ("whole", "modules"):
            assert_saved(place / name, expected)
        for name, value in _loaded(place / "part").items():
            torch.testing.assert_close(value, expected[f"0.model.{name}"], rtol=1e-4, atol=1e-5)
    finally:
        zero.undo()


def _loaded(path: Path) -> dict[str, Tensor]:
    with zero.disabled():
        return BertModel.from_pretrained(path).state_dict()
