"""What TRL's trainers are tested on: words, a tokenizer that knows them, and a Llama of two small layers."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

WORDS = ["<pad>", "<s>", "</s>", "user", "assistant", *[f"w{i}" for i in range(42)]]
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    made.chat_template = _TEMPLATE
    return made


def text(seed: int, least: int = 3) -> str:
    """Three to seven words."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(least, 8, (1,), generator=generator))
    return " ".join(f"w{i}" for i in torch.randint(0, 42, (count,), generator=generator).tolist())


def config(tied: bool) -> LlamaConfig:
    """Of the model; `tied`: whether its head is its embedding."""
    return LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        num_labels=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def length_reward(completions: list[str], **_: object) -> list[float]:
    """The number of different words."""
    return [float(len(set(each.split()))) for each in completions]
