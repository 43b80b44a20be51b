"""The examples that need other people's packages run as they say: the notebook, and ``finetune_gpt2.py``."""

from pathlib import Path

import pytest

from example_programs import EXAMPLES, SECONDS, numbers, printed_by, variables, where_devices_are_seen

pytestmark = [pytest.mark.long, where_devices_are_seen]


def test_a_small_gpt2_learns(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    losses = numbers(printed_by("finetune_gpt2.py", tmp_path)[-1])
    assert len(losses) == 3
    assert losses[-1] < 0.85 * losses[0]


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=variables())  # raises what a cell raises
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [[output.get("text") or output["data"]["text/plain"] for output in cell.outputs] for cell in cells]
    assert all(shown)
    assert "samples on" in shown[1][0]
    assert "torch.Size([10, 1])" in shown[1]
    assert "dataparallel::parallel_apply" in shown[4][0]
    assert "raised in replica" in shown[-1][0]
