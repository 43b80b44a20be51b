"""Replicas and tensors that later calls use again. ``replicas`` makes them; ``tensors`` lends them tensors."""
