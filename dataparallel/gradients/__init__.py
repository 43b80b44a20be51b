"""Sums of the gradients of kept replicas: over the slots, over machines, and through communication hooks."""
