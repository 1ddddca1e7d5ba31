"""A process that writes a checkpoint of random weights, so that no measured process has to make them."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from hf_zero.bench.processes import options, report
from hf_zero.plan.models import config_of


def main() -> None:
    """Write `folder`: a causal language model of `model`, a name or a folder for `config_of`, in `dtype`."""
    chosen = options()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(chosen["model"]), dtype=getattr(torch, chosen["dtype"]))
    model.save_pretrained(chosen["folder"])
    report({})


if __name__ == "__main__":
    main()
