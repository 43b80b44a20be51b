"""Pages whose code needs other people's frameworks run as a whole: see ``tests/test_documents.py``."""

import pytest

from documents import README, blocks_of, pages, run_page

PAGES = [(page, packages) for page in pages() if (packages := {p for b in blocks_of(page) for p in b.packages})]


@pytest.mark.parametrize(
    ("page", "packages"), PAGES, ids=[page.relative_to(README.parent).as_posix() for page, _ in PAGES]
)
def test_the_code_of_the_page_runs(page, packages, request, tmp_path, monkeypatch):
    for package in packages:
        pytest.importorskip(package)
    run_page(page, request.config, tmp_path, monkeypatch)
