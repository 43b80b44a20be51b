"""Units: parameters that are gathered on a slot before they are used, and freed together after it.

The room runs ``composable.fully_shard`` and is for nobody else.
"""
