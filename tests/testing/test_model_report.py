"""`plan`: the sections of a report about a user's model."""

import argparse
import subprocess
import sys
import warnings

import pytest
import torch
from dataparallel.tracing.report_page import as_page
from dataparallel.tracing.report_parts import Facts, Table, Timeline, as_text
from torch import nn

from dataparallel.testing import model_report
from dataparallel.testing.compiling import ToolsMissing
from dataparallel.testing.planned import WAYS
from dataparallel.testing.simulated.timeline.presets import A100, RTX_3090, V100
from processes import environment, skip_without_tools


class Advice(UserWarning):
    """As if a room of the library had it."""

    __module__ = "dataparallel.somewhere"


class Net(nn.Linear):
    """Its calls warn, by the library's category and by another's."""

    def forward(self, x):
        warnings.warn("fewer samples than <devices>", Advice, stacklevel=1)
        warnings.warn("of somebody else", UserWarning, stacklevel=1)
        return super().forward(x)


def make_plain():
    return nn.Linear(16, 4), (torch.randn(10, 16),)


class Reads(nn.Linear):
    def forward(self, x):
        raise NotImplementedError("item needs values & there are none")


def of(sections, kind):
    return [part for section in sections for part in section.parts if isinstance(part, kind)]


@pytest.mark.devices("sim")
@pytest.mark.slots(4)
class TestSections:
    @pytest.fixture
    def found(self, slots):
        return model_report.sections(make_plain, "the model <b>", [("model", "Linear")], slots, RTX_3090)

    def test_each_form_has_a_row_a_picture_and_bytes(self, found):
        summary, *details = of(found[:3], Table)
        assert [row[0] for row in summary.rows] == [picture.title for picture in of(found, Timeline)] == [*WAYS]
        assert [detail.title for detail in details] == [*WAYS]
        assert {len(row) for row in summary.rows} == {len(summary.head)}
        assert [len(detail.rows) for detail in details] == [1, 4, 4, 4], "devices that take part"

    def test_the_first_figure_is_that_of_the_fastest_form(self, found):
        figures, facts = of(found, Facts)
        times = {picture.title: picture.seconds for picture in of(found, Timeline)[1:]}
        best = min(times, key=times.get)
        assert figures.rows[0] == (f"a step by {best}", f"{1e3 * times[best]:.1f} ms")
        assert facts.rows[-1] == ("chunks", "3 3 3 1 samples on 4 of 4 devices")

    def test_a_row_of_the_picture_has_what_its_device_does(self, found):
        (_, (host,)), *devices = of(found, Timeline)[2].rows
        assert [name for name, _ in devices] == [f"device {index}" for index in range(4)]
        (kernels, copies), others = devices[0][1], [lanes for _, lanes in devices[1:]]
        assert all(kernels[phase] for phase in ("forward", "backward", "optimizer"))
        assert all(lanes[0]["forward"] and not lanes[0]["optimizer"] for lanes in others)
        assert max(end for _, end in kernels["forward"]) <= min(start for start, _ in kernels["optimizer"])
        assert (
            min(map(len, (*host.values(), *copies.values(), *(lanes[1]["sends or receives"] for lanes in others)))) > 0
        )

    def test_text_and_page_say_what_is_predicted(self, found):
        text, page = as_text(found), as_page("report", found)
        for words in ("a step on 4 x RTX 3090", "links of 4 x RTX 3090", "A prediction: nothing is measured."):
            assert words in text
            assert words in page
        assert "<h2>the model &lt;b&gt;</h2>" in page

    def test_warnings_of_the_library_are_shown_once_and_others_go_on(self, slots):
        with pytest.warns(UserWarning, match="of somebody else") as others:
            found = model_report.sections(lambda: (Net(16, 4), (torch.randn(10, 16),)), "m", [], slots, RTX_3090)
        assert found[-1].parts == ["Advice: fewer samples than <devices>"]
        assert {one.category for one in others} == {UserWarning}

    def test_a_form_that_refuses_the_model_is_told(self, slots):
        found = model_report.sections(lambda: (Reads(16, 4), (torch.randn(10, 16),)), "m", [], slots, RTX_3090)
        refused = [part for part in of(found, str) if "cannot be planned" in part]
        assert len(refused) == len(WAYS)
        assert refused[0].endswith("NotImplementedError: item needs values & there are none")
        assert "item needs values &amp; there are none" in as_page("report", found)


@pytest.mark.devices("cpu")
class TestWithoutDevices:
    def test_the_report_says_why_nothing_is_predicted(self, monkeypatch):
        def simulate(count, *, compute):
            raise ToolsMissing("there is no C++ compiler")

        monkeypatch.setattr(model_report, "simulate", simulate)
        (section,) = model_report.plan(make_plain, "shop:make")
        assert section.parts[0].rows == [
            ("model", "Linear"),
            ("parameters", "68 (272 B), trained 68 (272 B)"),
            ("buffers", "0"),
            ("batch", "(10, 16) float32"),
        ]
        assert section.parts[1].endswith("no simulated devices here: there is no C++ compiler")

    def test_an_unknown_machine_is_refused_before_anything_is_made(self):
        with pytest.raises(
            argparse.ArgumentTypeError, match=r"A1: there is no such machine; pass one of A100, A100_80"
        ):
            model_report.plan(lambda: pytest.fail("made"), "shop:make", "A1")

    @pytest.mark.parametrize(("machine", "ways"), [(A100, {"225": 28}), (V100, {"24": 8, "48": 8}), (RTX_3090, {})])
    def test_links_are_those_of_the_machine(self, machine, ways):
        found = [way.removesuffix(" GB/s in each direction") for way in model_report._links(machine).ways.values()]
        assert {way: found.count(way) for way in found} == ways


@pytest.mark.long
@pytest.mark.devices("cpu")  # its process has devices of its own
def test_the_command_plans_a_model_of_real_size(tmp_path):
    """Devices that skip kernels: 1.2 GB of parameters, and nothing of it on the host."""
    skip_without_tools()
    (tmp_path / "shop.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n    with torch.device('meta'):\n"
        "        layers = [nn.Sequential(nn.Linear(5000, 5000), nn.ReLU()) for _ in range(12)]\n"
        "        return nn.Sequential(*layers), (torch.empty(512, 5000),)\n"
    )
    command = [sys.executable, "-m", "dataparallel", "--model", "shop:make", "--machine", "H100", "--html", "page.html"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "cannot be planned" not in page
    for words in ("the model shop:make", "8 x H100", "300,060,000 (1.1 GiB)", "<svg"):
        assert words in page
