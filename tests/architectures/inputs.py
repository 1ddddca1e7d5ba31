"""Inputs for the forward method of any model, by the names of its arguments."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.architectures.configs import FIRST_TEXT_TOKEN, MEL_BINS, SOUND_FRAMES, WIDTH, find
from tests.architectures.overrides import IMAGE, PATCH, VOCAB

BATCH, TEXT, TARGETS, SAMPLES, PATCHES_PER_SIDE = 2, 8, 6, 3200, IMAGE // PATCH

Inputs = dict[str, Any]
IMAGE_LAYOUTS = ("plain", "tiles", "video", "patches", "flat")
SOUND_LAYOUTS = ("bins first", "frames first", "samples", "channel", "picture", "packed")


@dataclass(frozen=True)
class Layout:
    """How images and sounds are laid out, and which arguments are given."""

    image: str = "plain"
    sound: str = "bins first"
    names: frozenset[str] = frozenset()


@dataclass
class Draw:
    """Draws the arguments of one batch; each is drawn once, as others may depend on it."""

    model: nn.Module
    layout: Layout
    generator: torch.Generator
    placeholders: dict[str, int] = field(default_factory=dict)  # by the name of the token, for each sequence
    made: Inputs = field(default_factory=dict)

    @property
    def config(self) -> Any:
        return self.model.config

    def get(self, name: str) -> Any:
        if name not in self.made:
            self.made[name] = _MAKERS[name](self)
        return self.made[name]

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def vision(self) -> Any:
        for name in ("vision_config", "vision", "image_config", "backbone_config", "encoder"):
            if (config := getattr(self.config, name, None)) is not None and not isinstance(config, dict):
                return config
        return find(self.config, "vision_config") or self.config


def draw(model: nn.Module, layout: Layout, seed: int, placeholders: dict[str, int] | None = None) -> Inputs:
    """The arguments of `layout.names`, the same for the same seed."""
    source = Draw(model, layout, torch.Generator().manual_seed(seed), placeholders or {})
    return {name: source.get(name) for name in sorted(layout.names)}


def arguments(model: nn.Module) -> dict[str, bool]:
    """The names of the arguments of the forward method, and whether each is needed."""
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    given = inspect.signature(model.forward).parameters.values()
    return {each.name: each.default is inspect.Parameter.empty for each in given if each.kind not in variable}


def can_make(name: str) -> bool:
    return name in _MAKERS


def count_placeholders(model: nn.Module, layout: Layout) -> dict[str, int]:
    """How many tokens of a sequence stand for an image and for a sound: as many as the model makes features."""
    source = Draw(model, layout, torch.Generator().manual_seed(0))
    counts = {}
    for token, needs, method in _FEATURES:
        if needs & layout.names and (get := _of_base(model, method) or getattr(model, method, None)) is not None:
            counts[token] = _num_features(source, get)
    return counts


_FEATURES = [
    ("image", {"pixel_values", "image_pixel_values"}, "get_image_features"),
    ("audio", {"input_features", "audio_input_features"}, "get_audio_features"),
]


def _of_base(model: nn.Module, method: str) -> Any:
    return getattr(getattr(model, "model", None), method, None)


def _num_features(source: Draw, get: Callable[..., Any]) -> int:
    known = {name for name in inspect.signature(get).parameters if name in source.layout.names and can_make(name)}
    with torch.no_grad():
        features = get(**{name: source.get(name) for name in known})
    if hasattr(features, "keys"):
        features = features.get("pooler_output", features.get("last_hidden_state"))
    if isinstance(features, (list, tuple)):
        return sum(part.shape[0] if part.ndim == 2 else part.shape[:-1].numel() for part in features) // BATCH
    return features.shape[:-1].numel() // BATCH


def _input_ids(source: Draw) -> Tensor:
    if source.config.model_type in ("musicgen_decoder", "musicgen_melody_decoder"):
        return _codes(source, TEXT)
    rows = source.integers(FIRST_TEXT_TOKEN, VOCAB, BATCH, TEXT)
    return torch.cat([_special_tokens(source), rows], dim=1)


def _codes(source: Draw, length: int) -> Tensor:
    return source.integers(FIRST_TEXT_TOKEN, VOCAB, BATCH * find(source.config, "num_codebooks", default=1), length)


def _decoder_input_ids(source: Draw) -> Tensor:
    if source.config.model_type in ("musicgen", "musicgen_melody"):
        return _codes(source, TARGETS)
    channels = [source.config.decoder_config.num_channels] if source.config.model_type == "dia" else []
    return source.integers(FIRST_TEXT_TOKEN, VOCAB, BATCH, TARGETS, *channels)


def _special_tokens(source: Draw) -> Tensor:
    tokens = []
    for kind in ("image", "audio"):
        if count := source.placeholders.get(kind, 0):
            names = [f"{kind}_token_id", f"{kind}_token_index", "image_patch_id", "media_placeholder_token_id"]
            around = ("vision_start_token_id", "vision_end_token_id") if kind == "image" else ()
            ends = [find(source.config, name) for name in around] or [None, None]
            tokens += [ends[0], *[find(source.config, *names, default=4)] * count, ends[1]]
    row = torch.tensor([token for token in tokens if token is not None], dtype=torch.long)
    return row.expand(BATCH, -1)


def _token_kinds(source: Draw) -> Tensor:
    ids = source.get("input_ids")
    kinds = torch.zeros_like(ids)
    for kind, name in ((1, "image_token_id"), (3, "audio_token_id")):
        if (token := find(source.config, name)) is not None:
            kinds[ids == token] = kind
    return kinds


def _pixel_values(source: Draw) -> Tensor:
    vision = source.vision()
    channels = find(vision, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) else 3
    size = image_size(source)
    if "aspect_ratio_ids" in source.layout.names:
        return source.floats(BATCH, 1, find(vision, "max_num_tiles"), channels, *size)
    if source.layout.image == "tiles":
        count = 2 if find(source.config, "image_grid_pinpoints") else 1  # the whole image, and one tile of it
        return source.floats(BATCH, count, channels, *size)
    if source.layout.image == "video":
        return source.floats(BATCH, find(source.config, "num_frames", "frames_per_clip", default=2), channels, *size)
    if source.layout.image == "flat":
        patch = find(vision, "patch_size", default=PATCH)
        return source.floats(BATCH, PATCHES_PER_SIDE**2, channels * patch * patch)
    if source.layout.image == "patches":
        patch, frames = find(vision, "patch_size", default=PATCH), find(vision, "temporal_patch_size", default=1)
        return source.floats(BATCH * PATCHES_PER_SIDE**2, channels * frames * patch * patch)
    return source.floats(BATCH, channels, *size)


def image_size(source: Draw) -> tuple[int, int]:
    size = find(source.vision(), "image_size", "input_size") or find(source.config, "image_size", "max_img_size")
    if isinstance(size, (list, tuple)):
        return int(size[-2]), int(size[-1])
    return (size, size) if isinstance(size, int) and size > 0 else (2 * IMAGE, 2 * IMAGE)


def _videos(source: Draw) -> Tensor:
    frames = find(source.config, "num_frames", "frames_per_clip", default=2)
    return source.floats(BATCH, frames, 3, *image_size(source))


def _sound(source: Draw) -> Tensor:
    bins = find(
        source.config, "num_mel_bins", "n_mel_bins", "feature_size", "input_feat_size", "input_feat_per_channel",
        "input_dim", "input_size", default=MEL_BINS,
    )  # fmt: skip
    frames = find(source.config, "max_length", "spec_size") if source.layout.sound == "frames first" else None
    frames = frames if isinstance(frames, int) and frames > 1 else SOUND_FRAMES
    if source.layout.sound == "samples":
        return source.floats(BATCH, SAMPLES)
    if source.layout.sound == "picture":
        spec_size = find(source.config, "spec_size", default=frames)
        return source.floats(BATCH, 1, spec_size * (spec_size // bins), bins)
    if source.layout.sound == "packed":
        return source.floats(bins, BATCH * frames)
    if source.layout.sound == "channel":
        return source.floats(BATCH, find(source.config, "audio_channels", "num_channels", default=1), SAMPLES)
    return (
        source.floats(BATCH, frames, bins)
        if source.layout.sound == "frames first"
        else source.floats(BATCH, bins, frames)
    )


def _sound_mask(source: Draw) -> Tensor:
    sound = source.get("input_features" if "input_features" in source.layout.names else "input_values")
    frames = sound.shape[-1] if source.layout.sound != "frames first" else sound.shape[1]
    return torch.ones(BATCH, frames, dtype=torch.long)


def _grid(source: Draw) -> Tensor:
    return torch.tensor([[1, PATCHES_PER_SIDE, PATCHES_PER_SIDE]] * BATCH)


def _patch_positions(source: Draw) -> Tensor:
    side = torch.arange(PATCHES_PER_SIDE)
    return torch.stack(torch.meshgrid(side, side, indexing="xy"), dim=-1).reshape(1, -1, 2).expand(BATCH, -1, -1)


def _pixel_attention_mask(source: Draw) -> Tensor:
    pixels = source.get("pixel_values")
    if source.layout.image == "flat":
        return torch.ones(pixels.shape[:2], dtype=torch.long)
    return torch.ones(*pixels.shape[:-3], *pixels.shape[-2:], dtype=torch.long)


def _boxes(source: Draw) -> Tensor:
    ids = source.get("input_ids")
    if source.config.model_type == "bros":
        return source.floats(*ids.shape, 8).sigmoid()
    start, size = source.integers(0, 20, *ids.shape, 2), source.integers(1, 20, *ids.shape, 2)
    return torch.cat([start, start + size], dim=-1)


def _like_ids(fill: int) -> Callable[[Draw], Tensor]:
    return lambda source: torch.full_like(source.get("input_ids"), fill)


def _hidden_states(source: Draw) -> Tensor:
    if {"grid_thw", "image_grid_thw"} & source.layout.names:
        return _pixel_values(Draw(source.model, Layout("patches"), source.generator))
    return source.floats(BATCH, TEXT, find(source.config, "hidden_size", "d_model", default=WIDTH))


def _labels(source: Draw) -> Any:
    name = type(source.model).__name__
    count = getattr(source.config, "num_labels", 2)
    if "ObjectDetection" in name or ("Detection" in name and "Segmentation" not in name):
        boxes = source.floats(BATCH, 2, 4).sigmoid() * 0.5 + 0.2
        return [{"class_labels": source.integers(0, count, 2), "boxes": box} for box in boxes]
    if "Segmentation" in name:
        return source.integers(0, count, BATCH, *image_size(source))
    if "TokenClassification" in name:
        return source.integers(0, count, *source.get("input_ids").shape)
    if "Classification" in name:
        return source.integers(0, count, BATCH)
    if any(part in name for part in ("CTC", "RNNT", "TDT")):
        return source.integers(FIRST_TEXT_TOKEN, VOCAB, BATCH, 2)
    if getattr(source.config, "is_encoder_decoder", False) or "decoder_input_ids" in arguments(source.model):
        return source.integers(FIRST_TEXT_TOKEN, VOCAB, BATCH, TARGETS)
    return source.get("input_ids").clone()


def _constant(*shape: int, fill: float = 1, dtype: torch.dtype = torch.long) -> Callable[[Draw], Tensor]:
    return lambda source: torch.full(shape, fill, dtype=dtype)


def _normal(*shape: int) -> Callable[[Draw], Tensor]:
    return lambda source: source.floats(*shape)


def _tokens(*shape: int) -> Callable[[Draw], Tensor]:
    return lambda source: source.integers(FIRST_TEXT_TOKEN, VOCAB, *shape)


def _past_values(source: Draw) -> Tensor:
    length = source.config.context_length + max(getattr(source.config, "lags_sequence", [0]))
    channels = getattr(source.config, "num_input_channels", None)
    return source.floats(BATCH, length, *([channels] if channels else []))


def _time_features(source: Draw) -> Tensor:
    return source.floats(*source.get("past_values").shape[:2], source.config.num_time_features)


def _half_masked(source: Draw) -> Tensor:
    frames = find(source.config, "num_frames", default=1) // find(source.config, "tubelet_size", default=1)
    side = image_size(source)[0] // find(source.config, "patch_size", default=PATCH)
    return (torch.arange(frames * side * side) % 2 == 0).expand(BATCH, -1)


def _flattened_patches(source: Draw) -> Tensor:
    patch = find(source.vision(), "patch_size", default=PATCH)
    places = torch.arange(1, PATCHES_PER_SIDE**2 + 1).expand(BATCH, -1)[..., None] // PATCHES_PER_SIDE
    return torch.cat([places, places, source.floats(BATCH, PATCHES_PER_SIDE**2, 3 * patch * patch)], dim=-1)


def _image_places(source: Draw) -> Tensor:
    ids, count = source.get("input_ids"), find(source.config, "latent_query_num", default=4)
    return (torch.arange(ids.shape[1]) < count).long().expand(BATCH, -1)


_MAKERS: dict[str, Callable[[Draw], Any]] = {
    "input_ids": _input_ids,
    "attention_mask": lambda source: (
        torch.ones(BATCH, source.get("input_ids").shape[1], dtype=torch.long)
        if "input_ids" in source.layout.names
        else _sound_mask(source)
    ),
    "decoder_input_ids": _decoder_input_ids,
    "labels": _labels,
    "start_positions": _constant(BATCH, fill=1),
    "end_positions": _constant(BATCH, fill=3),
    "return_loss": lambda source: True,
    "bbox": _boxes,
    "token_type_ids": _like_ids(0),
    "mm_token_type_ids": _token_kinds,
    "pixel_values": _pixel_values,
    "pixel_values_videos": _videos,
    "pixel_mask": lambda source: torch.ones(BATCH, *image_size(source), dtype=torch.long),
    "pixel_attention_mask": _pixel_attention_mask,
    "image_sizes": lambda source: torch.tensor([image_size(source)] * BATCH),
    "image_grid_thw": _grid,
    "grid_thw": _grid,
    "spatial_shapes": _constant(BATCH, 2, fill=PATCHES_PER_SIDE),
    "image_position_ids": _patch_positions,
    "pixel_position_ids": _patch_positions,
    "input_features": _sound,
    "input_values": _sound,
    "input_features_mask": _sound_mask,
    "feature_attention_mask": _sound_mask,
    "padding_mask": _sound_mask,
    "hidden_states": _hidden_states,
    "inputs_embeds": _hidden_states,
    "encoder_hidden_states": lambda source: source.floats(
        BATCH,
        TEXT,
        find(source.config, "encoder_hidden_size", "cross_attention_hidden_size", "hidden_size", default=WIDTH),
    ),
    "query_embeds": lambda source: source.floats(BATCH, 4, find(source.config, "hidden_size", default=WIDTH)),
    "past_values": _past_values,
    "past_time_features": _time_features,
    "past_observed_mask": lambda source: torch.ones_like(source.get("past_values")),
    "future_values": lambda source: source.floats(BATCH, source.config.prediction_length),
    "future_time_features": lambda source: source.floats(
        BATCH, source.config.prediction_length, source.config.num_time_features
    ),
    "bool_masked_pos": _half_masked,
    "visual_feats": lambda source: source.floats(BATCH, 4, source.config.visual_feat_dim),
    "visual_pos": lambda source: source.floats(BATCH, 4, 4).sigmoid(),
    "flattened_patches": _flattened_patches,
    "image_attention_mask": lambda source: torch.ones(*source.get("input_ids").shape, 1, dtype=torch.long),
    "image_embeds_position_mask": _image_places,
    "task_inputs": lambda source: source.integers(FIRST_TEXT_TOKEN, VOCAB, BATCH, source.config.task_seq_len),
    "state": lambda source: source.floats(BATCH, source.config.max_state_dim),
    "actions": lambda source: source.floats(BATCH, source.config.chunk_size, source.config.max_action_dim),
    "prompt_pixel_values": _pixel_values,
    "prompt_masks": _pixel_values,
    "spectrogram": lambda source: source.floats(
        BATCH, SOUND_FRAMES, find(source.config, "model_in_dim", "num_mel_bins")
    ),
    "target_sizes": _constant(BATCH, 2, fill=PATCHES_PER_SIDE),
    "feature_lens": _constant(BATCH, fill=SOUND_FRAMES),
    "image_merge_sizes": _constant(BATCH, fill=2),
    "aspect_ratio_ids": _constant(BATCH, 1, fill=1),
    "aspect_ratio_mask": lambda source: torch.ones(BATCH, 1, find(source.config, "max_num_tiles"), dtype=torch.long),
    "cross_attention_mask": lambda source: torch.ones(
        *source.get("input_ids").shape, 1, find(source.config, "max_num_tiles"), dtype=torch.long
    ),
    "high_res_pixel_values": _normal(BATCH, 3, IMAGE, IMAGE),
    "merge_sizes": _constant(BATCH, fill=1),
    "audio_mel": lambda source: source.floats(BATCH, SOUND_FRAMES, source.config.input_feat_size),
    "audio_mel_mask": lambda source: torch.zeros(BATCH, SOUND_FRAMES, dtype=torch.bool),
    "xpath_tags_seq": lambda source: source.integers(0, 200, *source.get("input_ids").shape, source.config.max_depth),
    "xpath_subs_seq": lambda source: source.integers(0, 200, *source.get("input_ids").shape, source.config.max_depth),
    "qformer_input_ids": _tokens(BATCH, TEXT),
}
