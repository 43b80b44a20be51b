"""Replicas and tensors that later calls use again. Others import only ``replicas``, which decides."""
