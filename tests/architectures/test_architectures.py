"""Every model type of transformers' registry trains partitioned as it trains whole; an everyday choice, and all others."""

import pytest

from tests.architectures.build import model_types
from tests.architectures.sweep import check, outcome, plain
from tests.ranks import alone, by_hand, on_ranks, run_alone

# Of each kind, and those that use their parameters in unusual ways: embeddings passed to functions, weights shared
# between layers, experts in one tensor, weights under parametrizations.
_EVERYDAY = [
    *("bert", "gpt2", "mixtral", "prophetnet", "wav2vec2", "llava"),
    *by_hand("deberta-v2", "mamba", "t5", "clip", "whisper", "blip-2"),
]
_IN_STAGE_1 = ["bert", "llava", *by_hand("prophetnet", "wav2vec2")]


def _assert_same(model_type: str, stage: int) -> None:
    _, reason = run_alone(plain, model_type)
    if reason:
        pytest.skip(reason)
    assert outcome(model_type, stage) == "ok"


@alone(model_type=_EVERYDAY)
def test_everyday_type_does_not_depend_on_what_is_installed(model_type: str) -> None:
    assert plain(model_type)[1] == ""


@on_ranks(2, model_type=_EVERYDAY)
def test_everyday_type_is_the_same_in_stage_3(model_type: str) -> None:
    assert check(model_type, 3) == "ok"


@on_ranks(2, model_type=_IN_STAGE_1)
def test_everyday_type_is_the_same_in_stage_1(model_type: str) -> None:
    assert check(model_type, 1) == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(model_types()) - set(_EVERYDAY)))
def test_type_is_the_same_in_stage_3(model_type: str) -> None:
    _assert_same(model_type, 3)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(model_types()) - set(_IN_STAGE_1)))
def test_type_is_the_same_in_stage_1(model_type: str) -> None:
    _assert_same(model_type, 1)


@pytest.mark.slow
def test_most_types_can_be_built() -> None:
    """Lest all others be skipped: some need packages that are not here, or inputs that only a pipeline makes."""
    built = [model_type for model_type in model_types() if not run_alone(plain, model_type)[1]]
    assert len(built) > 500
