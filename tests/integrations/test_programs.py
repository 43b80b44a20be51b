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


@pytest.mark.parametrize(("calls", "traced"), [(1, 1), (3, 3), (5, 2), (20, 10)])
def test_the_table_is_of_a_few_calls_when_the_first_have_settled(script, capsys, counts, calls, traced):
    """However long the program runs, a profile of all of it would fill the memory."""
    script.write_text(f"{PROGRAM}\nfor _ in range({calls - 1}):\n    model(ones(4, 3)).sum().backward()\n")
    main(["--report", str(script)])
    error = capsys.readouterr().err
    assert f"DataParallel.forward     called {calls} times" in error
    (row,) = (line for line in error.splitlines() if line.startswith("forward "))
    assert row.split()[1] == str(traced)


def test_a_program_with_a_profile_of_its_own_keeps_it(script, capsys, counts):
    wraps, calls = PROGRAM.rsplit("\n", 2)[0], "model(ones(4, 3)).sum().backward()"
    script.write_text(
        f"import torch\n{wraps}\nwith torch.profiler.profile() as profile:\n    {calls}\n"
        "print(any(event.name == 'dataparallel::gather' for event in profile.events()))\n"
    )
    main(["--report", str(script)])
    printed = capsys.readouterr()
    assert printed.out.endswith("True\n")
    assert "Where the time goes is not known: a profiler of torch runs already" in printed.err


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
@pytest.mark.parametrize("options", [[], ["--report"]])
def test_a_program_chooses_the_gpus_that_it_sees(slots, tmp_path, options):
    (tmp_path / "visible.py").write_text(VISIBLE.format(last=torch.cuda.device_count() - 1))
    command = f"from dataparallel.integrations import programs; programs.main({[*options, 'visible.py']!r})"
    assert run_script(f"import os; os.chdir({str(tmp_path)!r}); {command}").splitlines()[0] == "1 [0]"


def test_a_program_that_wraps_nothing_is_told(script, capsys, counts):
    script.write_text("print('plain')")
    for options in ([], ["--report"]):
        main([*options, str(script)])
        printed = capsys.readouterr()
        assert printed.out == "plain\n"
        assert "called neither torch.nn.DataParallel" in printed.err
        assert "your code" not in printed.err
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
def test_how_the_program_ends(script, capsys, counts, ending, error):
    """Its exit status and its errors are the command's, and torch has its names back."""
    from torch import nn

    before = nn.DataParallel
    script.write_text(f"{PROGRAM}\n{ending}\n")
    with pytest.raises(error):
        main(["--report", str(script)])
    report = capsys.readouterr().err
    for words in ("names of torch", "DataParallel.forward", "\nbackward", "\nyour code", "\nto try: "):
        assert words in report
    assert counts.before_call is None
    assert nn.DataParallel is before


def test_without_a_program_the_machine_is_described(capsys):
    main([])
    assert capsys.readouterr().out.startswith("dataparallel")
    with pytest.raises(SystemExit):
        main(["--report"])
    assert "need a program" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["-m"])
    assert "need a program" in capsys.readouterr().err
