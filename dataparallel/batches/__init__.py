"""Batches that are no dense tensors: how each kind is cut, moved and joined."""
