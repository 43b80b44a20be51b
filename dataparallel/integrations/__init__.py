"""Programs and libraries that know nothing of this one: how they run with it.

For programs written for ``torch.nn.DataParallel``, ``replacement`` has what takes the place of torch's names, with the
class of ``torch_wrapper``. ``replacement`` puts it there, and ``programs`` runs a program that way.
``transformers``, ``accelerate`` and ``lightning`` have classes for the trainers of these libraries; each imports its
library. The forms know nothing of this room.
"""
