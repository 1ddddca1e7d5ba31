"""Units: which parameters are gathered together, which of them are whole, and until when.

[Note: one step] `shard_model` has cut every parameter to this rank's rows (`parameters/`), put the parameters into *units*
that are gathered together (`grouping`, `unit`), and hung hooks on the modules whose calls need a unit (`modules/hooks`).

1. **Forward.** The root's pre-hook starts the record of gathers (`schedule`). Before a module that needs a unit runs, its
   pre-hook *acquires* the unit: the gather is waited for (or started, where nobody has prefetched it), and the gathers that
   the last forward needed next are started. The whole tensors pass through an autograd function (`_Gather`) and are put
   into the modules. After the module has run, its hook puts the rows back and gives the *lease* back. In stage 3 the memory
   goes with the last lease; the units that the backward begins with are kept.
2. **Backward.** See [Note: one backward], in `engine/backward`.
3. **Optimizer.** `optim/` hears of every step through torch's global hooks, and hands torch a *stand-in* to step on:
   plain rows for elementwise optimizers, whole parameters on one *owner* each for all others. Then every unit that stays
   whole between uses (stages 1 and 2) starts to gather its new rows, and the next forward waits for it. Each unit has an
   *epoch* that counts these changes: a backward whose forward saw an older epoch raises.
"""
