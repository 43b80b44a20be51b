"""`check` makes every check, finds planted faults and names them, and ends in time whatever a check does."""

import dataclasses
import json
import os
import re
import signal
import threading
import time

import pytest
import torch
from torch import Tensor

import dataparallel
from dataparallel.call.engine import ReplicaMaker
from dataparallel.comm import kernels
from dataparallel.comm.host import ThroughHost
from dataparallel.testing.machine_check import run, streams
from dataparallel.testing.machine_check.checks import Check, CheckedMachine, CheckFailed, NotHere, Seen

pytestmark = pytest.mark.counts_memory
on_devices = pytest.mark.devices("sim", "stand-in")


def named(*names, hangs_after=None):
    """The checks of these groups or names."""
    found = [each for each in run.CHECKS if each.name in names or each.group in names]
    return found if hangs_after is None else [dataclasses.replace(each, hangs_after=hangs_after) for each in found]


def only(*names, **options):
    """The finding of the only check of this name."""
    (finding,) = dataparallel.check(checks=named(*names, **options)).findings
    return finding


@pytest.mark.parametrize("group", ["transfers", "DataParallel", "replicate", "fully_shard"])
def test_a_machine_in_order_passes(group):
    slow = {"compile=True", "memory"}
    checks = [each for each in named(group) if each.name not in slow]
    report = dataparallel.check(checks=checks)
    assert report.passed, str(report)
    assert len(report.findings) == len(checks)


@pytest.mark.long
@pytest.mark.watchdog(500)
def test_all_checks():
    report = dataparallel.check(400)
    assert report.passed, str(report)
    assert {each.group for each in report.findings} == {each.group for each in run.CHECKS}


class TestPlantedFaults:
    @on_devices
    def test_a_broken_pair(self, monkeypatch):
        copy = Tensor.copy_

        def broken(target, source, *args, **options):
            if isinstance(source, Tensor) and (source.device.index, target.device.index) == (1, 0):
                return target
            return copy(target, source, *args, **options)

        monkeypatch.setattr(Tensor, "copy_", broken)
        finding = only("copies between devices")
        assert finding.status == "failed"
        assert f"from {torch.device(1)} to {torch.device(0)}. An IOMMU" in finding.text

    @pytest.mark.devices("sim")
    def test_a_kernel_that_rounds_otherwise(self, monkeypatch):
        launch = kernels.DeviceTable.launch

        def rounds(table, tensors, shifts=None):
            launch(table, tensors, shifts)
            if tensors[-1].dtype == torch.bfloat16:
                tensors[-1][7] = torch.nextafter(tensors[-1][7].float(), torch.tensor(9.0)).bfloat16() * 1.01

        monkeypatch.setattr(kernels.DeviceTable, "launch", rounds)
        finding = only("kernels that sum")
        assert (finding.status, "the kernel sum_bfloat16 on" in finding.text) == ("failed", True)
        assert "DATAPARALLEL_TRANSPORT=copy" in finding.text

    @on_devices
    def test_a_transport_that_loses_bytes(self, monkeypatch):
        def loses(transport, target, source):
            target.copy_(source.cpu())
            target[-1:].zero_()

        monkeypatch.setattr(ThroughHost, "copy", loses)
        finding = only("transport host")
        assert finding.status == "failed"
        assert re.search(r"by the transport 'host' brings \d+ wrong numbers", finding.text)

    @on_devices
    def test_a_generator_that_is_not_restored(self, monkeypatch):
        returns = ReplicaMaker.returns

        def draws(maker, output):
            torch.rand(1 + len(drawn))
            drawn.append(output)
            returns(maker, output)

        drawn = []
        monkeypatch.setattr(ReplicaMaker, "returns", draws)
        finding = dataparallel.check(checks=named("random numbers")[:1]).findings[0]
        assert finding.status == "failed"
        assert "the host's generator" in finding.text

    @on_devices
    def test_a_leak(self, monkeypatch):
        leaked = []
        monkeypatch.setattr(streams, "STEPS", 40)
        monkeypatch.setattr(ReplicaMaker, "returns", lambda maker, output: leaked.append(output))
        (finding,) = dataparallel.check(checks=named("memory")[:1]).findings
        assert finding.status == "failed"
        assert finding.text.startswith("memory leaks: between step 20 and step 40, ")

    def test_a_hang(self, monkeypatch):
        goes_on = threading.Event()
        monkeypatch.setattr(ReplicaMaker, "returns", lambda maker, output: goes_on.wait())
        report = dataparallel.check(checks=named("same bits twice", hangs_after=1.5))
        goes_on.set()
        first, *others = report.findings
        assert first.status == "failed"
        assert first.text.startswith("it hangs: it has not ended after 1.5 s, and waits in File")
        assert "goes_on.wait()" in "".join(first.figures["stack"])
        assert {each.status for each in others} == {"no time"}
        assert not report.passed


