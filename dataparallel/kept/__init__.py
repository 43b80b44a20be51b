"""Replicas and tensors that later calls use again: `replicas` decides, `shell`, `tensors` and `frozen` hold.

What nobody else holds is used again; `dataparallel.ownership` says who holds what.
"""
