"""What is recorded of some steps, and that nothing is of any other."""

import gc
import json
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import hf_zero as zero
from hf_zero.checkpoint.commit import StagedCheckpoint
from hf_zero.checkpoint.files.manifest import Manifest
from hf_zero.checkpoint.model_state import write_model
from hf_zero.comm.exchange import Exchange
from hf_zero.comm.host.one_host import HostExchange
from hf_zero.engine.backward.backward import Backward
from hf_zero.engine.units.calls.call import Call
from hf_zero.engine.units.gathering import Gathering
from hf_zero.trace import recorder
from hf_zero.trace.timeline import Timeline
from tests.engine.twins import EXCHANGES
from tests.models import CASES, make_model
from tests.ranks import on_ranks

_CASE = CASES["llama"]
_ROUNDED_S = 1e-6
_OWNERS = (Exchange, HostExchange, Backward, Call, Gathering)


def _train(
    stage: int, num_steps: int, collectives: str = "pairwise", trace: str | None = None, late_s: float = 0
) -> list[Tensor]:
    model = make_model(_CASE)
    zero.shard_model(model, {"stage": stage, "collectives": collectives, "trace": trace})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(num_steps):
        model(**_CASE.batch(step, dist.get_rank())).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.GatheredParameters(model.parameters()):
        return [param.detach().clone() for param in model.parameters()]


def _methods() -> list[object]:
    return [method for owner in _OWNERS for method in vars(owner).values()]


@on_ranks(2, stage=(1, 2, 3), collectives=EXCHANGES)
def test_trace_has_what_all_ranks_did_and_changes_no_bit(tmp_path: Path, stage: int, collectives: str) -> None:
    file, methods = tmp_path / f"{stage}{collectives}.json", _methods()
    plain = _train(stage, 6, collectives)
    traced = _train(stage, 6, collectives, str(file))
    assert all(map(torch.equal, plain, traced))
    assert _methods() == methods
    dist.barrier()
    found = Timeline.read(file)
    assert (found.num_steps, len(found.lanes), found.about["stage"]) == (3, 2, stage)
    counts = [Counter((span.kind, span.name) for span in lane.spans) for lane in found.lanes]
    assert counts[0] == counts[1]
    blocks = [f"model.layers.{number}" for number in range(2)]
    assert [counts[0][kind, block] for kind in ("forward", "backward") for block in blocks] == [3] * 4
    assert counts[0]["step", "optimizer"] == 3
    num_gathers = sum(
        count for (kind, name), count in counts[0].items() if kind == "wait" and name.startswith("gather")
    )
    assert num_gathers >= 3 * len(blocks)
    for lane in found.lanes:
        assert lane.ends_s == sorted(lane.ends_s)
        assert all(span.start_s <= span.end_s for span in lane.spans)
        # What is under way as the first step begins has begun before, and is not in it.
        began_s, ended_s = lane.ends_s[0] - _ROUNDED_S, lane.ends_s[-1] + _ROUNDED_S
        assert all(began_s <= span.start_s and span.end_s <= ended_s for span in lane.spans)
        assert (stage == 3 and collectives != "host") <= (max(size for _, size in lane.memory or [(0, 0)]) > 0)


@on_ranks(2)
def test_before_and_after_the_steps_only_their_count_is_taken(tmp_path: Path) -> None:
    methods, names = _methods(), []

    def changed(*_: object) -> None:
        names.append([m.__name__ for m, old in zip(_methods(), methods, strict=True) if m is not old])

    handle = register_optimizer_step_pre_hook(changed)
    _train(3, 7, trace=str(tmp_path / "t.json"))
    handle.remove()
    assert names[:2] == [["after_step"]] * 2
    assert all(len(each) > 5 for each in names[2:5])
    assert names[5:] == [[]] * 2


@on_ranks(2)
def test_a_file_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(zero.ConfigError, match=r"the trace cannot be written: .*file/t\.json"):
        _train(3, 0, trace=str(tmp_path / "file" / "t.json"))


@on_ranks(2)
def test_training_goes_on_where_the_disk_is_full_at_the_end(tmp_path: Path) -> None:
    said: list[str] = []

    def full(self: Timeline, path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Timeline, "save", full)
        patch.setattr(recorder.logger, "error", lambda text, *args: said.append(text % args))
        _train(2, 6, trace=str(tmp_path / "t.json"))
    assert len(said) == (dist.get_rank() == 0)
    assert all("No space left" in text and "training goes on" in text for text in said)


@on_ranks(2)
def test_a_run_that_ends_too_early_says_so(tmp_path: Path) -> None:
    file, said = str(tmp_path / "t.json"), []
    _train(3, 4, trace=file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder.logger, "warning", lambda text, *args: said.append(text % args))
        recorder._recorders[file]._at_exit()
    recorder._recorders[file]._stop()
    assert (
        said
        == [f"{file} was not written: a trace records steps 3 to 5, and the run ended after step 4"][
            : not dist.get_rank()
        ]
    )


@on_ranks(2, num_steps=(1, 4, 6))
def test_a_trace_keeps_no_model(tmp_path: Path, num_steps: int) -> None:
    engines = weakref.WeakSet([zero.shard_model(make_model(_CASE), 3)])
    gc.collect()
    assert not engines
    file = str(tmp_path / f"{num_steps}.json")
    _train(3, num_steps, "host", trace=file)
    gc.collect()
    found = recorder._recorders[file]
    assert found._world() is None
    found._stop()


@on_ranks(2)
def test_saves_are_in_it(tmp_path: Path) -> None:
    model = make_model(_CASE)
    file = tmp_path / "t.json"
    engine = zero.shard_model(model, {"stage": 3, "trace": str(file)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        model(**_CASE.batch(step, dist.get_rank())).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        staged = StagedCheckpoint(tmp_path / f"state{step}", engine.world)
        write_model(model, staged.folder, engine.world)
        staged.commit(Manifest(step=step, world_size=2, stage=3))
    dist.barrier()
    names = [span.name for span in Timeline.read(file).lanes[1].spans if span.kind == "save"]
    assert names == ["state1", "state2", "state3"]  # those between the end of step 2 and that of step 5
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X", "b", "e", "C", "i"}
