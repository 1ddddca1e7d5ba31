"""Mutations: mistakes that someone could make in the code, each of which tests must notice.

`python -m tests.mutations` makes each in a copy of the project, runs the tests named beside it, and lists those that nobody
noticed. Words given choose mutations by name; `--tests FOLDER` runs the tests of another checkout on the mutated code. Run it
by hand, before and after tests are left out or merged: it takes about a minute a mutation.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_COPIED = ("hf_zero", "tests", "recipes", "configs", "pyproject.toml", "README.md")
_LIMIT_S = 600


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    Attributes:
        file: of the package.
        old: text that occurs there once.
        new: what stands there instead.
        tests: arguments of pytest; one of these tests at least has to fail.
    """

    file: str
    old: str
    new: str
    tests: str


MUTATIONS = {
    # gradients
    "sum instead of mean": Mutation(
        "engine/backward/reduction.py",
        'self.world.data.num_ranks if self.world.config.gradient_reduction == "mean" else 1',
        "1",
        "tests/engine/test_engine.py",
    ),
    "unused counts as used": Mutation(
        "engine/backward/reduction.py",
        "self._give([(p, rows) for p, rows, is_used in item.results if is_used])",
        "self._give([(p, rows) for p, rows, _ in item.results])",
        "tests/engine/test_property.py",
    ),
    "what torch exchanges is watched no more": Mutation(
        "engine/parameters/whole.py",
        'if name == "__dict__" and (call :=',
        'if name == "" and (call :=',
        "tests/engine/test_cast.py",
    ),
    "ids are those of other parameters": Mutation(
        "optim/stand_in.py",
        "if type(value) is int and value in self._plain:",
        "if False:",
        "tests/optim/test_beside_groups.py",
    ),
    "options of single parameters are lost": Mutation(
        "optim/stand_in.py",
        "        if is_manager(value):",
        "        if False:",
        "tests/optim/test_beside_groups.py",
    ),
    "a step sees another model": Mutation(
        "optim/on_every_rank.py",
        "            own[name] = self._plain[id(param)]",
        "            pass",
        "tests/optim/test_beside_groups.py",
    ),
    "reads of a mixture pass": Mutation(
        "engine/parameters/at_rest/gathers.py",
        "if written and are_together",
        "if False and are_together",
        "tests/engine/parameters/test_given.py",
    ),
    "unused elsewhere is lost": Mutation(
        "engine/backward/reduction.py",
        "self._give([(p, self._unused[p]) for p in self.given if p in self._unused])",
        "self._give([])",
        "tests/engine/test_engine.py tests/engine/backward/test_reduction.py",
    ),
    "gradients in flight are unbounded": Mutation(
        "engine/backward/reduction.py",
        "self._bytes_in_flight() + num_bytes > self.world.config.bucket_bytes",
        "False",
        "tests/engine/backward/test_reduction.py",
    ),
    "other units are not noticed": Mutation(
        "engine/backward/reduction.py",
        'if not reports.are_alike("sequence_hash"):',
        "if False:",
        "tests/engine/backward",
    ),
    "gradients left over are dropped": Mutation(
        "engine/backward/reduction.py",
        "        if has_leftover:\n            self._reduce_leftover(leftover)",
        "",
        "tests/engine/backward tests/engine/test_engine.py",
    ),
    "autograd's gradient is summed in place": Mutation(
        "engine/backward/reduction.py",
        "if is_autograds or not (flat.dtype == dtype",
        "if not (flat.dtype == dtype",
        "tests/engine/backward/test_reduction.py",
    ),
    "a second use overwrites": Mutation(
        "engine/backward/accumulation.py",
        "into[p] = into[p] + grad if p in into else grad",
        "into[p] = grad",
        "tests/engine/backward/test_reduction.py",
    ),
    "units stay though other ranks have let them go": Mutation(
        "engine/backward/reduction.py",
        'self.stays_alike = reports.are_alike("staying")',
        "self.stays_alike = True",
        "tests/engine/units/test_keeping.py",
    ),
    "what is kept goes after each micro-batch": Mutation(
        "engine/units/gathering.py",
        "staying = self.staying(is_last) if stays_alike else ()",
        "staying = ()",
        "tests/engine/units/test_keeping.py",
    ),
    "what was kept for other ranks piles up": Mutation(
        "engine/ranks/serving.py",
        "done = [each for each in _kept if each[0].is_among(ranks)]",
        "done = []",
        "tests/engine/ranks/test_leaving.py",
    ),
    "what torch exchanges of a gradient is lost": Mutation(
        "engine/parameters/at_rest/operators.py",
        'writes = base_name(func).endswith("_") and "barrier" not in base_name(func)',
        "writes = False",
        "tests/engine/parameters/test_torch_exchanges.py",
    ),
    "each parameter used at rest is reduced alone": Mutation(
        "engine/backward/accumulation.py",
        "if is_part and len(self._sums[unit]) < len([*filter(is_trainable, unit.parameters)]):",
        "if False:",
        "tests/engine/backward/test_accumulation.py",
    ),
    "each use of a tied weight is reduced": Mutation(
        "engine/backward/accumulation.py",
        "if not (self._comes_again(unit) and",
        "if not (False and",
        "tests/engine/backward/test_accumulation.py",
    ),
    "what other graphs use waits for them": Mutation(
        "engine/backward/backward.py",
        "unit.live_calls.any_apart_from(self.session, comes_to)",
        "unit.live_calls.any_apart_from(self.session, lambda call: True)",
        "tests/engine/backward/test_accumulation.py",
    ),
    "sums are rounded on their way": Mutation(
        "engine/backward/accumulation.py",
        " and all(map(self.reducer.sends_sums, given))",
        "",
        "tests/engine/backward/test_accumulation.py",
    ),
    "autograd's first gradient is added to": Mutation(
        "engine/backward/accumulation.py",
        "is_own = p in self._own or total is not sums[p]",
        "is_own = True",
        "tests/engine/backward",
    ),
    "hooks' results are ignored": Mutation(
        "engine/backward/accumulation.py",
        "waiting[p] = waiting[p] if changed is None else changed",
        "pass",
        "tests/engine/backward/test_reduction.py",
    ),
    "reduced gradients are kept once too often": Mutation(
        "engine/backward/accumulation.py",
        "factor = p.layout.num_ranks if p.averages else int(counts_once)",
        "factor = 1",
        "tests/engine/test_users_code.py",
    ),
    "a torn backward of stage 0 goes on": Mutation(
        "engine/backward/buckets.py",
        "while not self._is_torn and (index",
        "while (index",
        "tests/engine/backward",
    ),
    # units
    "stale after an edit": Mutation(
        "engine/units/gathering.py",
        "        if self.edited:\n            self.on_rows_changed(list(self.edited))",
        "        if False:\n            pass",
        "tests/engine/parameters/test_edits.py",
    ),
    "stale after a step that raised": Mutation(
        "engine/units/gathering.py",
        "            self.edited.update(dict.fromkeys(self._parameters, 0))\n            self._stepping = None",
        "            self._stepping = None",
        "tests/test_under_way.py",
    ),
    "nothing is gathered ahead": Mutation(
        "engine/units/gathering.py",
        "                self._prefetch(self.schedule.use(unit.index))",
        "                pass",
        "tests/engine/units tests/engine/test_engine.py",
    ),
    "kept units are dropped": Mutation(
        "engine/units/gathering.py",
        "return self.kept.all if entry.reads_in_backward else self.kept.by_budget",
        "return frozenset()",
        "tests/engine/units",
    ),
    "writes of a forward may differ": Mutation(
        "engine/units/gathering.py",
        "            check_same_on_all_ranks(written, self._world)\n",
        "",
        "tests/engine/test_writes_in_forward.py",
    ),
    "budget grows again": Mutation(
        "engine/units/keeping.py",
        "min(lowest, self.num_bytes) if self.is_known else lowest",
        "lowest",
        "tests/engine/units/test_keeping.py",
    ),
    "writes through data are not counted": Mutation(
        "engine/parameters/whole.py",
        "            count += known[_COUNTER]._version\n",
        "            pass\n",
        "tests/engine/test_writes_in_forward.py tests/engine/parameters",
    ),
    "shared memory is written in place": Mutation(
        "engine/parameters/whole.py",
        '        """Move into memory of its own."""\n        self.move()',
        '        """Move into memory of its own."""',
        "tests/engine/test_writes_in_forward.py tests/engine/parameters",
    ),
    "nothing is written back": Mutation(
        "engine/gathered_parameters.py",
        "changed = [item.param for item in items if self._write_back(item) or item.is_changed]",
        "changed = [item.param for item in items if item.is_changed]",
        "tests/engine/test_gathered_parameters.py",
    ),
    # layout and exchanges
    "last rank's rows are one too many": Mutation(
        "layout.py",
        "return start, min(start + self.chunk_numel, self.numel)",
        "return start, start + self.chunk_numel",
        "tests/test_layout.py",
    ),
    "fused projections are cut as one": Mutation(
        "layout.py",
        "width = -(-size // self.num_groups)",
        "width = size",
        "tests/test_layout.py",
    ),
    "terms are added in the order of ranks": Mutation(
        "comm/host/one_host.py",
        "add(sums, terms, totals)",
        "add(terms, sums, totals)",
        "tests/comm/test_collectives.py tests/test_parity.py",
    ),
    "waits in a host's memory are not seen": Mutation(
        "comm/host/one_host.py",
        "waits.by_thread[thread] = self",
        "waits.by_thread.pop(thread, None)",
        "tests/comm/beside/test_crossed.py",
    ),
    "an average of rank 0 alone is taken for an edit": Mutation(
        "engine/parameters/at_rest/rule.py",
        "gather(roots, what, not roots_written)",
        "gather(roots, what, not written)",
        "tests/engine/ranks/test_serving.py",
    ),
    "peers' labels are not compared": Mutation(
        "comm/host/board.py",
        "if theirs != ours or len(message) != len(posted.message):",
        "if False:",
        "tests/comm tests/engine/backward/test_failures.py",
    ),
    "a slot is reused too early": Mutation(
        "comm/host/board.py",
        "if self._count >= _SLOTS:",
        "if False:",
        "tests/comm/test_collectives.py",
    ),
    "a dead peer is waited for": Mutation(
        "comm/host/board.py",
        "if not peer.is_alive() and words[word] < count:",
        "if False:",
        "tests/comm/test_faults.py",
    ),
    "the end of one reduction waits for others": Mutation(
        "comm/host/board.py",
        "self._wait(_READ, self._completed, description, timeout_s)",
        "self._wait(_READ, self._unread[-1].number, description, timeout_s)",
        "tests/comm/test_collectives.py",
    ),
    "own rows stay exact on the wire": Mutation(
        "comm/backends/wire.py",
        "unpack(wire, values, item.flat[number * chunk : (number + 1) * chunk])",
        "number == rank or unpack(wire, values, item.flat[number * chunk : (number + 1) * chunk])",
        "tests/comm/backends/test_wire.py",
    ),
    "int4 loses its sign": Mutation(
        "comm/backends/wire.py",
        "((numbers << 4) >> 4) * scales",
        "(numbers & 15) * scales",
        "tests/comm/backends/test_wire.py",
    ),
    "dropped exchanges are forgotten": Mutation(
        "comm/exchange.py",
        "            self._in_flight.dropped.append(self)",
        "            pass",
        "tests/comm",
    ),
    # optimizers
    "a closure sees old parameters": Mutation(
        "optim/on_rows.py",
        "            self._give()\n            self._call.after_change()\n            result = evaluate()",
        "            result = evaluate()",
        "tests/optim",
    ),
    "pieces count steps together": Mutation(
        "optim/offloaded/chunked.py",
        "piece.inputs[name] = torch_compat.local_of(value).clone()",
        "piece.inputs[name] = torch_compat.local_of(value)",
        "tests/optim",
    ),
    "any optimizer steps in pieces": Mutation(
        "optim/offloaded/pieces.py",
        "    if why is not None:\n        raise UsageError(",
        "    if False:\n        raise UsageError(",
        "tests/optim",
    ),
    "buffers stay those that came at the end of a backward": Mutation(
        "engine/backward/buffers.py",
        "if records_gradients and self._is_due:",
        "if False:",
        "tests/engine/backward/test_buffers.py",
    ),
    "compilers see gradients at rest": Mutation(
        "engine/parameters/whole.py",
        'of whole tensors alone."""\n        if not torch.compiler.is_compiling():',
        'of whole tensors alone."""\n        if True:',
        "tests/engine/parameters/test_compiled.py",
    ),
    # checkpoints
    "a damaged file is loaded": Mutation(
        "checkpoint/files/manifest.py",
        "if left or crc != extent.crc:",
        "if left:",
        "tests/checkpoint/files",
    ),
    "an older checkpoint is not put back": Mutation(
        "checkpoint/commit.py",
        "        except OSError:\n            recover_one(self.final)\n            raise",
        "        except OSError:\n            raise",
        "tests/checkpoint/test_commit.py",
    ),
    "the program's own files are lost": Mutation(
        "checkpoint/files/others.py",
        '    _move(old, new, "", left, overwrites)\n\n',
        "    pass\n\n",
        "tests/checkpoint/test_commit.py",
    ),
    "bits that flip in text count as edits": Mutation(
        "checkpoint/files/manifest.py",
        "path.stat().st_mtime_ns <= (folder / MANIFEST).stat().st_mtime_ns",
        "False",
        "tests/checkpoint/files/test_manifest.py",
    ),
    "the manifest may leave its folder": Mutation(
        "checkpoint/files/manifest.py",
        'if not name or name != os.path.basename(name) or name in (".", "..")',
        "if not name",
        "tests/checkpoint/files/test_manifest.py",
    ),
    "an optimizer's groups are not compared": Mutation(
        "checkpoint/optimizer_state.py",
        "            if left != right:\n",
        "            if False:\n",
        "tests/integrations/accelerate/test_checkpoint_errors.py",
    ),
    "an epoch is drawn anew": Mutation(
        "integrations/accelerate/data_order.py",
        'states = order["begun"] if progress is Progress.UNDER_WAY else order',
        "states = order",
        "tests/integrations/accelerate/test_data_order.py",
    ),
    # long sequences, loading
    "a ring sees what comes later": Mutation(
        "sharding/sequence/ring.py",
        "if queries.is_causal and other > own:",
        "if False:",
        "tests/sharding/sequence",
    ),
    "queries that see nothing are no numbers": Mutation(
        "sharding/sequence/ring.py",
        "return logarithms.masked_fill(logarithms == -math.inf, 0.0)",
        "return logarithms",
        "tests/sharding/sequence",
    ),
    "a changed head is not noticed": Mutation(
        "engine/tiles/heads.py",
        "if self._head.stamp() != self._stamp:",
        "if False:",
        "tests/engine/tiles",
    ),
    "conversions that mix rows read rows": Mutation(
        "sharding/loading.py",
        "        if any(dim % ndim == cut for dim in dims):\n            return False\n",
        "",
        "tests/sharding/test_loading.py",
    ),
    "mismatched shapes are sliced": Mutation(
        "sharding/loading.py",
        "        elif shapes[key] != tuple(state[target].shape):\n            whole.add(target)\n",
        "",
        "tests/sharding/test_loading.py",
    ),
    # ranks
    "what graphs of backwards read is released": Mutation(
        "engine/units/storage/for_graphs.py",
        "if unit.comes_and_goes and unit not in self._leases:",
        "if False:",
        "tests/engine/test_autograd_grad.py",
    ),
    "what a graph reads by the way is released": Mutation(
        "engine/units/calls/saved.py",
        "if not is_there or torch.is_grad_enabled():",
        "if not is_there:",
        "tests/engine/test_autograd_grad.py",
    ),
    "waits in groups of the program are not seen": Mutation(
        "engine/ranks/place.py",
        "is_ahead(progress(), self.reached) or is_waiting_beyond(self.in_groups)",
        "is_ahead(progress(), self.reached)",
        "tests/engine/ranks/test_serving.py",
    ),
    "a rank that waits for another model is taken to be behind": Mutation(
        "engine/ranks/serving.py",
        "if waits_at is None or is_ahead(place.reached, waits_at.reached):",
        "if waits_at is None or waits_at.world != place.world or is_ahead(place.reached, waits_at.reached):",
        "tests/engine/ranks/test_serving.py",
    ),
    "what one rank loads alone waits for all": Mutation(
        "engine/modules/state_dict.py",
        "if not is_alone:",
        "if True:",
        "tests/engine/ranks/test_serving.py",
    ),
    "arguments of a wrapped Trainer have no names": Mutation(
        "integrations/trainer/patch.py",
        "is each.POSITIONAL_OR_KEYWORD] or list(first)",
        "is each.POSITIONAL_OR_KEYWORD]",
        "tests/integrations/trainer/test_arguments.py",
    ),
    "parameters from before are given to modules as they are": Mutation(
        "engine/parameters/replaced.py",
        "return current(param) if isinstance(param, Tensor) and isinstance(param, Replaced) else None",
        "return None",
        "tests/engine/parameters/test_replaced.py",
    ),
    "another call's tensors are a change": Mutation(
        "engine/parameters/records.py",
        "known[RECORD].param if RECORD in known else known.get(STANDS_FOR, param)",
        "known.get(STANDS_FOR, param)",
        "tests/engine/test_engine.py",
    ),
    "crossed waits are not seen": Mutation(
        "comm/beside/crossed.py",
        "if place.kind in waits.ORDERED_KINDS and unit not in (None, place.unit):",
        "if False:",
        "tests/comm/beside/test_crossed.py",
    ),
    "barriers of torch are not seen": Mutation(
        "comm/beside/crossed.py",
        "_in_torch(asker) if waiting is None else waiting.place",
        "None if waiting is None else waiting.place",
        "tests/comm/beside/test_crossed.py",
    ),
    "experts stay within the tensor axis": Mutation(
        "comm/groups/axes.py",
        "return max(ep_size // tensor_size, 1)",
        "return ep_size if tensor_size == 1 else 1",
        "tests/sharding/axes/test_shared_experts.py",
    ),
    "gradients of shared layers are not planned": Mutation(
        "plan/activations.py",
        "torch.autograd.backward(_number_of(outputs))",
        "pass",
        "tests/plan/test_shared_layers.py",
    ),
    # what programs of others do
    "ranks may give other values": Mutation(
        "engine/parameters/at_rest/given.py",
        "_TOLERANCE, _ROUNDINGS = 1e-3, 1e3",
        "_TOLERANCE, _ROUNDINGS = 1e9, 1e19",
        "tests/engine/parameters/test_given.py",
    ),
    "memory may be shared": Mutation(
        "sharding/shared_memory.py",
        "    if trains and _overlap",
        "    if False and _overlap",
        "tests/sharding/test_shared_memory.py",
    ),
    "aliases stay behind": Mutation(
        "sharding/late.py", "        alias.follow()\n", "        pass\n", "tests/sharding/test_shared_memory.py"
    ),
    "a step may exchange": Mutation(
        "optim/trial.py",
        'if func.namespace in ("c10d", "_c10d_functional"):',
        "if False:",
        "tests/optim/test_foreign_optimizers.py",
    ),
    "users' hooks come after ours": Mutation(
        "engine/modules/hooks.py",
        "if self._number in hooks and",
        "if False and",
        "tests/engine/test_users_code.py",
    ),
    "a cast to float32 is not seen": Mutation(
        "sharding/model_methods.py",
        "        engine.as_partitioned.note_cast(function)\n",
        "        pass\n",
        "tests/engine/test_cast.py",
    ),
    "what stays whole is gathered": Mutation(
        "engine/units/unit.py",
        "self.keeps_whole = stays_whole or not world.shards_parameters",
        "self.keeps_whole = not world.shards_parameters",
        "tests/engine/units/test_whole.py",
    ),
    "an embedding goes between micro-batches": Mutation(
        "engine/units/keeping.py",
        "saves = accumulates or num_entries > 1",
        "saves = num_entries > 1",
        "tests/engine/units/test_keeping.py",
    ),
    # gradients that one rank reads alone, and steps that ranks come to together
    "a step does not wait for who reads alone": Mutation(
        "engine/units/gathering.py",
        "        elif is_read_alone:\n",
        "        elif False:\n",
        "tests/engine/ranks/test_serving.py -k before_the_step",
    ),
    "writes to gradients are not counted": Mutation(
        "engine/ranks/offers.py",
        "_Written(num_writes + 1, ready)",
        "_Written(num_writes, ready)",
        "tests/engine/ranks/test_serving.py -k cannot_be_read",
    ),
    "what a gradient is after a step goes for it": Mutation(
        "engine/parameters/at_rest/known/entries.py",
        'digest("a gradient", serving.name, serving.version, tuple(name))',
        'digest("a gradient", serving.name, name.engine, name.number)',
        "tests/engine/ranks/test_serving.py -k cannot_be_read",
    ),
    "a cast to what it is exchanges tensors": Mutation(
        "sharding/other_libraries/tensor_swaps.py",
        "if t1.dtype == t2.dtype and t1.shape == t2.shape and t1.requires_grad == t2.requires_grad:",
        "if False:",
        "tests/engine/test_cast.py -k memory_that",
    ),
    "states keep the groups of a stand-in": Mutation(
        "optim/stand_in.py",
        "kept = _exchanged(kept, real)",
        "pass",
        "tests/optim/test_beside_groups.py -k files_of",
    ),
}


