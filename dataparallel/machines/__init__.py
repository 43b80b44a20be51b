"""Several machines: one process for each, over a process group of ``torch.distributed``.

``backend`` is what this room asks torch's group, ``group`` has `Machines`, one for each group. ``staging`` and
``collectives`` move tensors, ``launcher`` issues collectives in one order on all ranks, ``rounds`` is what its callers
see, ``agreement`` is what ranks say to each other in a round. ``board`` is what they tell each other about waits and
failures, ``waiting`` waits so that every failure ends it, ``errors`` are what they raise. ``hook_calls`` calls what
sends something itself. ``over`` serves tensors whose parts lie on several machines.

Only this room knows process groups. It knows no modules and no gradients. ``units`` and ``composable`` call it, and
they import it only where a group or a mesh was given.
"""
