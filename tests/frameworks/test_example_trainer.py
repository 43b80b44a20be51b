"""``examples/finetune_gpt2.py`` runs as its docstring says."""

import pytest

from example_programs import numbers, printed_by, where_devices_are_seen

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@where_devices_are_seen
@pytest.mark.long
def test_a_small_gpt2_learns(tmp_path):
    losses = numbers(printed_by("finetune_gpt2.py", tmp_path)[-1])
    assert len(losses) == 3
    assert losses[-1] < 0.85 * losses[0]
