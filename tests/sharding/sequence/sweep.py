"""Every causal language model of transformers, over slices on two ranks, beside one process: right, or refused by name.

Run `python -m tests.sharding.sequence.sweep`, with the model types as arguments, or none for all of them; with `--axis cp_size`
by context parallelism, with `--axis alltoall` over a ring.
"""

from __future__ import annotations

import argparse
import copy
import os
import warnings
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported, which reads them once
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_zero as zero
from tests.architectures.configs import FIRST_TEXT_TOKEN, tiny_config
from tests.engine.twins import whole
from tests.ranks import RankError, close_pool, run_ranks

_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "hidden_dropout")
_LENGTH, LOSS, _GRADIENT = 9, 2e-6, 1e-4  # relative


_AXES: dict[str, dict[str, Any]] = {
    "sp_size": {"sp_size": 2},
    "cp_size": {"cp_size": 2},
    "alltoall": {"cp_size": 2, "cp_comm_strategy": "alltoall"},
}


def check(model_type: str, class_name: str, axis: str = "sp_size") -> str:
    """What becomes of a model of this type; called on two ranks."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    try:
        model = getattr(transformers, class_name)(tiny_config(model_type)).train()
    except Exception as error:
        return f"cannot be built: {type(error).__name__}: {error}"
    without_dropout(model)
    reference, batch = copy.deepcopy(model), batch_of(model)
    try:
        expected = reference(**batch).loss
        expected.backward()
    except Exception as error:
        return f"does not run in one process: {type(error).__name__}: {error}"
    try:
        config = zero.ZeroConfig(stage=1, **_AXES[axis], collectives="pairwise", timeout_s=15)
        engine = zero.shard_model(model, config)
        loss = model(**batch).loss
        loss.backward()
    except zero.ZeroError as error:
        return f"refused: {error}"
    if abs(loss.item() - expected.item()) > LOSS * abs(expected.item()):
        return f"WRONG: the loss is {loss.item()}, not {expected.item()}"
    found = first_difference(model, reference)
    engine.close()
    return f"WRONG: {found}" if found else "right"


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in _DROPOUTS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def batch_of(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    """One sequence padded, one with a prompt that is no target."""
    vocabulary = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(min(FIRST_TEXT_TOKEN, vocabulary - 2), vocabulary, (2, _LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def first_difference(model: nn.Module, reference: nn.Module) -> str:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if (ours.grad is None) != (theirs.grad is None):
            return f"only one of the gradients of {name} is None"
        if ours.grad is None or theirs.grad is None:
            continue
        error = float((whole(ours.grad) - theirs.grad).abs().max() / (theirs.grad.abs().max() + 1e-5))
        if error > _GRADIENT:
            return f"the gradient of {name} is off by {error:.1e}"
    return ""


def main() -> None:
    """Print a line for each type."""
    from tests.sharding.sequence import sweep  # by its name, which ranks import

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--axis", choices=list(_AXES), default="sp_size")
    args = parser.parse_args()
    for model_type in args.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        name = names if isinstance(names, str) else names[0]
        try:
            found = run_ranks(sweep.check, 2, model_type, name, args.axis)[0]
        except RankError as error:
            found = f"ERROR: {error.failures[0].type_name}: {error.failures[0].message}"
        print(f"{model_type:28} {name:36} {found.splitlines()[0][:200]}", flush=True)
    close_pool()


if __name__ == "__main__":
    main()
