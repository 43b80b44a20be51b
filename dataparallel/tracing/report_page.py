"""`as_page` makes one HTML file of a report: styles and pictures are in it, and it loads nothing and runs no script.

It shows what ``report_parts.as_text`` prints, and pictures. Every text that comes from outside is escaped by `_text`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from dataparallel.tracing.intervals import union
from dataparallel.tracing.report_parts import Facts, Links, Part, Section, Table, Timeline

_STYLE = """
:root { color-scheme: light dark; --page: #f5f6f8; --card: #fff; --text: #1d2330; --soft: #5b6475; --line: #dfe3ea;
  --c0: #7a5bb5; --c1: #2f6fc4; --c2: #2b8f63; --c3: #98a1b0; --c4: #dd8420; }
@media (prefers-color-scheme: dark) { :root { --page: #11141a; --card: #1a1f28; --text: #e7eaf0; --soft: #9aa5b6;
  --line: #2e3643; --c0: #a78be0; --c1: #6aa3ee; --c2: #55bd8e; --c3: #7c8798; --c4: #f0a350; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { margin: 0; font-size: 1.9rem; letter-spacing: -.02em; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 0 0 1rem; font-size: 1.2rem; overflow-wrap: anywhere; }
h2::first-letter { text-transform: uppercase; }
h3, summary { margin: 1.5rem 0 .5rem; font-size: .95rem; font-weight: 600; }
summary { cursor: pointer; margin-top: .75rem; }
p { margin: .75rem 0; color: var(--soft); max-width: 48rem; overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 1.5rem;
  margin-top: 1.25rem; }
dl { margin: 0; } dl > div { display: flex; gap: 1rem; padding: .35rem 0; border-top: 1px solid var(--line); }
dl > div:first-child { border: 0; } dt { flex: 0 0 9.5rem; color: var(--soft); } dt.inner { padding-left: 1rem; }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
dl.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .75rem;
  margin: 0 0 1.25rem; }
dl.figures > div { display: flex; flex-direction: column-reverse; justify-content: flex-end; gap: 0;
  border: 1px solid var(--line); border-radius: 10px; padding: .8rem 1rem; }
dl.figures dt { flex: none; font-size: .85rem; line-height: 1.35; }
dl.figures dd { font-size: 1.55rem; font-weight: 650; letter-spacing: -.02em; }
code { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { padding: .45rem .75rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom; min-width: 4.5rem; }
.word { text-align: left; } td.word:last-child { white-space: normal; min-width: 16rem; }
th:first-child, td:first-child { padding-left: 0; } tr:last-child td { border-bottom: 0; }
figure { margin: 1.25rem 0 0; } svg { display: block; width: 100%; min-width: 40rem; height: auto; }
figcaption { font-size: .85rem; color: var(--soft); display: flex; flex-wrap: wrap; gap: .3rem 1.1rem;
  margin-top: .6rem; }
figcaption i { display: inline-block; width: .8rem; height: .8rem; border-radius: 3px; margin-right: .4rem;
  vertical-align: -.08rem; background: var(--c3); }
text { fill: var(--text); font-size: 12px; } .soft { fill: var(--soft); } .axis { stroke: var(--line); }
.box { fill: var(--card); stroke: var(--soft); stroke-width: 1.2; } .host { stroke: var(--c3); stroke-dasharray: 4 4; }
.way { stroke-width: 1.6; opacity: .75; }
"""
_COLORS = "".join(
    f".c{n} {{ fill: var(--c{n}); }} i.c{n} {{ background: var(--c{n}); }} .way.c{n} {{ stroke: var(--c{n}); }}\n"
    for n in range(5)
)


def as_page(title: str, sections: Sequence[Section]) -> str:
    """The page."""
    # Loading is forbidden too, so that an addition that loads something is seen at once.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    body = "\n".join(_section(section) for section in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)}</title>
<style>{_STYLE}{_COLORS}</style>
</head>
<body>
<main>
<h1>{_text(title)}</h1>
<p>Written by <code>python -m dataparallel --html</code>.</p>
{body}
</main>
</body>
</html>
"""


def _text(text: str) -> str:
    return escape(text, quote=True)


def _section(section: Section) -> str:
    title = f"<h2>{_text(section.title)}</h2>\n" if section.title else ""
    return f"<section>\n{title}" + "\n".join(_part(part) for part in section.parts) + "\n</section>"


def _part(part: Part) -> str:
    if isinstance(part, Facts):
        return _facts(part)
    if isinstance(part, Table):
        return _table(part)
    if isinstance(part, Links):
        return _links(part)
    if isinstance(part, Timeline):
        return _timeline(part)
    return f"<p>{_text(part)}</p>"


def _facts(facts: Facts) -> str:
    tag = "code" if facts.kind == "code" else "span"
    rows = (
        f'<div><dt class="{"inner" if name.startswith(" ") else ""}">{_text(name.strip())}</dt>'
        f"<dd><{tag}>{_text(text)}</{tag}></dd></div>"
        for name, text in facts.rows
    )
    return f'<dl class="{facts.kind}">{"".join(rows)}</dl>'


def _table(table: Table) -> str:
    def row(tag: str, cells: Sequence[str]) -> str:
        made = (f"<{tag}{_word(table, column)}>{_text(cell)}</{tag}>" for column, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    rows = f"<thead>{row('th', table.head)}</thead><tbody>{''.join(row('td', cells) for cells in table.rows)}</tbody>"
    made = f'<div class="wide"><table>{rows}</table></div>'
    if table.is_detail:
        return f"<details><summary>{_text(table.title)}</summary>{made}</details>"
    return f"<h3>{_text(table.title)}</h3>{made}"


def _word(table: Table, column: int) -> str:
    return ' class="word"' if column in table.words else ""


def _figure(title: str, size: tuple[float, float], drawn: Iterable[str], caption: Iterable[str]) -> str:
    width, height = size
    return (
        f'<figure><div class="wide"><svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{_text(title)}">'
        f"{''.join(drawn)}</svg></div><figcaption>{''.join(caption)}</figcaption></figure>"
    )


def _legend(colors: dict[str, int]) -> list[str]:
    return [f'<span><i class="c{color}"></i>{_text(kind)}</span>' for kind, color in colors.items()]


_BOX_WIDTH, _LINE = 168, 16  # of a device's box, and the height of a line of text in it


def _links(links: Links) -> str:
    """Devices on an ellipse. In its middle is the host, if every copy goes through it."""
    count, ways, is_row = len(links.devices), links.ways or {}, len(links.devices) < 3
    height = 18 + _LINE * max(1 + len(lines) for _, lines in links.devices)
    across, up = max(285, 34 * count), 0 if is_row else max(180, 13 * count)
    middle = (across + 100, up + height / 2 + 10)
    turn = 0.5 if is_row else 0.25  # the first device is at the left of a row, or at the top
    angles = [math.tau * (number / count - turn) for number in range(count)]
    places = [(middle[0] + across * math.cos(angle), middle[1] + up * math.sin(angle)) for angle in angles]
    colors = {kind: 1 + number % 4 for number, kind in enumerate(dict.fromkeys(ways.values()))}
    drawn = [_line(places[one], places[other], f"way c{colors[kind]}") for (one, other), kind in ways.items()]
    caption = _legend(colors)
    if links.ways is None:
        caption.append("<span>It is not known how these devices are linked.</span>")
    elif not ways:
        drawn = [_line(place, middle, "host") for place in places] + [_box(middle, 40, "host", ())]
        caption.append("<span>Copies go through the host.</span>")
    elif len(ways) < count * (count - 1) // 2:
        caption.append("<span>Copies between other pairs go through the host.</span>")
    drawn += [_box(place, height, *device) for place, device in zip(places, links.devices, strict=True)]
    return _figure("devices and links", (2 * middle[0], 2 * middle[1]), drawn, caption)


def _line(start: tuple[float, float], end: tuple[float, float], names: str) -> str:
    return f'<line class="{names}" x1="{start[0]:.0f}" y1="{start[1]:.0f}" x2="{end[0]:.0f}" y2="{end[1]:.0f}"/>'


def _box(place: tuple[float, float], height: float, name: str, lines: Sequence[str]) -> str:
    x, y = place
    first = y - (len(lines) * _LINE) / 2 + 4
    words = [f'<text x="{x:.0f}" y="{first:.0f}" text-anchor="middle" font-weight="600">{_text(name)}</text>']
    words += [
        f'<text class="soft" x="{x:.0f}" y="{first + _LINE * number:.0f}" text-anchor="middle">{_text(line)}</text>'
        for number, line in enumerate(lines, 1)
    ]
    corner = f'x="{x - _BOX_WIDTH / 2:.0f}" y="{y - height / 2:.0f}"'
    return f'<rect class="box" {corner} width="{_BOX_WIDTH}" height="{height:.0f}" rx="8"/>{"".join(words)}'


_LEFT, _WIDTH, _LANE, _ROW_GAP = 90, 1000, 11, 7  # of a timeline: where time begins, and sizes
_GRID = 1200  # what is shorter than this part of the time is drawn as long as this


def _timeline(timeline: Timeline) -> str:
    scale = (_WIDTH - _LEFT - 10) / timeline.seconds
    kinds = dict.fromkeys(kind for _, lanes in timeline.rows for lane in lanes for kind in lane)
    colors = {kind: number % 5 for number, kind in enumerate(kinds)}
    drawn, y = [], 4.0
    for name, lanes in timeline.rows:
        height = len(lanes) * (_LANE + 1)
        drawn.append(f'<text x="{_LEFT - 10}" y="{y + height / 2 + 4:.0f}" text-anchor="end">{_text(name)}</text>')
        for number, lane in enumerate(lanes):
            for kind, spans in lane.items():
                bars = _bars(spans, timeline.seconds, scale, y + number * (_LANE + 1))
                drawn.append(f'<path class="c{colors[kind]}" d="{bars}"/>')
        y += height + _ROW_GAP
    drawn = [*_axis(timeline.seconds, scale, y), *drawn]
    title = f"{timeline.title}: {1e3 * timeline.seconds:.1f} ms"
    return f"<h3>{_text(title)}</h3>" + _figure(title, (_WIDTH, y + 22), drawn, _legend(colors))


def _bars(spans: Iterable[tuple[float, float]], seconds: float, scale: float, y: float) -> str:
    """Bars as one path. They begin and end on a grid, which joins thousands of launches to a few bars."""
    cell = seconds / _GRID
    found = union((math.floor(start / cell), math.ceil(end / cell)) for start, end in spans)
    return "".join(
        f"M{_LEFT + start * cell * scale:.1f} {y:.0f}h{(end - start) * cell * scale:.1f}v{_LANE}"
        f"h-{(end - start) * cell * scale:.1f}z"
        for start, end in found
    )


def _axis(seconds: float, scale: float, bottom: float) -> list[str]:
    """Lines at round times, about eight."""
    rough = 1e3 * seconds / 8
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    places = [(number * step, _LEFT + number * step * 1e-3 * scale) for number in range(int(1e3 * seconds / step) + 1)]
    return [
        f'<line class="axis" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{bottom:.0f}"/>'
        f'<text class="soft" x="{x:.1f}" y="{bottom + 15:.0f}" text-anchor="middle">{time:g} ms</text>'
        for time, x in places
    ]
