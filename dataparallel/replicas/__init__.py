"""The copies of a module: how its tree is read and built again, and what later calls use again."""
