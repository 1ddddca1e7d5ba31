"""What a timeline says, on timelines made by hand."""

from pathlib import Path

import pytest

import hf_zero as zero
from hf_zero.trace.picture import draw
from hf_zero.trace.report import in_words, report
from hf_zero.trace.timeline import Lane, Span, Timeline

_GATHER = "gather of 'layer'"


def made() -> Timeline:
    """One step of 1 s on two ranks: rank 1 comes to its gather 0.2 s late."""
    first = Lane(
        [
            Span("forward", "layer", 0.4, 0.5),
            Span("exchange", _GATHER, 0.1, 0.4, 1, 100),
            Span("wait", _GATHER, 0.1, 0.4, 1),
            Span("backward", "layer", 0.5, 0.7),
            Span("save", "checkpoint-1", 0.7, 0.8),
            Span("step", "optimizer", 0.8, 1.0),
        ],
        [(0.4, 2**20), (0.7, 0)],
        [0.0, 1.0],
    )
    second = Lane(
        [
            Span("exchange", _GATHER, 0.3, 0.4, 1, 100),
            Span("wait", _GATHER, 0.35, 0.4, 1),
            Span("forward", "layer", 0.4, 0.5),
            Span("backward", "layer", 0.5, 0.8),
            Span("step", "optimizer", 0.8, 1.0),
        ],
        [],
        [0.0, 1.0],
    )
    return Timeline([first, second], {"stage": 3, "device": "cpu"})


def test_time_is_told_by_what_it_went_to() -> None:
    found = report(made())
    assert found.step_s == 1.0
    assert found.parts == pytest.approx(
        {
            "forward": 0.1,
            "backward": 0.3,
            "optimizer": 0.2,
            "save": 0.05,
            "between steps": 0.4,
            "all but the optimizer": 0.0,
        },
        abs=0.051,
    )
    assert found.waiting == pytest.approx(0.35 / 2)
    assert found.hidden == pytest.approx(1 - 0.35 / 0.4)
    seconds = {loss.what: loss.seconds for loss in found.losses}
    assert seconds["rank 1, for which others waited"] == pytest.approx(0.2 / 2)
    assert seconds["waiting for gathers of parameters"] == pytest.approx((0.1 + 0.05) / 2)
    assert seconds["what the loop does between steps"] == pytest.approx(0.4)
    assert [loss.seconds for loss in found.losses] == sorted(seconds.values(), reverse=True)


def test_without_units_nothing_is_said_of_the_time_between_steps() -> None:
    lane = Lane([Span("step", "optimizer", 0.8, 1.0)], [], [0.0, 1.0])
    found = report(Timeline([lane], {"stage": 0, "device": "cpu"}))
    assert {name: seconds for name, seconds in found.parts.items() if seconds} == pytest.approx(
        {"all but the optimizer": 0.8, "optimizer": 0.2}
    )
    assert not [loss for loss in found.losses if loss.seconds]


def test_words_name_the_three_greatest_losses() -> None:
    lines = in_words(made()).splitlines()
    assert lines[0].startswith("trace of 1 step of 2 ranks, stage 3: 1000.0 ms a step: forward 10.0%")
    assert [line.strip()[:2] for line in lines if line.strip()[1:2] == "."] == ["1.", "2.", "3."]
    assert "rank 1" in lines[5]


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    given = made()
    given.save(tmp_path / "new" / "t.json")
    found = Timeline.read(tmp_path / "new" / "t.json")
    assert found.about == given.about
    for lane, expected in zip(found.lanes, given.lanes, strict=True):
        assert [span[:2] + span[4:] for span in lane.spans] == [span[:2] + span[4:] for span in expected.spans]
        assert [span[2:4] for span in lane.spans] == [pytest.approx(span[2:4]) for span in expected.spans]
        assert (lane.memory, lane.ends_s) == (expected.memory, expected.ends_s)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["t.json"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"traceEvents": []}', '{"otherData": {"maker": "x"}}'])
def test_another_programs_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(zero.UsageError, match=r"t\.json is no trace that hf_zero has recorded"):
        Timeline.read(tmp_path / "t.json")
    with pytest.raises(zero.UsageError, match="No such file"):
        Timeline.read(tmp_path / "none.json")


def test_a_clock_of_another_host_is_moved() -> None:
    given = made()
    moved = Timeline.of([given.lanes[0].moved(50.0), given.lanes[1].moved(-7.0)], given.about)
    assert moved.lanes[0].ends_s == pytest.approx([0.0, 1.0])
    assert moved.lanes[1].spans[0].start_s == pytest.approx(0.3)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(made(), tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 10_000
