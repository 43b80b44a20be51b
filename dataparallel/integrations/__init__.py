"""Programs and libraries that know nothing of this one: how they run with it.

``transformers``, ``accelerate`` and ``lightning`` have classes for the trainers of these libraries; each imports its
library. The others are for programs written for ``torch.nn.DataParallel``.
"""
