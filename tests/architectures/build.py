"""A tiny model of any type of transformers' registry, its inputs, and its loss.

A model is accepted when it trains as it is, without sharding: forward, backward, and the same loss once more.
"""

import contextlib
import copy
import importlib
import inspect
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.architectures.configs import tiny_config
from tests.architectures.inputs import (
    IMAGE_LAYOUTS,
    SOUND_LAYOUTS,
    Inputs,
    Layout,
    arguments,
    can_make,
    count_placeholders,
    draw,
)

LIMIT_NUMEL = 2_000_000

# Heads with a loss first; the model without a head is the last in the registry that is asked.
_TASKS = [
    *("SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM", "CAUSAL_LM"),
    *("CTC", "RNNT", "TDT", "ZERO_SHOT_IMAGE_CLASSIFICATION", "ZERO_SHOT_OBJECT_DETECTION", "IMAGE_CLASSIFICATION"),
    *("OBJECT_DETECTION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION"),
    *("IMAGE_SEGMENTATION", "DEPTH_ESTIMATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION"),
    *("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "PRETRAINING", "MASKED_IMAGE_MODELING"),
    "VISUAL_QUESTION_ANSWERING",
]


class CannotBuildError(Exception):
    """No tiny model of this type trains here; the message is the reason."""


@dataclass(frozen=True)
class TinyModel:
    """A model in training mode with what it takes to train it."""

    model: PreTrainedModel
    layout: Layout
    placeholders: dict[str, int]

    def inputs(self, seed: int) -> Inputs:
        return draw(self.model, self.layout, seed, self.placeholders)


def model_types() -> list[str]:
    return sorted(CONFIG_MAPPING.keys())


def build(model_type: str, class_name: str = "") -> TinyModel:
    """A model of this type that trains, equal on all ranks; of that class, if one is named.

    Raises:
        CannotBuildError: no such class could be built and trained with any of the inputs that were tried.
    """
    reasons: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = tiny_config(model_type)
            classes = [each for each in _model_classes(model_type, type(config)) if class_name in ("", each.__name__)]
        except Exception as error:
            raise CannotBuildError(f"configuration: {short(error)}") from error
        if not classes:
            raise CannotBuildError("no model class")
        for model_class in classes[:5]:
            try:
                model = _make(model_class, copy.deepcopy(config))
                layouts = list(_layouts(model))
            except Exception as error:
                reasons.append(f"{model_class.__name__}: {short(error)}")
                continue
            for layout in layouts:
                try:
                    tiny = TinyModel(model, layout, count_placeholders(model, layout))
                    _assert_trains(tiny)
                except Exception as error:
                    reasons.append(f"{model_class.__name__}: {short(error)}")
                    continue
                fresh = _make(model_class, copy.deepcopy(config))
                return TinyModel(fresh, layout, tiny.placeholders)
    raise CannotBuildError(reasons[0] if reasons else "no inputs are known for it")


def short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def seed_all(seed: int) -> None:
    for set_seed in (torch.manual_seed, random.seed, numpy.random.seed):
        set_seed(seed)


def forward(model: nn.Module, inputs: Inputs, seed: int) -> Any:
    """Its output; models that draw random numbers draw the same ones for the same seed."""
    seed_all(seed)
    return model(**{name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()})


def loss_of(output: Any) -> Tensor:
    """The loss of the model where it has one, else the mean of squares over what carries gradients."""
    loss = output.get("loss") if hasattr(output, "get") else None
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss.mean()
    terms = [
        part.abs().nan_to_num(0.0, 0.0, 0.0).clamp(max=1e3).pow(2).mean()
        for part in tensors(output)
        if part.requires_grad and part.numel()
    ]
    if not terms:
        raise CannotBuildError("no output carries a gradient")
    return torch.stack(terms).mean()


def tensors(output: Any) -> Iterator[Tensor]:
    """The floating tensors of an output, in order; caches are left out."""
    if isinstance(output, Tensor):
        if output.is_floating_point() or output.is_complex():
            yield output
    elif hasattr(output, "values"):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors(value)


def _model_classes(model_type: str, config_class: type[PreTrainedConfig]) -> Iterator[type[PreTrainedModel]]:
    """Those of the registry, then those of the module whose configuration is exactly this one."""
    names = [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in _TASKS]
    names += [name for name in dir(modeling_auto) if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")]
    seen: set[str] = set()
    for mapping_name in names:
        found = getattr(modeling_auto, mapping_name).get(model_type, ())
        for name in (found,) if isinstance(found, str) else found:
            if name not in seen and hasattr(transformers, name):
                seen.add(name)
                yield getattr(transformers, name)
    with contextlib.suppress(ImportError):
        module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
        for name, each in vars(module).items():
            if name in seen or name.endswith("PreTrainedModel") or not inspect.isclass(each):
                continue
            if issubclass(each, PreTrainedModel) and each.config_class is config_class:
                yield each


def _make(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The same model each time: memory that a constructor leaves as it was would differ between ranks."""
    seed_all(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # it makes torch.empty give NaN
    try:
        model = model_class(config)
    finally:
        torch.use_deterministic_algorithms(False)
    numel = sum(param.numel() for param in model.parameters())
    if numel > LIMIT_NUMEL:
        raise CannotBuildError(f"{numel} elements are too many")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.isnan().any():
                tensor.normal_(0.0, 0.05)
        for param in model.parameters():
            if param.ndim > 1 and not param.any():  # zeros hide what comes before them, or are divided by
                param.normal_(0.0, 0.02)
    return model.float().train()


_SELDOM = {"inputs_embeds", "pixel_values_videos", "encoder_hidden_states", "token_type_ids", "padding_mask"}
_LOSS = {"labels", "start_positions", "end_positions", "return_loss"}
_WORDS = {"input_ids", "attention_mask", "decoder_input_ids", "bbox"}


def _layouts(model: PreTrainedModel) -> Iterator[Layout]:
    """From the richest inputs to the plainest, in all layouts of images and sounds."""
    taken = arguments(model)
    needed = {name for name, is_needed in taken.items() if is_needed}
    if unknown := {name for name in needed if not can_make(name)}:
        raise CannotBuildError(f"{type(model).__name__}.forward needs {', '.join(sorted(unknown))}")
    known = {name for name in taken if can_make(name) and (name in needed or name not in _SELDOM)}
    main = model.main_input_name
    main = ({main} if isinstance(main, str) else set(main)) & set(taken)
    choices = [
        known,
        known - _LOSS,
        known - {"image_sizes"},
        known - {"image_sizes", "attention_mask"},
        needed | main | (known & _LOSS),
        needed | main,
    ]
    choices += [needed | (known & (_WORDS | _LOSS)), needed | (known & _WORDS)]
    choices += [
        known - {"pixel_values", "image_sizes", "image_grid_thw"},
        known - {"input_features", "input_features_mask"},
    ]
    tried: set[Layout] = set()
    for names in choices:
        if not names & {"input_ids", "input_features", "input_values"}:
            names = names - {"attention_mask", "padding_mask"} | (needed & names)
        images = IMAGE_LAYOUTS if "pixel_values" in names else IMAGE_LAYOUTS[:1]
        sounds = SOUND_LAYOUTS if names & {"input_features", "input_values"} else SOUND_LAYOUTS[:1]
        if "image_grid_thw" in names or "grid_thw" in names:
            images = ("patches",)
        for image, sound in product(images, sounds):
            layout = Layout(image, sound, frozenset(names))
            if names and layout not in tried:
                tried.add(layout)
                yield layout


def _assert_trains(tiny: TinyModel) -> None:
    model, losses = tiny.model, []
    inputs = tiny.inputs(0)
    for _ in range(2):
        model.zero_grad()
        loss = loss_of(forward(model, inputs, 0))
        loss.backward()
        losses.append(loss.item())
    if losses[0] != losses[0] or abs(losses[0]) == float("inf"):
        raise CannotBuildError(f"the loss is {losses[0]}")
    if losses[0] != losses[1]:
        raise CannotBuildError(f"the same inputs give a loss of {losses[0]} and of {losses[1]}")
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    if not any(gradient.abs().max() > 0 for gradient in gradients if gradient.numel()):
        raise CannotBuildError("no parameter has a gradient")
    if not all(gradient.isfinite().all() for gradient in gradients):
        raise CannotBuildError("a gradient is not finite")
