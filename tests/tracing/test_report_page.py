"""The page is one file that loads nothing, shows what the text shows, and is drawn by a browser."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch

from dataparallel.tracing.report_page import as_page
from dataparallel.tracing.report_parts import Facts, Links, Section, Table, Timeline

pytestmark = pytest.mark.devices("cpu")  # no device takes part

HOSTILE = "<script src='//a'>\"&'"


class Seen(HTMLParser):
    """What a page consists of. It fails if a tag is not closed where it should be."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def page(name="GPU 0", ways=None):
    """All kinds of parts, with ``name`` wherever a text comes from outside."""
    kernels, copies = {"forward": [(0.0, 0.01)], name: [(0.01, 0.03)]}, {"copies": [(0.005, 0.02)]}
    return as_page(
        name,
        [
            Section("", [Facts([(name, name), (f"  {name}", name)]), Links([(name, [name]), ("GPU 1", [])], ways)]),
            Section(name, [Table(name, (name, "ms"), [(name, "1")]), Table(name, ("a",), [(name,)], is_detail=True)]),
            Section(
                "a step", [Facts([(name, name)], "figures"), Timeline(name, 0.03, [(name, [kernels, copies])]), name]
            ),
            Section("next", [Facts([(name, name)], "code")]),
        ],
    )


def test_texts_from_outside_are_escaped():
    seen = Seen(page(HOSTILE, {(0, 1): HOSTILE}))
    assert "script" not in seen.tags
    assert sum(HOSTILE in text for text in seen.texts) > 20
    assert ("aria-label", f"{HOSTILE}: 30.0 ms") in seen.attributes
    assert {*seen.tags} == {*Seen(page()).tags} | {"line"}


def test_it_refers_to_nothing_outside():
    text = page()
    seen = Seen(text)
    assert not {"script", "link", "img", "iframe", "object", "use", "image"} & {*seen.tags}
    assert not {"src", "href", "xlink:href", "action", "srcset"} & {name for name, _ in seen.attributes}
    assert not re.search(r"url\(|@import|https?:", text)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in seen.attributes


@pytest.mark.parametrize(
    ("ways", "lines", "words"),
    [
        ({(0, 1): "NVLink"}, 1, "NVLink"),
        ({}, 2, "Copies go through the host."),
        (None, 0, "It is not known how these devices are linked."),
    ],
)
def test_what_joins_two_devices(ways, lines, words):
    seen = Seen(as_page("links", [Section("", [Links([("GPU 0", []), ("GPU 1", [])], ways)])]))
    assert seen.tags.count("line") == lines
    assert words in seen.texts
    assert ("host" in seen.texts) == (ways == {})


def test_pairs_without_a_line_are_told_where_others_have_one():
    devices = [(f"GPU {number}", []) for number in range(3)]
    some, all_ = ({pair: "NVLink" for pair in pairs} for pairs in ([(0, 1)], [(0, 1), (0, 2), (1, 2)]))
    words = "Copies between other pairs go through the host."
    assert words in Seen(as_page("links", [Section("", [Links(devices, some)])])).texts
    assert words not in Seen(as_page("links", [Section("", [Links(devices, all_)])])).texts


def test_many_launches_are_few_bars_and_a_gap_stays():
    """Ten thousand launches, one after the other, and a pause in the middle."""
    spans = [(i * 1e-4, (i + 1) * 1e-4) for i in range(10_000) if not 4_000 <= i < 6_000]
    (bars,) = re.findall(r'<path class="c0" d="([^"]*)"', as_page("", [_one_lane(spans, 1.0)]))
    (first, length), (second, _) = ((float(x), float(h)) for x, h in re.findall(r"M([\d.]+) \d+h([\d.]+)", bars))
    assert length == pytest.approx(360, abs=1.5)  # of 900, the width for all of the time
    assert second - first == pytest.approx(540, abs=1.5)


@pytest.mark.parametrize("seconds", [3e-6, 0.0123, 1.0, 95.0])
def test_times_have_about_eight_round_marks(seconds):
    texts = Seen(as_page("", [_one_lane([(0.0, seconds)], seconds)])).texts
    marks = [float(text.removesuffix(" ms")) for text in texts if re.fullmatch(r"[\d.e-]+ ms", text)]
    assert 4 <= len(marks) <= 9
    assert marks[0] == 0
    assert marks[-1] <= 1e3 * seconds


def _one_lane(spans, seconds):
    return Section("", [Timeline("step", seconds, [("device 0", [{"forward": spans}])])])


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
)


@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [500, 1280])
@pytest.mark.parametrize(
    ("option", "behind", "bars"),
    [
        ("--blink-settings=preferredColorScheme=1", 0xF5F6F8, [0x7A5BB5, 0x2F6FC4, 0x2B8F63]),
        ("--blink-settings=preferredColorScheme=0", 0x11141A, [0xA78BE0, 0x6AA3EE, 0x55BD8E]),
    ],
    ids=["light", "dark"],
)
def test_a_browser_draws_it(tmp_path, width, option, behind, bars):
    """Bars have their colours, and the margin is empty: what is wider than the window scrolls by itself."""
    image = pytest.importorskip("matplotlib.image")
    (tmp_path / "page.html").write_text(page("GPU 0" * 30, {(0, 1): "NVLink"}), encoding="utf-8")
    command = [BROWSER, *QUIET.split(), option, f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--window-size={width},3000", f"--screenshot={tmp_path / 'page.png'}"]
    subprocess.run([*command, (tmp_path / "page.html").as_uri()], check=True, timeout=120, capture_output=True)
    pixels = torch.from_numpy(image.imread(tmp_path / "page.png")).mul(255).round().long()
    colors = pixels[:, :, 0] * 2**16 + pixels[:, :, 1] * 2**8 + pixels[:, :, 2]
    assert {*colors[:, -12:].unique().tolist()} == {behind}
    for color in bars:
        assert (colors == color).sum() > 300, f"{color:x}"
