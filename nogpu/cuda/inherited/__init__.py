"""A folder for ``PYTHONPATH``: Python runs its ``sitecustomize.py`` in each process that inherits a stand-in."""
