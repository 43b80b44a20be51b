"""``python -m dataparallel SCRIPT ARGS`` runs a program as Python would, with the library in the place of torch's."""

import sys

import pytest
import torch

from dataparallel.integrations import torch_wrapper
from dataparallel.integrations.programs import main
from processes import run_script

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


EXPECTED = "name __main__ arguments ['--lr', '1', '-m', 'x'] beside 7 class dataparallel.integrations.torch_wrapper"


def test_a_script(script, capsys):
    before = [*sys.argv], [*sys.path], sys.modules["__main__"]
    main([str(script), "--lr", "1", "-m", "x"])
    assert capsys.readouterr().out.strip() == EXPECTED
    assert ([*sys.argv], [*sys.path], sys.modules["__main__"]) == before


def test_a_module(script, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(script.parent))
    main(["-m", "train", "--lr", "1", "-m", "x"])
    assert capsys.readouterr().out.strip() == EXPECTED


WORKERS = """
import multiprocessing, sys

class Item:
    def __init__(self, value):
        self.value = value

def make(queue):
    queue.put([Item(2), Item(3)])

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    process = context.Process(target=make, args=(queue,))
    process.start()
    items = queue.get()
    process.join()
    print([item.value for item in items], {type(item) for item in items} == {Item})
"""


@pytest.mark.parametrize("way", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", ["a_script", "a_module"])
def test_workers_return_objects_of_the_programs_classes(script, capsys, monkeypatch, kind, way):
    script.write_text(WORKERS)
    monkeypatch.syspath_prepend(str(script.parent))
    before = sys.modules.get("__mp_main__")
    main([str(script), way] if kind == "a_script" else ["-m", "train", way])
    assert capsys.readouterr().out == "[2, 3] True\n"
    assert sys.modules.get("__mp_main__") is before


@pytest.fixture
def counts(monkeypatch):
    """Those of a process that has called nothing."""
    monkeypatch.setattr(torch_wrapper, "counts", torch_wrapper.FallbackCounts())
    return torch_wrapper.counts


VISIBLE = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = "{last}"
import torch
from torch import nn
model = nn.DataParallel(nn.Linear(3, 2).cuda())
model(torch.ones(4, 3)).sum().backward()
print(torch.cuda.device_count(), model.device_ids)
"""


@pytest.mark.devices("cuda")
@pytest.mark.slots(2)
def test_a_program_chooses_the_gpus_that_it_sees(slots, tmp_path):
    (tmp_path / "visible.py").write_text(VISIBLE.format(last=torch.cuda.device_count() - 1))
    command = "from dataparallel.integrations import programs; programs.main(['visible.py'])"
    assert run_script(f"import os; os.chdir({str(tmp_path)!r}); {command}").splitlines()[0] == "1 [0]"


def test_a_program_that_wraps_nothing_is_told(script, capsys, counts):
    script.write_text("print('plain')")
    main([str(script)])
    printed = capsys.readouterr()
    assert printed.out == "plain\n"
    assert "called neither torch.nn.DataParallel" in printed.err
    script.write_text(PROGRAM)
    main([str(script)])
    assert capsys.readouterr().err == ""


@pytest.mark.devices("cpu")
def test_a_program_whose_wrapper_has_no_slots_is_told(script, capsys):
    script.write_text(PROGRAM.replace(', ["cpu", "cpu"])', ")"))
    main([str(script)])
    assert "a DataParallel without slots ran its model as it is" in capsys.readouterr().err


@pytest.mark.parametrize(("program", "error"), [(["nofile.py"], FileNotFoundError), (["-m", "nothere"], ImportError)])
def test_what_is_no_program_is_pythons_error(script, monkeypatch, program, error):
    monkeypatch.chdir(script.parent)
    with pytest.raises(error, match=program[-1]):
        main(program)


@pytest.mark.parametrize(("ending", "error"), [("sys.exit(3)", SystemExit), ("raise KeyError('no')", KeyError)])
def test_how_the_program_ends(script, ending, error):
    """Its exit status and its errors are the command's, and torch has its names back."""
    from torch import nn

    before = nn.DataParallel
    script.write_text(f"{PROGRAM}\n{ending}\n")
    with pytest.raises(error):
        main([str(script)])
    assert nn.DataParallel is before


def test_without_a_program_the_machine_is_described(capsys):
    main([])
    assert capsys.readouterr().out.startswith("dataparallel")
    with pytest.raises(SystemExit):
        main(["-m"])
    assert "needs a program" in capsys.readouterr().err
