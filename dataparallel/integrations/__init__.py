"""Programs and libraries that were written for ``torch.nn.DataParallel``: how they run with this library.

``torch_names`` has what takes the place of torch's names, ``replacement`` puts it there, and ``programs`` runs a
program that way. The forms know nothing of this room.
"""
