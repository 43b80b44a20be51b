"""Replicas that are captured as CUDA graphs, and launched by one call instead of an operator at a time.

``segments`` chooses the modules that are captured. ``calls`` decides at each call if a module runs as it is, is
captured or launched; ``kinds`` says what a graph is good for. ``captured`` is one capture of a forward and its
backward, in pieces (``pieces``) and by a copy of the module (``copied``); ``launch`` has its nodes in autograd's graph,
and ``places`` the tensors that stay where they are. Replicas that stay use them (``replicas.kept_modules``).
"""
