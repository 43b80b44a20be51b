"""``examples/notebook.ipynb`` runs from top to bottom, and shows what its text says."""

from pathlib import Path

import pytest

from example_programs import EXAMPLES, SECONDS, variables, where_devices_are_seen

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")


@where_devices_are_seen
@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path) -> None:
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
