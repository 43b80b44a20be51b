"""Replicas that are captured as CUDA graphs, and launched by one call instead of an operator at a time.

A replica is captured as a whole, or it runs as it is and says why, once. Arguments are copied into places of the
capture, and outputs are copies. ``calls`` decides at each call if a replica runs as it is, is captured or launched;
``kinds`` says what a graph is good for. ``captured`` is one capture of a forward and its backward, cut where sums of
gradients begin (``pieces``). Replicas that stay use them (``replicas.kept_replicas``).
"""
