"""Several machines: one process for each, over a process group of ``torch.distributed``.

``backend`` is what this room asks torch's group, ``group`` has `Machines`, one for each purpose of a group. ``staging``
and ``collectives`` move tensors. ``rounds`` is what callers see, ``line`` plays the rounds of a purpose, ``launcher``
is the thread in which all lines go on, and ``order`` is the one order in which it issues. ``control`` is what ranks say
to each other, ``agreement`` what they say in a round. ``health`` says if a group can still be used, ``board`` is what
ranks tell each other about waits and failures, ``waiting`` waits so that every failure ends it, ``errors`` are what
they raise. ``hook_calls`` calls what sends something itself. ``over`` serves tensors whose parts lie on several
machines, ``peer_rounds``, ``peer_values`` and ``packed`` collectives of replicas.

Only this room knows process groups. It knows no modules and no gradients. ``units`` and ``composable`` call it, and
they import it only where a group or a mesh was given.
"""
