"""Replicas and tensors that later calls use again, if nobody else holds them (see ``ownership``).

``replicas`` decides, and is the only file that others import; ``shell``, ``tensors`` and ``frozen`` hold the objects.
"""
