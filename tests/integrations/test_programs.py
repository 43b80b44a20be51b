"""``python -m dataparallel SCRIPT ARGS`` runs a program as Python would, with the library in the place of torch's."""

import argparse
import sys
from html import escape

import pytest

from dataparallel.integrations import programs, torch_rules
from dataparallel.tracing.report_parts import Section
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


def main(arguments):
    """The command, with a planner that says what it was asked for."""

    def plan(make, called, machine):
        return [Section(f"the model {called}", [f"{make()} on {machine}"])]

    programs.main(arguments, plan)


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


def test_the_report_at_the_end(script, capsys):
    main(["--report", str(script)])
    error = capsys.readouterr().err
    for words in ("names of torch", "DataParallel.forward", "backward", "your code"):
        assert words in error


VISIBLE = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
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
    (tmp_path / "visible.py").write_text(VISIBLE)
    command = f"from dataparallel.integrations import programs; programs.main({[*options, 'visible.py']!r}, None)"
    assert run_script(f"import os; os.chdir({str(tmp_path)!r}); {command}").splitlines()[0] == "1 [0]"


def test_a_program_that_wraps_nothing_is_told(script, capsys, monkeypatch):
    monkeypatch.setattr(torch_rules, "counts", torch_rules.FallbackCounts())
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


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (["nofile.py"], "there is no file 'nofile.py'; for a module: python -m dataparallel -m nofile.py"),
        (["folder"], "'folder' is a folder without a __main__.py; pass a script, such as folder/train.py"),
        (["-m", "nothere"], "-m nothere: there is no such module in "),
        (["-m", "nothere.train"], "or where Python looks; for a script: nothere/train.py"),
        (["-m", "package.nothere"], "-m package.nothere: there is no such module in "),
        (["-m", "beside.train"], "-m beside.train: there is no such module in "),
        (["-m", "train.py"], "or where Python looks; for a script: train.py"),
        (["-m", "package"], "-m package: this is a package without a __main__.py; name a module in it"),
    ],
    ids=str,
)
def test_what_is_no_program_is_said_in_one_line(script, capsys, monkeypatch, program, words):
    for folder in ("folder", "package"):
        (script.parent / folder).mkdir()
    (script.parent / "package" / "__init__.py").touch()
    monkeypatch.chdir(script.parent)
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.delitem(sys.modules, "package", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["--report", *program])
    assert ended.value.code == 2
    usage, _, error = capsys.readouterr().err.partition("error: ")
    assert usage.startswith("usage: python -m dataparallel")
    assert words in error
    assert error.count("\n") == 1


def test_a_package_that_lacks_something_else_says_so(script, monkeypatch):
    (script.parent / "needy").mkdir()
    (script.parent / "needy" / "__init__.py").write_text("import not_installed")
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_installed'"):
        main(["-m", "needy.train"])


def test_the_report_that_was_asked_for_behind_the_script(script, capsys):
    main([str(script), "--report"])
    assert f"The library's goes before: python -m dataparallel --report {script}\n" in capsys.readouterr().err
    script.write_text(f"{PROGRAM}\nwants = '--report' in sys.argv\n")  # the script has an option of this name
    main([str(script), "--report"])
    assert "goes before" not in capsys.readouterr().err


@pytest.mark.parametrize(("ending", "error"), [("sys.exit(3)", SystemExit), ("raise KeyError('no')", KeyError)])
def test_how_the_program_ends(script, capsys, ending, error):
    """Its exit status and its errors are the command's, and torch has its names back."""
    from torch import nn

    before = nn.DataParallel
    script.write_text(f"{PROGRAM}\n{ending}\n")
    with pytest.raises(error):
        main(["--report", str(script)])
    assert "DataParallel.forward" in capsys.readouterr().err
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


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A module of a user with a model."""
    (tmp_path / "shop.py").write_text("VALUE = 7\ndef make():\n    return 'a model'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    yield tmp_path
    sys.modules.pop("shop", None)


def test_the_model_is_planned_between_the_machine_and_what_to_do_next(shop, capsys):
    main(["--model", "shop:make", "--machine", "H100"])
    text = capsys.readouterr().out
    places = [text.index(words) for words in ("dataparallel  ", "the model shop:make\n  a model on H100", "what to do")]
    assert places == sorted(places)


def test_what_the_planner_refuses_is_one_line(shop, capsys):
    def plan(make, called, machine):
        raise argparse.ArgumentTypeError("--machine H1000: there is no such machine")

    with pytest.raises(SystemExit) as ended:
        programs.main(["--model", "shop:make", "--machine", "H1000"], plan)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("error: --machine H1000: there is no such machine\n")


def test_the_page_has_what_the_text_has(shop, capsys):
    main(["--html", str(shop / "page.html"), "--model", "shop:make"])
    assert capsys.readouterr().out == f"{shop / 'page.html'} is written: open it in a browser\n"
    page = (shop / "page.html").read_text(encoding="utf-8")
    assert "a model on A100" in page
    main(["--model", "shop:make"])
    for line in capsys.readouterr().out.splitlines():
        name, _, found = line.strip().partition("  ")
        if name in ("dataparallel", "torch", "accelerator", "NVML", "reuse"):
            assert f"{name}</dt>" in page
            assert escape(found.strip()) in page


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--html", "page.html", "train.py"], "leave out the program 'train.py'"),
        (["--html", "no/folder/page.html"], "there is no folder no/folder"),
        (["--machine", "H100"], "--machine is for --model"),
        (["--model", "shop"], "expected package:function, where function() returns (module, arguments)"),
        (["--model", "nowhere:make"], "ModuleNotFoundError: No module named 'nowhere'; expected package:function"),
        (["--model", "shop:buy"], "AttributeError: module 'shop' has no attribute 'buy'; expected"),
        (["--model", "shop:VALUE"], "this is of type int; expected"),
    ],
)
def test_what_is_wrong_with_the_options(shop, capsys, options, words):
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
