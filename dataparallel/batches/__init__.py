"""Batches: how tensors, structures of them and users' own kinds are split, moved and joined."""
