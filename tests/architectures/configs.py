"""The configuration of a tiny model of any type: sizes shrink by rules on the names of attributes.

[Note: why rules on names]
Configurations name one thing in few ways: `hidden_size`, `d_model`, `n_embd` are all a width. One small number for all
widths, one for all layers, and so on, keeps the relations between the parts of a model without knowing them.
What rules cannot know stands in `overrides.py`, by model type.
"""

import copy
import dataclasses
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.architectures.overrides import IMAGE, OVERRIDES, PATCH, VOCAB

WIDTH, HEADS, HEAD_DIM, FEED_FORWARD, LAYERS = 32, 2, 16, 48, 2
FIRST_TEXT_TOKEN = 80  # tokens below it are special ones
POSITIONS, MEL_BINS, SOUND_FRAMES = 64, 16, 32

Rule = tuple[str, Callable[[Any], Any]]


def _at_most(limit: int) -> Callable[[Any], Any]:
    return lambda value: min(value, limit)


def _always(new: Any) -> Callable[[Any], Any]:
    return lambda value: new


def _as_it_is(value: Any) -> Any:
    return value


# The first rule whose pattern is found in the name decides; whole numbers only.
_NUMBERS: list[Rule] = [
    (r"^(type|task_type|modality_type|char|composer)_vocab_size$", _at_most(4)),
    (r"^vocab_offset$|^vocoder_offset$", _always(0)),
    (r"vocab_size|^n_tokens$|num_embeddings$|^vocab_size_per_layer_input$|^num_embeds$", _always(VOCAB)),
    (r"^(num_|n_)?codebook_size$|codebook_vocab_size|^num_codevectors_per_group$", _always(VOCAB)),
    (r"^(num_channels|in_chans|num_input_channels|stem_num_channels|audio_channels|num_latent_channels)$", _as_it_is),
    (r"norm_num_groups|^num_groups$|upsample_groups|_groups$|^n_groups$|mamba_n_groups", _at_most(2)),
    (r"attention_groups$", _at_most(1)),
    (r"heads_per_ngram", _at_most(2)),
    (r"experts?_per_tok|moe_k$|top_k_experts|moe_topk|experts_top_k|^topk$", _at_most(2)),
    (r"^(n_group|topk_group|n_shared_experts|num_shared_experts|moe_num_shared_experts)$", _at_most(1)),
    (r"^(num_|n_|moe_num_|zero_)?(routed_|local_)?experts?(_num)?$", _at_most(4)),
    (r"first_k_dense_replace|num_dense_layers|num_first|num_last", _at_most(1)),
    (r"_offset$", _at_most(1)),
    (r"_period$|sliding_window_pattern|layer_group_size|_every_n_layers|no_rope_layer_interval", _at_most(2)),
    (r"encoder_sparse_step|decoder_sparse_step|cross_attention_frequency", _at_most(1)),
    (r"num_encoder_blocks", _as_it_is),
    (r"(num_|n_|_)(layers|layer|blocks|depth)$|^(n_)?layers?$|^depth$|_depth$|^block_count$", _at_most(LAYERS)),
    (r"num_nextn_predict_layers|num_mtp", _always(0)),
    (r"heads?$|^n_heads?$|_heads$", _at_most(HEADS)),
    (r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim", _at_most(HEAD_DIM // 2)),
    (r"head_dim$|d_kv$|d_head$|dim_head$|head_size$|kv_channels|attention_head_dim", _at_most(HEAD_DIM)),
    (r"state_size|d_state", _at_most(8)),
    (r"time_step_rank|lora_rank|_rank$", _at_most(8)),
    (r"d_conv$|conv_L_cache|short_conv", _as_it_is),
    (r"pos(ition)?_dim$|visual_pos_dim|query_dim|act_dim|state_dim", _as_it_is),
    (r"pixel_shuffle|scale_factor", _at_most(2)),
    (r"temporal_patch_size|merge_size|patch_temporal", _as_it_is),
    (r"(^|_)patch_size$|^patch_height$|^patch_width$|^patch_length$|^patch_stride$", _at_most(PATCH)),
    (r"image_size$|^input_size$|img_size$|^resolution$|^crop_size$|^pretrain_image_size$", _at_most(IMAGE)),
    (r"max_source_positions|max_audio_positions", _always(SOUND_FRAMES // 2)),
    (r"num_filters", _at_most(4)),
    (r"^n_window", _at_most(8)),
    (r"position_embeddings$|_positions?$|n_ctx$|_seq_len$|_seq_length$|^seq_len(gth)?$", _at_most(POSITIONS)),
    (r"mel_bins|^n_mel_bins|^feature_size$|input_feat|^mel_dim$|feature_projection_input_dim", _at_most(MEL_BINS)),
    (r"window_size|attention_window|local_attention|chunk_length$", lambda value: 32 if value > 64 else min(value, 4)),
    (r"sliding_window|chunk_size|context_length|max_length", _at_most(16)),
    (r"num_conv_pos_embeddings", _at_most(4)),
    (r"num_queries|num_query_tokens|num_latents|n_latents|num_detection_tokens|num_image_tokens", _at_most(8)),
    (r"two_stage_num_proposals|num_proposals|num_landmarks|num_hash$|num_random_blocks|query_num", _at_most(8)),
    (r"num_denoising|num_negatives", _at_most(0)),
    (r"train_num_points", _at_most(16)),
    (r"num_frames|frames_per_clip", _at_most(2)),
    (r"tokens_per_image$|image_seq_length|video_seq_length|num_global_tokens|soft_tokens", _at_most(4)),
    (r"kernel|stride|dilation|padding|_ratio$|factor|reduction|hop_length|_rate$|_seconds|num_labels", _as_it_is),
    (r"_id$|_ids$|_index$|_value$|_idx$", _as_it_is),
    (
        r"intermediate|ffn|feed_?forward|(^|_)ff(_|$)|d_ff|dff|mlp|n_inner|d_inner|dim_ff|linear_units",
        _at_most(FEED_FORWARD),
    ),
    (r"buckets|max_distance|_bins$|max_num|max_.*num", _at_most(16)),
    (r"hidden|embed|dim|width|channels?$|features?$|units$|channel_size|_size$|d_model|n_embd|latent", _at_most(WIDTH)),
    (r"num_.*tokens$|num_prompts|prompt_length|num_centroids|num_clusters|num_codebooks|num_quantizers", _at_most(4)),
]
_COMPILED = [(re.compile(pattern), rule) for pattern, rule in _NUMBERS]
_CHANCE = re.compile(r"drop|layerdrop|mask_.*prob|jitter|noise_scale$|label_noise|replace_prob|mask_time_prob|probs?$")
_TOKEN = re.compile(
    r"(?<!tag)(?<!subs)(_token_id|_token_index|_tokens?_idx|_start_id|_end_id|_pad_id|_patch_id|_bos_id|_eos_id|newline_id)$"
)
_FIRST_TOKENS = {
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 3},
    **{"image_token_id": 4, "video_token_id": 5, "audio_token_id": 6},
    **{"cls_token_id": 7, "mask_token_id": 8, "blank_token_id": 9},
}
_PER_STAGE_WIDTH = re.compile(r"hidden|dim|channels|sizes|width|embed|features")
_PER_STAGE_DEPTH = re.compile(r"depths?$|_blocks$|num_layers|block_sizes|repeats$|n_attn_blocks|blocks_per_stage")


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A configuration of this type with small sizes, no dropout and no cache."""
    config = _shrink(CONFIG_MAPPING[model_type]())
    for part in parts(config):
        _mend(part)
    return config


def parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The configuration and those inside it, at any depth."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from parts(value)


def find(config: PreTrainedConfig, *names: str, default: Any = None) -> Any:
    """The first value of one of these names, in the configuration or in the configurations inside it."""
    for part in parts(config):
        for name in names:
            if (value := _value(part, name)) is not None:
                return value
    return default


def _shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """A smaller configuration of the same class; what its class computes when absent is computed anew."""
    config_class = type(config)
    layers = _chosen_layers(config)
    usual = config_class()  # what differs from it was given by the configuration around this one
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if not field.init or field.name in _BASE_FIELDS:
            continue
        value = _value(config, field.name)
        if isinstance(value, PreTrainedConfig):
            values[field.name] = _shrink(value)
            continue
        given = field.default is not None or value != _value(usual, field.name)
        if field.name == "head_dim" and value is None:
            values[field.name] = HEAD_DIM
        elif isinstance(value, (list, tuple)) and layers is not None and len(value) == _num_layers(config):
            kept = [value[index] for index in layers]
            values[field.name] = kept if given or _differ(value) else None
        elif given or field.name in config_class.sub_configs:
            values[field.name] = _smaller(field.name, value)
    if layers is not None and "num_hidden_layers" in values:
        values["num_hidden_layers"] = len(layers)
    values |= _backbone_stages(config)
    values |= copy.deepcopy(OVERRIDES.get(config.model_type, {}))  # configurations write into what they are given
    return config_class(**{name: value for name, value in values.items() if value is not None})


_BASE_FIELDS = {field.name for field in dataclasses.fields(PreTrainedConfig)} - {"is_encoder_decoder"}
_BASE_FIELDS |= {"_out_features", "_out_indices"}


def _value(config: PreTrainedConfig, name: str) -> Any:
    """Also of an attribute that is one for each layer, which the configuration itself does not show."""
    try:
        return object.__getattribute__(config, name)
    except AttributeError:
        return getattr(config, name, None)


def _num_layers(config: PreTrainedConfig) -> int | None:
    if "num_hidden_layers" not in {field.name for field in dataclasses.fields(config)} or hasattr(config, "depths"):
        return None  # it is the number of stages
    count = config.num_hidden_layers
    return count if isinstance(count, int) and count > LAYERS else None


def _differ(values: Any) -> bool:
    return any(value != values[0] for value in values)


def _chosen_layers(config: PreTrainedConfig) -> list[int] | None:
    """Few layers that show every kind of layer: each value of each list that has one entry per layer."""
    count = _num_layers(config)
    if count is None:
        return None
    chosen: set[int] = set()
    for field in dataclasses.fields(config):
        value = _value(config, field.name)
        if isinstance(value, (list, tuple)) and len(value) == count and all(isinstance(v, (str, int)) for v in value):
            for kind in dict.fromkeys(value):
                if not any(value[index] == kind for index in chosen) and len(chosen) < 4:
                    chosen.add(value.index(kind))
    for index in range(count):
        if len(chosen) >= LAYERS:
            break
        chosen.add(index)
    return sorted(chosen)


def _backbone_stages(config: PreTrainedConfig) -> dict[str, Any]:
    """The stages that features are taken from; where each layer is a stage, as many layers as features."""
    features = getattr(config, "out_features", None)
    if not features or not hasattr(config, "stage_names"):
        return {}
    if _num_layers(config) is None or len(config.stage_names) <= LAYERS + 3:
        return {"out_indices": list(config.out_indices)}
    count = max(LAYERS, len(features))
    return {"num_hidden_layers": count, "out_indices": list(range(count + 1))[-len(features) :]}


def _smaller(name: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return False if name == "use_cache" else value
    if isinstance(value, float):
        return 0.0 if _CHANCE.search(name) else value
    if isinstance(value, int) and _TOKEN.search(name):
        return _token(name)
    if isinstance(value, int):
        return 0 if _CHANCE.search(name) else _smaller_number(name, value)
    if isinstance(value, (list, tuple)):
        return _smaller_list(name, list(value))
    return value


def _smaller_number(name: str, value: int) -> int:
    for pattern, rule in _COMPILED:
        if pattern.search(name):
            return rule(value)
    return value


def _smaller_list(name: str, value: list[Any]) -> list[Any]:
    """One entry per stage of the model; the number of stages stays."""
    if not value or not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in value):
        return [0.0] * len(value) if _CHANCE.search(name) and value and isinstance(value[0], float) else value
    if re.search(r"kernel|stride|dilation|padding|ratio|rate|factor|scale|lags|vocab_sizes|feat_strides", name):
        return value
    if _PER_STAGE_DEPTH.search(name):
        return [1] * len(value)
    if re.search(r"heads", name):
        return [min(entry, HEADS) for entry in value]
    if re.search(r"patch_size$", name):
        return [min(entry, PATCH) for entry in value]
    if re.search(r"image_size$|^input_size$", name):
        return [min(entry, IMAGE) for entry in value]
    if _PER_STAGE_WIDTH.search(name) and max(value) > 16:
        return [max(8, 8 * round(8 * entry / max(value))) for entry in value]
    return value


def _token(name: str) -> int:
    """A token of the same number wherever the name stands."""
    if name.replace("index", "id") in _FIRST_TOKENS:
        return _FIRST_TOKENS[name.replace("index", "id")]
    return 10 + zlib.crc32(name.encode()) % (FIRST_TEXT_TOKEN - 10)


def _mend(config: PreTrainedConfig) -> None:
    """What can only be seen on the whole configuration: special tokens inside the vocabulary, parts of rotary heads."""
    for name, value in list(vars(config).items()):
        if isinstance(value, int) and not isinstance(value, bool) and _TOKEN.search(name):
            setattr(config, name, _token(name))
        elif isinstance(value, list) and _TOKEN.search(name) and value and isinstance(value[0], int):
            setattr(config, name, [_token(name)])
        elif name in ("suppress_tokens", "begin_suppress_tokens"):
            setattr(config, name, None)
        elif name == "rope_parameters" and isinstance(value, dict):
            _mend_rotary(config, value)


def _mend_rotary(config: PreTrainedConfig, rotary: dict[str, Any]) -> None:
    head_dim = _value(config, "head_dim") or HEAD_DIM
    for each in [rotary, *(value for value in rotary.values() if isinstance(value, dict))]:
        if isinstance(share := each.get("partial_rotary_factor"), float):
            each["partial_rotary_factor"] = max(4, 4 * round(head_dim * share / 4)) / head_dim
        half = int(head_dim * (each.get("partial_rotary_factor") or 1.0)) // 2
        # Models with axes of time, height and width read it, some with a default of their own; others do not look.
        count = len(each.get("mrope_section", [0, 0, 0]))
        first = [max(1, round(half / count))] * (count - 1)
        each["mrope_section"] = [*first, half - sum(first)]
        for name in ("long_factor", "short_factor"):
            if name in each:
                each[name] = [1.0] * half
