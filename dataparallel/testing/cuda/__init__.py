"""Torch's CUDA build without a GPU."""
