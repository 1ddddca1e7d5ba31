"""Figures of several engines, side by side."""

import pytest

from hf_zero.bench.compare import Figure, ratios, table, worst

_FOUND = {
    "plain": [{"seconds": 1.0, "bytes": 2e6}, {"seconds": 10.0, "bytes": 2e6}, {"seconds": 2.0, "bytes": 2e6}],
    "other": [{"seconds": 4.0, "bytes": None}, {"seconds": 2.0, "bytes": None}, {"seconds": 2.0, "bytes": None}],
    "mine": [{"seconds": 2.0, "bytes": 1e6}, {"seconds": 3.0, "bytes": 1e6}, {"seconds": 1.0, "bytes": 1e6}],
}


def test_worst_is_the_greatest_of_any_rank_that_has_a_value() -> None:
    ranks = [
        {"seconds": 1.0, "read": None, "loss": 9.0},
        {"seconds": 3.0, "read": 5, "loss": 9.0},
        {"seconds": 2.0, "read": 4},
    ]
    assert worst(ranks, ["seconds", "read"]) == {"seconds": 3.0, "read": 5}
    assert worst([{"read": None}], ["read"]) == {"read": None}


def test_ratios_are_taken_round_by_round() -> None:
    assert ratios(_FOUND, "mine", "seconds", ["plain"]) == [2.0, 0.3, 0.5]


def test_ratio_to_the_best_takes_the_best_of_each_round() -> None:
    assert ratios(_FOUND, "mine", "seconds", ["plain", "other"]) == [2.0, 1.5, 0.5]


@pytest.mark.parametrize("theirs", [None, 0.0])
def test_ratio_to_nothing_is_left_out(theirs: float | None) -> None:
    assert ratios({"mine": [{"read": 1.0}], "other": [{"read": theirs}]}, "mine", "read", ["other"]) == []
    assert ratios({"mine": [{"read": None}], "other": [{"read": 1.0}]}, "mine", "read", ["other"]) == []


def test_table_has_medians_then_ratios_and_marks_what_is_invalid() -> None:
    figures = [Figure("seconds", "load [s]"), Figure("bytes", "read [MB]", 1e6, 1)]
    lines = [" ".join(line.split()) for line in table(_FOUND, figures, ["other"]).splitlines()]
    assert lines == [
        "load [s] read [MB]",
        "plain 2.000 (1.000-10.000) 2.0 (2.0-2.0)",
        "other INVALID 2.000 (2.000-4.000) -",
        "mine 2.000 (1.000-3.000) 1.0 (1.0-1.0)",
        "ratio to plain",
        "other INVALID 1.000 [0.200, 4.000] -",
        "mine 0.500 [0.300, 2.000] 0.500 [0.500, 0.500] ahead",
        "ratio to the best other engine of the round",
        "plain 2.000 [0.500, 5.000] 2.000 [2.000, 2.000] behind",
        "other INVALID 2.000 [0.667, 4.000] -",
        "mine 1.500 [0.500, 2.000] 0.500 [0.500, 0.500] ahead",
    ]
