"""Where there can be no stand-in a sentence says why, and what to do."""

import importlib.util
import sys

import pytest

from nogpu.compiling import SimulationTooLate, SimulationUnavailable, ToolsMissing
from nogpu.cuda import possible
from nogpu.cuda.possible import check_process, gpus, why_not_here
from processes import run_script

pytestmark = pytest.mark.devices("cpu")


@pytest.fixture
def torch_built_for(tmp_path, monkeypatch):
    """A function that puts another torch in the place of this one, as far as it is looked for."""
    find_spec = importlib.util.find_spec
    file = tmp_path / "torch" / "__init__.py"

    def put(cuda: str | None) -> None:
        file.parent.mkdir()
        file.touch()
        file.with_name("version.py").write_text(f"__version__ = '9.9'\ncuda: str | None = {cuda!r}\n")
        spec = importlib.util.spec_from_file_location("torch", file, submodule_search_locations=[str(file.parent)])
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "torch" else find_spec(name))

    monkeypatch.setattr(sys, "platform", "linux")
    return put


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(possible, "gpus", lambda: [])


def test_importing_it_does_not_import_torch():
    run_script("""
import sys
from nogpu import cuda
assert "torch" not in sys.modules
assert not cuda.is_stand_in()
""")


def test_another_system(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ToolsMissing, match="needs Linux; this is darwin"):
        check_process()


def test_no_torch(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolsMissing, match="built for CUDA 13, and this Python has no torch: install it"):
        check_process()


@pytest.mark.parametrize(
    ("cuda", "words"),
    [
        (None, "needs a torch built for CUDA 13, and torch 9.9 was built for the CPU only: install that build"),
        ("12.8", "answers for CUDA 13, and torch 9.9 was built for CUDA 12.8: install a torch for CUDA 13"),
        ("130.1", "torch 9.9 was built for CUDA 130.1:"),
    ],
)
def test_another_build_of_torch(torch_built_for, cuda, words):
    torch_built_for(cuda)
    with pytest.raises(ToolsMissing, match=words):
        check_process(hide_gpus=True)


@pytest.mark.smoke
def test_the_right_build(torch_built_for):
    torch_built_for("13.0")
    assert why_not_here() is None


def test_torch_has_been_imported(torch_built_for, no_gpu):
    torch_built_for("13.0")
    with pytest.raises(SimulationTooLate, match=r"stand_in before anything imports torch, or .*python -m nogpu.cuda"):
        check_process()


def test_a_gpu_is_hidden_only_if_that_is_asked_for(torch_built_for, monkeypatch):
    torch_built_for("13.0")
    monkeypatch.setattr(possible, "gpus", lambda: ["/dev/nvidia0"])
    with pytest.raises(
        SimulationUnavailable, match=r"has a GPU \(/dev/nvidia0\).*hide_gpus=True \(--hide-gpus"
    ) as found:
        check_process()
    assert type(found.value) is SimulationUnavailable  # nothing is missing: tests are not to be skipped
    with pytest.raises(SimulationTooLate):
        check_process(hide_gpus=True)


def test_the_files_of_gpus(tmp_path):
    for name in ("nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus(tmp_path) == []
    for name in ("nvidia10", "nvidia0", "dxg"):
        (tmp_path / name).touch()
    assert gpus(tmp_path) == [str(tmp_path / name) for name in ("dxg", "nvidia0", "nvidia10")]