def main() -> int:
    """Run them; the exit code is 1 if any was not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("words", nargs="*", help="run only mutations that have one of these in their names")
    parser.add_argument("--tests", type=Path, default=_ROOT, metavar="FOLDER", help="checkout whose tests are run")
    args = parser.parse_args()
    chosen = [name for name in MUTATIONS if not args.words or any(word in name for word in args.words)]
    unnoticed = []
    for name in chosen:
        start = time.monotonic()
        found = run(MUTATIONS[name], args.tests)
        print(f"{time.monotonic() - start:5.0f} s  {name}: {found}", flush=True)
        unnoticed += [] if found.startswith("noticed") else [name]
    print(
        f"{len(chosen) - len(unnoticed)} of {len(chosen)} noticed{': not ' if unnoticed else ''}{', '.join(unnoticed)}"
    )
    return 1 if unnoticed else 0


def run(mutation: Mutation, tests: Path = _ROOT) -> str:
    """What its tests say of one: "noticed by" the first that failed, or why not.

    Args:
        mutation: to make.
        tests: a checkout, whose tests are run.
    """
    with tempfile.TemporaryDirectory(prefix="hf_zero_mutation_") as folder:
        for name in _COPIED:
            source = (tests if name == "tests" else _ROOT) / name
            if source.is_dir():
                shutil.copytree(source, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder)
        path = Path(folder) / "hf_zero" / mutation.file
        text = path.read_text()
        if text.count(mutation.old) != 1:
            return f"{mutation.file} has its text {text.count(mutation.old)} times: write the mutation anew"
        path.write_text(text.replace(mutation.old, mutation.new))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            *mutation.tests.split(),
        ]
        environment = {**os.environ, "PYTHONPATH": folder}
        try:
            ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"noticed by nobody within {_LIMIT_S} s"
        failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if ran.returncode == 1 and failed:
            return f"noticed by {failed[0].split(' - ')[0].split(maxsplit=1)[1]}"
        return f"nobody noticed (pytest ended with {ran.returncode}): {ran.stdout.strip().splitlines()[-1:]}"


if __name__ == "__main__":
    sys.exit(main())
