"""The sections of a report as text."""

import pytest

from dataparallel.tracing.report_parts import Facts, Links, Section, Table, Timeline, as_text

pytestmark = pytest.mark.devices("cpu")  # no device takes part

SECTIONS = [
    Section("", [Facts([("torch", "2.13"), ("  GPU 0", "an H100")]), Links([("GPU 0", ())], {})]),
    Section(
        "the model",
        [
            Table("steps", ("way", "ms", "why"), [("one", "10.0", "small"), ("all", "2.0", "no links")], words=(0, 2)),
            Timeline("all", 1.0, []),
            "A prediction.",
        ],
    ),
]

TEXT = """\
torch    2.13
  GPU 0  an H100

the model

  steps
  way    ms  why
  one  10.0  small
  all   2.0  no links
  A prediction."""


def test_a_section_of_pictures_has_no_heading_in_the_text():
    assert as_text([*SECTIONS, Section("a step", [Timeline("all", 1.0, [])]), Section("bytes", [])]) == TEXT


def test_facts_and_tables_have_columns_and_pictures_are_left_out():
    assert as_text(SECTIONS) == TEXT
