"""The methods of PEFT that the tests train: each with a small model and a configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
from torch import nn

from tests.models import CASES, Case, make_model

_ATTENTION = ["q_proj", "v_proj"]


@dataclass(frozen=True)
class Method:
    """One way to adapt a model.

    Attributes:
        config: makes its configuration.
        case: the model, by name in `CASES`.
    """

    config: Callable[[], peft.PeftConfig]
    case: str = "llama"

    @property
    def model(self) -> Case:
        """The model and its data."""
        return CASES[self.case]


def _lora(**options: Any) -> Callable[[], peft.PeftConfig]:
    options = {"r": 3, "target_modules": _ATTENTION, "init_lora_weights": "gaussian", **options}
    return lambda: peft.LoraConfig(**options)


def _prompt(kind: type[peft.PeftConfig], **options: Any) -> Callable[[], peft.PeftConfig]:
    return lambda: kind(task_type="CAUSAL_LM", num_virtual_tokens=3, **options)


METHODS = {
    "lora": Method(_lora()),
    "rslora": Method(_lora(use_rslora=True)),
    "dora": Method(_lora(use_dora=True)),
    "dora_bert": Method(_lora(use_dora=True, target_modules=["query", "dense"], task_type="SEQ_CLS"), "bert"),
    "dora_gpt2": Method(_lora(use_dora=True, target_modules=["c_attn"], fan_in_fan_out=True), "gpt2"),
    "pissa": Method(_lora(init_lora_weights="pissa")),
    "pissa_niter": Method(_lora(init_lora_weights="pissa_niter_4")),
    "olora": Method(_lora(init_lora_weights="olora")),
    "experts": Method(
        lambda: peft.LoraConfig(
            r=2,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            init_lora_weights=False,
        ),
        "mixtral",
    ),
    "token_indices": Method(_lora(trainable_token_indices=[1, 4, 36])),
    "trainable_tokens": Method(lambda: peft.TrainableTokensConfig(token_indices=[1, 4, 36])),
    "trainable_tokens_tied": Method(lambda: peft.TrainableTokensConfig(token_indices=[1, 4, 36]), "gpt2"),
    "embeddings": Method(_lora(target_modules=["embed_tokens", "q_proj"], init_lora_weights=True)),
    "modules_to_save": Method(_lora(modules_to_save=["lm_head"])),
    "classifier": Method(_lora(target_modules=["query"], task_type="SEQ_CLS"), "bert"),
    "t5": Method(_lora(target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM"), "t5"),
    "prompt_tuning": Method(_prompt(peft.PromptTuningConfig)),
    "prompt_tuning_vocabulary": Method(_prompt(peft.PromptTuningConfig, prompt_tuning_init="SAMPLE_VOCAB")),
    "prefix_tuning": Method(_prompt(peft.PrefixTuningConfig)),
    "prefix_projection": Method(
        _prompt(peft.PrefixTuningConfig, prefix_projection=True, encoder_hidden_size=10),
    ),
    "p_tuning": Method(_prompt(peft.PromptEncoderConfig, encoder_hidden_size=10)),
    "ia3": Method(
        lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "adalora": Method(
        lambda: peft.AdaLoraConfig(
            target_modules=_ATTENTION, init_r=4, target_r=2, total_step=8, tinit=1, tfinal=2, deltaT=1
        )
    ),
    "vera": Method(lambda: peft.VeraConfig(r=3, target_modules=["q_proj", "o_proj"])),
    "oft": Method(lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=_ATTENTION)),
    "boft": Method(lambda: peft.BOFTConfig(boft_block_size=4, target_modules=_ATTENTION)),
    "loha": Method(lambda: peft.LoHaConfig(r=3, target_modules=_ATTENTION)),
    "lokr": Method(lambda: peft.LoKrConfig(r=3, target_modules=_ATTENTION)),
    "hra": Method(lambda: peft.HRAConfig(r=2, target_modules=_ATTENTION)),
    "ln_tuning": Method(lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"])),
    "fourier": Method(lambda: peft.FourierFTConfig(n_frequency=9, target_modules=_ATTENTION)),
}


def adapted(name: str, base: nn.Module) -> peft.PeftModel:
    """The model with the adapter of a method, made from a random state of its own."""
    torch.manual_seed(7)
    model = peft.get_peft_model(base, METHODS[name].config())
    assert isinstance(model, peft.PeftModel)
    return model.train()


def plain(name: str) -> peft.PeftModel:
    """What `adapted` makes of the whole model."""
    return adapted(name, make_model(METHODS[name].model))
