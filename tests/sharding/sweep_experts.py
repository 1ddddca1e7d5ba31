"""Every causal language model of transformers with experts, some on each of two ranks, beside one process.

Run `python -m tests.sharding.sweep_experts`, with the model types as arguments, or none for all of them: each is right, or
refused by name.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported, which reads them once
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_zero as zero
from tests.architectures.configs import tiny_config
from tests.ranks import RankError, close_pool, run_ranks
from tests.sharding.sequence.sweep import LOSS, batch_of, first_difference, without_dropout


def check(model_type: str, class_name: str) -> str:
    """What becomes of a model of this type; called on two ranks."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    try:
        model = getattr(transformers, class_name)(tiny_config(model_type)).train()
    except Exception as error:
        return f"cannot be built: {type(error).__name__}: {error}"
    if not any("experts" in name for name, _ in model.named_parameters()):
        return "has no experts"
    without_dropout(model)
    reference = copy.deepcopy(model)
    batches = [batch_of(model, seed) for seed in (1, 2)]
    try:
        losses = [reference(**batch).loss for batch in batches]
        (sum(losses) / 2).backward()
    except Exception as error:
        return f"does not run in one process: {type(error).__name__}: {error}"
    try:
        config = zero.ZeroConfig(stage=1, ep_size=2, collectives="pairwise", timeout_s=15)
        engine = zero.shard_model(model, config)
        loss = model(**batches[engine.world.rank]).loss
        loss.backward()
    except zero.ZeroError as error:
        return f"refused: {error}"
    expected = float(losses[engine.world.rank].detach())
    if abs(loss.item() - expected) > LOSS * abs(expected):
        return f"WRONG: the loss is {loss.item()}, not {expected}"
    found = first_difference(model, reference)
    engine.close()
    return f"WRONG: {found}" if found else "right"


def main() -> None:
    """Print a line for each type that has experts."""
    from tests.sharding import sweep_experts  # by its name, which ranks import

    for model_type in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        name = names if isinstance(names, str) else names[0]
        try:
            found = run_ranks(sweep_experts.check, 2, model_type, name)[0]
        except RankError as error:
            found = f"ERROR: {error.failures[0].type_name}: {error.failures[0].message}"
        if found != "has no experts":
            print(f"{model_type:28} {name:36} {found.splitlines()[0][:200]}", flush=True)
    close_pool()


if __name__ == "__main__":
    main()
