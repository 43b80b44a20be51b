"""Replicas and tensors that later calls use again. ``replicas`` decides; forms bring stores, made of ``tensors``."""
