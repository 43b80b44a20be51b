"""The check of a machine: ``python -m dataparallel --check`` and `dataparallel.check`.

It shows that this machine computes with the library what one device computes, and how fast. It is for people who have
the devices; tests of the library itself are in ``tests``. `run` makes the checks in a fixed order, the other files have
them, and `report` has what they found. Nothing is downloaded.
"""
