"""One backward: finding out that it runs, collecting its gradients, and reducing them over the ranks.

[Note: one backward] Autograd tells nobody that a backward begins, where it is, or that it broke off. The engine finds out
so:

- **Session.** The first event of a backward (a gradient of the root's output, of a call's output, or of a parameter) opens
  a session: it holds the gradients that have come (`accumulation`) and lives until autograd calls back at the end.
- **Pass.** The call of autograd that the session belongs to, which another thread may work for, tells when it returns or raises
  (`passes`). If the session has not ended by then, the backward broke off: everything is put at rest (`Backward.recover`).
- **Token.** Autograd drops its callbacks when a backward raises, sooner or later. The session's token is held by the callback
  alone, so a dead weak reference to it means "broke off" as well, should no call have told.
- **Open calls.** The first gradient of a call's outputs opens the call: its units are made whole again, into the same
  storages, and the *same* function outputs are put back into the modules, because a checkpointed forward is recomputed
  without module hooks. The backward of `_Gather` gets all gradients of the call's parameters at once and closes it.
  Autograd runs the nodes made latest first, so when a call opens, every open call whose forward came after it is over, also
  one that had nothing to do.
- **Inside.** Where the first event comes in a call inside the call (a reentrant checkpoint, in a program that calls parts of
  the model), autograd would call back at the end of that. The session then ends with the call around it.
- **Graph task.** A reentrant checkpoint runs a backward inside the backward. It has a graph task (torch's number of a
  backward) of its own: gradients that come under another number than the one that opened the call are a part; the call
  stays open.
- **Reductions** follow one agreed order on all ranks, with places among the waits for gathers (`schedule.ReductionSchedule`).
  A rank that skipped a unit, or has its gradients late, takes part with zeros, and at the end all ranks agree which parameters
  anybody used: the others keep `.grad = None` (`reduction`). Where modules compute with the parameters at rest (stage 0 in one
  dtype), autograd fills `.grad`, and buckets of it are averaged (`plain`, `buckets`).
"""
