"""The marks of tests that start a stand-in for CUDA in processes of their own: once is enough, whatever the devices."""

import pytest

from dataparallel.testing.cuda.possible import why_not_here

WHY_NOT = why_not_here()

needs_stand_in = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

IN_OWN_PROCESSES = [pytest.mark.devices("cpu"), needs_stand_in]
