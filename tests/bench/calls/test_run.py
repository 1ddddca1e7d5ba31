"""Calls a layer: what is counted is what an engine adds, and it stays below a bound."""

from __future__ import annotations

from collections import Counter

import pytest

from hf_zero.bench.calls.run import Layer, count, table
from hf_zero.bench.processes import BenchError


def test_an_engine_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(BenchError, match="engine 'zero9' is not known"):
        count(["zero9"], 2, "float32")


def test_the_table_has_a_line_for_each_engine_and_the_functions_called_most() -> None:
    layer = Layer(2.0, 1.0, Counter({"Python f file:1": 16, "C g": 8}))
    head, line, *rest = table({"zero3": {"forward": layer, "backward": layer}}, most=1).splitlines()
    assert head.split()[:2] == ["calls", "a"] and line.split() == ["zero3", "2", "1", "2", "1"]
    assert rest == [
        "",
        "zero3, forward:",
        "     2.0  Python f file:1",
        "",
        "zero3, backward:",
        "     2.0  Python f file:1",
    ]


@pytest.mark.slow
def test_a_layer_costs_the_host_no_more_than_fsdp2s() -> None:
    found = count(["zero3:none", "fsdp2"], 2, "bfloat16")
    for name in ("forward", "backward"):
        ours, theirs = (found[engine][name] for engine in ("zero3:none", "fsdp2"))
        assert 0 < ours.python < theirs.python, table(found, most=40)
