"""Replicas that are captured as CUDA graphs, and launched by one call instead of an operator at a time.

``segments`` chooses the modules that are captured. ``calls`` decides at each call if a module runs as it is, is
captured or launched; ``kinds`` says what a graph is good for. ``captured`` is one capture of a forward and its
backward, ``launch`` its node in autograd's graph, and ``places`` has the tensors that stay where they are. Replicas
that stay use them (``replicas.persistent``).
"""