def raising(error):
    def run_(machine):
        raise error

    return Check("group", "name", run_)


class TestFindings:
    def test_an_error_that_nobody_has_foreseen_is_a_failure_with_its_traceback(self):
        (finding,) = dataparallel.check(checks=[raising(ZeroDivisionError("odd"))]).findings
        assert finding.status == "failed"
        assert finding.text.startswith("ZeroDivisionError: odd. Nobody has foreseen this: open an issue")
        assert "in run_" in "".join(finding.figures["traceback"])

    @pytest.mark.parametrize(("error", "status"), [(CheckFailed("is wrong"), "failed"), (NotHere("none"), "not run")])
    def test_a_check_says_why(self, error, status):
        (finding,) = dataparallel.check(checks=[raising(error)]).findings
        assert (finding.status, finding.text) == (status, str(error))

    def test_without_time_nothing_is_run(self):
        report = dataparallel.check(0.1, checks=[raising(AssertionError())])
        assert not report.passed
        assert "Pass more --seconds" in report.conclusion()

    @pytest.mark.parametrize("seconds", [0, -1])
    def test_seconds_are_above_zero(self, seconds):
        with pytest.raises(ValueError, match="seconds"):
            dataparallel.check(seconds)

    def test_lines_come_as_soon_as_they_are_known(self):
        lines = []
        checks = [Check("group", "name", lambda machine: Seen(f"{len(lines)} before"))] * 2
        dataparallel.check(checks=checks, show=lines.append)
        assert [line.split()[-2:] for line in lines] == [["0", "before"], ["1", "before"]]


def test_a_report_is_json_a_table_of_text_and_lines():
    seen = Check("group", "name", lambda machine: Seen("1 < 2", {"bytes": 3}))
    report = dataparallel.check(checks=[seen, raising(CheckFailed("<b>"))])
    read = json.loads(report.to_json())
    assert read["passed"] is False
    assert [each["status"] for each in read["findings"]] == ["passed", "failed"]
    assert read["findings"][0]["figures"] == {"bytes": 3}
    assert read["machine"]["torch"].startswith(torch.__version__)
    html = report._repr_html_()
    assert "1 &lt; 2" in html
    assert "&lt;b&gt;" in html
    assert html.count("<tr>") == len(report.machine) + 1 + 2
    text = str(report)
    assert "ok" in text
    assert "1 passed, 1 failed. Failed: group: name." in text
    shows_little = "stand in for GPUs" if torch.accelerator.is_available() else "two slots of the CPU"
    assert CheckedMachine().has_gpus or shows_little in report.conclusion()


@pytest.fixture
def ended(monkeypatch):
    """The codes with which the command has ended the process."""
    codes, before = [], signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(run.os, "_exit", codes.append)
    yield codes
    signal.signal(signal.SIGTERM, before)


def test_a_command_that_is_ended_writes_what_it_has_found(ended, monkeypatch, tmp_path):
    def ends(machine):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    checks = [Check("group", "right", lambda machine: Seen("")), Check("group", "name", ends)]
    monkeypatch.setattr(run, "CHECKS", checks)
    run.main(["--json", str(tmp_path / "check.json")])
    assert ended == [130]
    found = json.loads((tmp_path / "check.json").read_text())["findings"]
    assert [each["status"] for each in found] == ["passed", "no time"]


@pytest.mark.parametrize(("error", "code"), [(None, 0), (CheckFailed("is wrong"), 1)])
def test_the_command_prints_writes_json_and_ends_with_a_code(error, code, ended, monkeypatch, tmp_path, capsys):
    def passes(machine):
        return Seen("right")

    monkeypatch.setattr(run, "CHECKS", [Check("group", "name", passes) if error is None else raising(error)])
    run.main(["--seconds", "9", "--json", str(tmp_path / "check.json")])
    assert ended == [code]
    assert json.loads((tmp_path / "check.json").read_text())["passed"] is (code == 0)
    printed = capsys.readouterr().out
    assert ("right" if error is None else "is wrong") in printed
    assert "dataparallel " in printed
