"""What is compiled is compiled once, by one process. Errors name the reason, and a failed build leaves no files.

The sources here are a few lines, so that compiling takes a second. Compilers, ninja, locks and processes are real.
"""

import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from nogpu import SimulationUnavailable, ToolsMissing, compiling
from nogpu.compiling import Extension, Library, build_library, check_tools, load_extension, path_of
from nogpu.simulated.extension import EXTENSION
from processes import environment

# These tests start their own processes, so one kind of devices is enough.
pytestmark = pytest.mark.devices("cpu")


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


SOURCE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "nogpu_simulated"};
PyMODINIT_FUNC PyInit_nogpu_simulated() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "ANSWER", 42);
  return module;
}
"""

LOAD = """
import sys
from pathlib import Path
from nogpu.compiling import Extension, load_extension

print(load_extension(Extension("nogpu_simulated", "simulated accelerators", (Path(sys.argv[1]),))).ANSWER)
"""

# A compiler that makes a file when it begins, and then waits for the file "go".
PATIENT_COMPILER = """#!/bin/sh
case " $* " in *" -c "*)
    touch "{0}/compiling.$$"
    while [ ! -e "{0}/go" ]; do sleep 0.05; done
esac
exec {1} "$@"
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """A few lines of C++."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "module.cpp").write_text(SOURCE)
    monkeypatch.setattr(compiling, "_loaded", {})  # as in a new process: one loads a library only once
    # torch counts the builds of a process under one name; each test needs the first.
    monkeypatch.setattr(cpp_extension, "JIT_EXTENSION_VERSIONER", type(cpp_extension.JIT_EXTENSION_VERSIONER)())
    return folder


@pytest.fixture
def extension(sources) -> Extension:
    """A module of these lines, in place of the accelerators."""
    return dataclasses.replace(EXTENSION, folders=(sources,))


@pytest.fixture
def compiler() -> str:
    """The C++ compiler. Skips the test if any tool for compiling is missing."""
    try:
        check_tools(EXTENSION)
    except ToolsMissing as error:
        pytest.skip(str(error))
    return cpp_extension.get_cxx_compiler()


@pytest.fixture
def no_scripts(tmp_path, monkeypatch) -> None:
    """The folder of Python's scripts is empty."""
    get_path = sysconfig.get_path
    monkeypatch.setattr(
        sysconfig, "get_path", lambda name: str(tmp_path / "none") if name == "scripts" else get_path(name)
    )


def left_behind(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("*") if path.is_file()} - {"lock"}


def said_by(library: Library, takes: str) -> tuple[str, str]:
    """What is written while it is compiled."""
    kept = compiling.path_of(library).parent
    return "", f"nogpu: compiling the {library.what}, once, which takes {takes}; they are kept in {kept}\n"


def test_compiled_once_and_found_afterwards(cache, extension, compiler, capfd):
    assert load_extension(extension).ANSWER == 42
    assert capfd.readouterr() == said_by(extension, "some minutes")
    assert left_behind(cache) == {f"{extension.name}{sysconfig.get_config_var('EXT_SUFFIX')}"}
    compiling._loaded.clear()  # as in another process
    module = load_extension(extension)
    assert module.ANSWER == 42
    assert capfd.readouterr() == ("", "")
    shutil.rmtree(cache)
    assert load_extension(extension) is module


def test_all_that_is_missing_is_named_together(cache, extension, no_scripts, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "nonexistent-compiler")
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "setuptools", None)
    words = r"lacks a C\+\+ compiler \('nonexistent-compiler' is not.*CXX.*Python\.h does not.*python3-dev.*ninja.*"
    with pytest.raises(ToolsMissing, match=words + r"setuptools \(pip install setuptools\)$"):
        load_extension(extension)
    assert left_behind(cache) == set()


def test_windows(extension, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ToolsMissing, match=r"need a POSIX system.*this is Windows"):
        load_extension(extension)


@pytest.fixture
def ninja(tmp_path, monkeypatch) -> str:
    """A ninja in the folder of Python's scripts."""
    path = tmp_path / "ninja"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return str(path)


