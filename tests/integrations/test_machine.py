"""The description says what the machine has, touches no device, and ends with what to do next."""

import runpy
import sys

import pytest
import torch

from dataparallel.integrations import machine
from processes import run_script

pytestmark = pytest.mark.devices("cpu")  # no device takes part


def test_it_has_a_line_for_each_fact_and_ends_with_what_to_do_next(monkeypatch):
    monkeypatch.setattr(machine, "all_devices", lambda: [])
    text = machine.description()
    for line in ("dataparallel ", "torch ", "CuPy "):
        assert f"\n{line}" in "\n" + text
    assert "accelerator   none\n" in text
    assert "\ntensors " not in text  # nothing has to travel
    _, what_next = text.split("\nwhat to do next\n")
    for words in ("torch.profiler", "simulate(4)", "docs/coming_from.rst"):
        assert words in what_next


def test_it_says_if_peers_are_checked(monkeypatch):
    assert "tried with random data before its first use" in machine.description()
    monkeypatch.setenv("DATAPARALLEL_PEER_CHECK", "0")
    assert "peer check    off, by DATAPARALLEL_PEER_CHECK" in machine.description()


@pytest.mark.parametrize(
    ("devices", "line"),
    [
        ([], 'DataParallel(model, device_ids=["cpu", "cpu"])'),
        (["cuda:0"], "DataParallel(model, device_ids=[0, 0])"),
        (["xpu:0", "xpu:1"], 'DataParallel(model.to("xpu"))'),
    ],
)
def test_what_to_do_next_depends_on_the_devices(devices, line):
    assert line in str(machine.next_steps([*map(torch.device, devices)]))


@pytest.mark.parametrize(
    ("asked", "words"),
    [("", "torch's copies; for fully_shard kernels"), ("host", "'host' was asked for"), ("pigeon", "pigeon")],
)
def test_it_says_what_carries_tensors(asked, words, monkeypatch):
    """Also if the environment asks for what does not exist."""
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", asked)
    assert "\ntransport " in machine.description()
    assert words in machine.about_transport()


def test_the_command_describes_the_machine_and_touches_no_device():
    program = (
        "import runpy, sys, torch\n"
        "runpy.run_module('dataparallel', run_name='__main__')\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'cupy' not in sys.modules\n"
    )
    text = run_script(program)
    assert text.startswith("dataparallel  ")
    assert "\nwhat to do next\n" in text


def test_an_argument_that_it_does_not_know_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dataparallel", "train.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("dataparallel", run_name="__main__")
    assert ended.value.code == 2
    assert "'train.py': expected nothing, or --check as the first argument" in capsys.readouterr().err
