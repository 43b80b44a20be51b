"""Sums of the gradients of persistent replicas: over the slots, over machines, and through communication hooks."""
