"""Programs that were written for ``torch.nn.DataParallel`` print the same losses with the library in its place.

They are in the folder ``programs``, and know nothing of the library.
"""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from dataparallel.integrations import programs, torch_wrapper

FOLDER = Path(__file__).parent / "programs"

ALIKE = [("classify", "--arch=plain")] + [("predict_words", f"--model={name}") for name in ("LSTM", "GRU")]


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """Runs a program with ``torch``'s class, with ``ours`` or on ``one`` device, and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch_wrapper, "counts", torch_wrapper.FallbackCounts())
    before = torch.get_default_dtype()

    def run(way, name, *options):
        arguments = [str(FOLDER / f"{name}.py"), *options]
        capsys.readouterr()
        try:
            if way == "ours":
                programs.main(arguments)
                assert dict(torch_wrapper.counts.calls)
            else:
                monkeypatch.setattr(sys, "argv", arguments)
                runpy.run_path(arguments[0], run_name="__main__")
        finally:
            torch.set_default_dtype(before)
        return capsys.readouterr().out

    return run


@pytest.fixture
def numbers(printed, slots, root):
    """Runs a program that takes devices, and returns the numbers that it prints."""

    def run(way, name, *options):
        devices = ["--one-device"] if way == "one" else ["--device-ids", *map(str, slots)]
        found = printed(way, name, "--double", f"--device={root}", *options, *devices)
        assert dict(torch_wrapper.counts.fallbacks) == {}
        assert "loss" in found
        return torch.tensor([float(number) for number in re.findall(r"\d+\.\d+", found)])

    return run


def check(numbers, others):
    torch.testing.assert_close(numbers, others, atol=1e-6, rtol=0)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize(("name", "kind"), [*ALIKE, ("classify", "--arch=residual")])
def test_losses_are_those_of_torch(numbers, name, kind):
    check(numbers("ours", name, kind), numbers("torch", name, kind))


@pytest.mark.parametrize(("name", "kind"), ALIKE)
def test_losses_are_those_of_one_device(numbers, name, kind):
    check(numbers("ours", name, kind), numbers("one", name, kind))


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("kind", ["--arch=plain", "--arch=residual"])
@pytest.mark.parametrize(("first", "second"), [("torch", "ours"), ("ours", "torch")])
def test_checkpoints_are_those_of_torch(numbers, kind, first, second):
    """A training that one of them began goes on with the other."""
    whole = numbers("torch", "classify", kind, "--epochs=3")
    begun = numbers(first, "classify", kind, "--epochs=1")
    check(torch.cat([begun, numbers(second, "classify", kind, "--epochs=3", "--resume")]), whole)


WHOLE = ("detection", "functions_by_hand", "synchronised_norm")
"""Programs that do more with torch's class, its functions and its private ones than call them."""


@pytest.mark.devices("cuda")
@pytest.mark.slots(2)
@pytest.mark.filterwarnings("ignore:as torch.nn.DataParallel does")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.apart(2) if name == "detection" else ()) for name in WHOLE]
)
def test_whole_programs_print_what_they_print_with_torch(slots, printed, name):
    ours, theirs = printed("ours", name), printed("torch", name)
    number = re.compile(r"-?\d+\.\d+")
    assert number.sub("", ours) == number.sub("", theirs) != ""
    found, expected = ([float(each) for each in number.findall(text)] for text in (ours, theirs))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.devices("cpu")
def test_every_program_is_run():
    named = {name for name, _ in [*ALIKE, ("classify", "")]} | {*WHOLE}
    assert named == {path.stem for path in FOLDER.glob("*.py")}
