"""A shim for installers that look for ``setup.py``; everything is in ``setup.cfg``."""

from setuptools import setup

setup()