def test_a_ninja_beside_python_needs_no_path(ninja, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with compiling.path_with_ninja():
        assert shutil.which("ninja") == ninja
        assert os.environ["PATH"] == f"/nowhere:{Path(ninja).parent}"
    assert os.environ["PATH"] == "/nowhere"
    with pytest.raises(ZeroDivisionError), compiling.path_with_ninja():
        raise ZeroDivisionError
    assert os.environ["PATH"] == "/nowhere"


def test_a_compiler_that_cannot_tell_its_version(cache, extension, monkeypatch, compiler):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(SimulationUnavailable, match=r"compiling the simulated accelerators failed: .*'false'"):
        load_extension(extension)
    assert left_behind(cache) == set()


def test_what_the_compiler_refuses_is_told_in_its_words(cache, sources, extension, compiler):
    (sources / "module.cpp").write_text("this_is_no_type x;")
    with pytest.raises(SimulationUnavailable, match="this_is_no_type") as refused:
        load_extension(extension)
    assert not isinstance(refused.value, ToolsMissing)
    assert left_behind(cache) == set()


def test_a_cache_that_cannot_be_made(cache, extension):
    cache.write_text("a file")
    words = r"compiled into .*cache.*cannot be made or written.*TORCH_EXTENSIONS_DIR names another folder"
    with pytest.raises(SimulationUnavailable, match=words):
        load_extension(extension)


def test_what_cannot_be_kept_is_loaded_all_the_same_and_once(cache, extension, compiler, monkeypatch, capfd):
    def refuse(*_) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    module = load_extension(extension)
    assert module.ANSWER == 42
    assert "cannot be kept for the next process: [Errno 13] Permission denied" in capfd.readouterr().err
    assert left_behind(cache) == set()
    assert load_extension(extension) is module
    assert capfd.readouterr().err == ""


def test_every_change_of_sources_torch_python_and_flags_is_another_build(cache, sources, extension, monkeypatch):
    def changed(change: Callable[[], object]) -> bool:
        before = path_of(extension)
        change()
        return path_of(extension) != before

    assert not changed(lambda: None)
    module, header = sources / "module.cpp", sources / "limits.h"
    assert changed(lambda: module.write_text(SOURCE.replace("42", "43")))
    assert changed(header.touch)
    assert changed(lambda: header.rename(sources / "other.h"))
    assert changed(lambda: monkeypatch.setattr(torch, "__version__", "99.0"))
    assert changed(lambda: monkeypatch.setattr(torch, "__file__", "/elsewhere/torch/__init__.py"))
    assert changed(lambda: monkeypatch.setattr(sysconfig, "get_config_var", lambda name: ".cpython-399.so"))
    (sources / "include").mkdir()
    different = [
        dataclasses.replace(extension, **change)
        for change in (
            {},
            {"flags": ("-O0",)},
            {"link_flags": ("-lm",)},
            {"include_paths": (sources / "include",)},
            {"folders": (sources, Path(compiling.__file__).parent)},
        )
    ]
    assert len({path_of(one) for one in different}) == len(different)


@pytest.fixture
def library(tmp_path) -> Library:
    """A library of two files in two folders, which needs a header of a third one and a flag."""
    folders = [tmp_path / name for name in ("one", "other", "include")]
    for folder in folders:
        folder.mkdir()
    one, other, include = folders
    (include / "half.h").write_text("int half();")
    (one / "half.cpp").write_text('#include "half.h"\nint half() { return ANSWER / 2; }')
    (other / "answer.cpp").write_text('#include "half.h"\nextern "C" int answer() { return 2 * half(); }')
    return Library("libanswer.so.1", "answers", (one, other), ("-DANSWER=42",), ("-Wl,-soname,answers",), (include,))


def test_a_library_needs_neither_ninja_nor_headers_of_python(cache, library, no_scripts, compiler, capfd):
    path = build_library(library)
    assert capfd.readouterr() == said_by(library, "less than a minute")
    assert ctypes.CDLL(str(path)).answer() == 42
    assert b"\0answers\0" in path.read_bytes()
    assert left_behind(cache) == {"libanswer.so.1"}
    assert build_library(library) == path
    assert capfd.readouterr() == ("", "")


def test_what_the_compiler_refuses_of_a_library_is_told_with_the_command(cache, library, compiler):
    with pytest.raises(SimulationUnavailable, match=r"compiling the answers failed: .*half\.cpp.* says: [\s\S]*ANSWER"):
        build_library(dataclasses.replace(library, flags=("-fmessage-length=0",)))
    assert left_behind(cache) == set()


class Loading:
    """A process that loads the extension and writes its output to a file."""

    def __init__(self, log: Path, *arguments: str, **changes: str) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LOAD, *arguments],
                env=environment(**changes),
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def says(self, words: str) -> bool:
        return words in self.log.read_text()

    def answers(self) -> bool:
        return self.process.wait(60) == 0 and self.log.read_text().splitlines()[-1] == "42"


@pytest.fixture
def load(cache, sources, compiler, tmp_path):
    """A function that starts processes; their compilers wait for the file ``go``."""
    script = tmp_path / "patient-g++"
    script.write_text(PATIENT_COMPILER.format(tmp_path, compiler))
    script.chmod(0o755)
    processes: list[Loading] = []

    def start() -> Loading:
        changes = {"TORCH_EXTENSIONS_DIR": str(cache), "CXX": str(script)}
        processes.append(Loading(tmp_path / f"log{len(processes)}", str(sources), **changes))
        return processes[-1]

    yield start
    (tmp_path / "go").touch()
    for loading in processes:
        loading.process.kill()
        loading.process.wait()


WAITING = "waiting for another process to compile"
COMPILING = "compiling the simulated accelerators, once"


@pytest.mark.long
def test_one_process_compiles_at_a_time_and_the_next_only_if_that_one_was_killed(load, cache, tmp_path):
    both = [load(), load()]
    wait_until(lambda: list(tmp_path.glob("compiling.*")) and any(loading.says(WAITING) for loading in both))
    first, second = sorted(both, key=lambda loading: loading.says(WAITING))
    assert [first.says(COMPILING), second.says(COMPILING)] == [True, False]
    first.process.kill()
    wait_until(lambda: second.says(COMPILING))
    third = load()
    wait_until(lambda: third.says(WAITING))
    (tmp_path / "go").touch()
    assert second.answers()
    assert third.answers()
    assert not third.says(COMPILING)
    assert len(list(tmp_path.glob("compiling.*"))) == 2
    assert len(left_behind(cache)) == 1
