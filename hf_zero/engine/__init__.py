"""The engine: what runs in a training step. It knows torch only, and works on any `nn.Module`.

[Note: one step] `shard_model` has cut every parameter to this rank's rows (`parameter`), put the parameters into *units*
that are gathered together (`grouping`, `unit`), and hung hooks on the modules whose calls need a unit (`hooks`).

1. **Forward.** The root's pre-hook starts the record of gathers (`schedule`). Before a module that needs a unit runs, its
   pre-hook *acquires* the unit: the gather is waited for (or started, where nobody has prefetched it), and the gathers that
   the last forward needed next are started. The whole tensors pass through an autograd function (`_Gather`) and are put
   into the modules. After the module has run, its hook puts the rows back and gives the *lease* back. In stage 3 the memory
   goes with the last lease; the units that the backward begins with are kept.
2. **Backward.** See the next note.
3. **Optimizer.** `optimizers` hears of every step through torch's global hooks, and hands torch a *stand-in* to step on
   (`stepping`): plain rows for elementwise optimizers, whole parameters on one *owner* each for all others (`owners`). Then
   every unit that stays whole between uses (stages 1 and 2) starts to gather its new rows, and the next forward waits for
   it. Each unit has an *epoch* that counts these changes: a backward whose forward saw an older epoch raises.

[Note: one backward] Autograd tells nobody that a backward begins, where it is, or that it broke off. The engine finds out
so:

- **Session.** The first event of a backward (a gradient of the root's output, of a call's output, or of a parameter) opens
  a session: it holds the gradients that have come (`accumulation`) and lives until autograd calls back at the end.
- **Token.** Autograd drops its callbacks when a backward raises. The session's token is held by the callback alone, so a
  dead weak reference to it means "broke off": everything is put at rest (`Backward.recover`).
- **Open calls.** The first gradient of a call's outputs opens the call: its units are made whole again, into the same
  storages, and the *same* function outputs are put back into the modules, because a checkpointed forward is recomputed
  without module hooks. The backward of `_Gather` gets all gradients of the call's parameters at once and closes it.
  Autograd runs the nodes made latest first, so when a call opens, every open call whose forward came after it is over, also
  one that had nothing to do.
- **Graph task.** A reentrant checkpoint runs a backward inside the backward. It has a graph task (torch's number of a
  backward) of its own: gradients that come under another number than the one that opened the call are a part; the call
  stays open.
- **Reductions** follow one agreed order on all ranks (`schedule.ReductionOrder`). A rank that skipped a unit takes part
  with zeros, and at the end all ranks agree which parameters anybody used: the others keep `.grad = None` (`reduction`).
  Where modules compute with the parameters at rest (stage 0 in one dtype), autograd fills `.grad`, and buckets of it are
  averaged (`whole_gradients`).

[Note: what users' code may do] Four rules, each written where it is kept: *an edit is seen* before it happens
(`partitioned_tensor`); *whoever reads gets the whole* while a forward or backward runs (`reading`); *gradients under no_sync*
are `.grad` itself, not a picture of it (`accumulation`); *saved weights* are places, not tensors, so that no backward reads
released memory (`saved`).

Files, from the ground up: `precision` and `world` (what all share), `param_hooks`, `partitioned_tensor`, `parameter`,
`unit`, `grouping`, `schedule`, `reading`, `saved`, `call` (one call and what it holds), `gathering` (which units are
whole), `votes`, `reduction`, `whole_gradients`, `accumulation` (gradients until they are reduced), `backward`, `hooks`,
`state_dict`, `engine` (wires them; the events of a forward). Around it: `optimizers` (with `optimizer_kinds`, `owners`,
`stepping`; `streaming`, `piecewise`, `offloaded_states` and `offloaded_parameters` for what is on a disk), `loss_scaling`
(float16), `float32_modules` (what computes in float32 all the same), `gathered_parameters` (whole weights on demand),
`forward_method` (methods other than `forward`), `summary` (what is printed at the start).
"""
