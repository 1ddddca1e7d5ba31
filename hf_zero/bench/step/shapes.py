"""What `hf-zero bench step` trains: models, how they are changed before they train, and the batches they are given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_zero.errors import UsageError
from hf_zero.plan.models import SIZES, config_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}  # engines in turn draw other numbers

# By name: the type of a model of transformers, and arguments of its configuration.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-tied": ("gpt2", {"n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 512, **_NO_DROPOUT}),
    "qwen3-moe-64": (
        "qwen3_moe",
        {
            **{"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 4},
            **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192},
            **{"num_experts": 64, "num_experts_per_tok": 8},
        },
    ),
    "vit-small": (
        "vit",
        {
            **{"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6},
            **{"image_size": 128, "num_labels": 100},
        },
    ),
}


@dataclass(frozen=True)
class Shape:
    """A model and its batches.

    Attributes:
        model: a name in `SHAPES` or in `plan.models.SIZES`, or a folder with a config.
        checkpointing: recompute activations in backward.
        lora: train LoRA adapters of rank 8 on attention's projections, and nothing else.
        compiles: compile each block on its own, by `torch.compile`.

    Raises:
        UsageError: there is no such model.
    """

    model: str
    checkpointing: bool = False
    lora: bool = False
    compiles: bool = False

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> PretrainedConfig:
        """Of the model, anew."""
        from transformers import AutoConfig

        if self.model in SHAPES:
            kind, sizes = SHAPES[self.model]
            config: PretrainedConfig = AutoConfig.for_model(kind, **sizes)
            return config
        try:
            return config_of(self.model)
        except UsageError:
            names = ", ".join([*SIZES, *SHAPES])
            raise UsageError(
                f"{self.model!r} is not known, nor a folder with a config.json; choose from {names}"
            ) from None

    def make(self) -> nn.Module:
        """The model, the same on every rank: of float32 on the CPU, training."""
        from transformers import AutoModelForCausalLM, AutoModelForImageClassification

        torch.manual_seed(0)
        config = self.config()
        of_images = hasattr(config, "image_size")
        if not of_images:
            config.use_cache = False
        model: Any = (AutoModelForImageClassification if of_images else AutoModelForCausalLM).from_config(config)
        blocks = set(model._no_split_modules or ())
        if self.checkpointing:
            model.gradient_checkpointing_enable()
        if self.lora:
            model = _with_adapters(model)
        for block in [each for each in model.modules() if type(each).__name__ in blocks] if self.compiles else ():
            block.compile()
        made: nn.Module = model.train()
        return made

    def batches(self, batch_size: int, seq_len: int, seed: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
        """Random tokens (batch_size, seq_len), which are their own labels, or random images and classes, without end."""
        config = self.config()
        generator = torch.Generator().manual_seed(seed)
        while True:
            if hasattr(config, "image_size"):
                size = (batch_size, config.num_channels, config.image_size, config.image_size)
                images = torch.randn(size, generator=generator).to(device)
                classes = torch.randint(config.num_labels, (batch_size,), generator=generator).to(device)
                yield {"pixel_values": images, "labels": classes}
            else:
                tokens = torch.randint(config.vocab_size, (batch_size, seq_len), generator=generator).to(device)
                yield {"input_ids": tokens, "labels": tokens}


def _with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=8, target_modules=r".*\.(q_proj|k_proj|v_proj|o_proj|c_attn|query|key|value)")
    with_adapters: nn.Module = get_peft_model(model, adapters)
    return with_adapters
