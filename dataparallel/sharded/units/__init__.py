"""Runs ``composable.fully_shard``: units are gathered on each slot before they are used, and freed afterwards.

Files in the order in which they are read, as each imports only from files before it: parameters where their owners
have them (``unit``), their gathers on a slot (``gather``), their gradients (``backward``), all units of a root, its
calls and passes (``tree``), and what runs a unit's module, between nodes and hooks in the graph (``bindings``).

* A *unit* is the parameters that one application of ``fully_shard`` gathers and frees together (`tree.Unit`).
* A *tree* is the units of the outermost module that is called, which is the tree's *root* (`tree.Tree`).
* A *slot* is a place where a replica runs (`gather.SlotUnit`). Its device is also an *owner*: it keeps one shard of
  each parameter, and the optimizer steps there.
* A *gather* copies a unit's shards from all owners to one slot, where the unit is *full* until it is freed.
* A *delivery* is the gradients that one slot has computed for a unit. The owners add up the deliveries of all slots.
"""
