"""``python -m dataparallel SCRIPT ARGS`` runs a program as Python would, with the library in the place of torch's."""

import sys

import pytest

from dataparallel.integrations import programs

PROGRAM = """
import sys
from torch import nn, ones
from torch.nn import DataParallel
import beside
print("name", __name__, "arguments", sys.argv[1:], "beside", beside.VALUE, "class", DataParallel.__module__)
model = nn.DataParallel(nn.Linear(3, 2), ["cpu", "cpu"])
model(ones(4, 3)).sum().backward()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    yield tmp_path / "train.py"
    sys.modules.pop("beside", None)


EXPECTED = "name __main__ arguments ['--lr', '1', '-m', 'x'] beside 7 class dataparallel.integrations.torch_names"


def test_a_script(script, capsys):
    before = [*sys.argv], [*sys.path], sys.modules["__main__"]
    programs.main([str(script), "--lr", "1", "-m", "x"])
    assert capsys.readouterr().out.strip() == EXPECTED
    assert ([*sys.argv], [*sys.path], sys.modules["__main__"]) == before


def test_a_module(script, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(script.parent))
    programs.main(["-m", "train", "--lr", "1", "-m", "x"])
    assert capsys.readouterr().out.strip() == EXPECTED


def test_the_report_at_the_end(script, capsys):
    programs.main(["--report", str(script)])
    error = capsys.readouterr().err
    for words in ("names of torch", "DataParallel.forward", "backward", "your code"):
        assert words in error


@pytest.mark.parametrize(("ending", "error"), [("sys.exit(3)", SystemExit), ("raise KeyError('no')", KeyError)])
def test_how_the_program_ends(script, capsys, ending, error):
    """Its exit status and its errors are the command's, and torch has its names back."""
    from torch import nn

    before = nn.DataParallel
    script.write_text(f"{PROGRAM}\n{ending}\n")
    with pytest.raises(error):
        programs.main(["--report", str(script)])
    assert "DataParallel.forward" in capsys.readouterr().err
    assert nn.DataParallel is before


def test_without_a_program_the_machine_is_described(capsys):
    programs.main([])
    assert capsys.readouterr().out.startswith("dataparallel")
    with pytest.raises(SystemExit):
        programs.main(["--report"])
    assert "need a program" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        programs.main(["-m"])
    assert "need a program" in capsys.readouterr().err
