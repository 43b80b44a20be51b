"""The code in README.rst and docs/**/*.rst does what the pages say.

Every ``.. code-block:: python`` on a page runs, from the top of the page to its end, in one namespace: a block may use
what the blocks above it have defined. A page starts with nothing imported, in an empty folder. The code runs with each
kind of ``--devices``, so it must work on CPU slots and on simulated devices. Blocks in other languages are not run.

A page may contain marks. They are reStructuredText comments, so readers do not see them. These stand directly before a
block, and several may be combined:

``.. test: skip REASON``
    The block is not run. It must still be valid Python.
``.. test: devices sim``
    The block runs only with this kind of ``--devices``, or with one of several: ``.. test: devices cpu sim``. There
    are eight simulated devices.
``.. test: needs lightning``
    The block runs only where this package is installed, or all of several. ``tests/frameworks`` runs such pages too.

Hidden code prepares a block or checks what it did. It is the body of a comment, and runs like a block::

    .. test: hidden

        assert loss < 5

The marks above may stand before hidden code too. A mark that is misspelled, or that no code follows, is an error.

A block whose first line names a file, such as ``# test_training.py``, is not run here. ``test_documents_simulated``
writes all such blocks of a page into one folder and runs pytest there.
"""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn

import dataparallel
from dataparallel import DataParallel, composable
from dataparallel.sharded import ShardedTensor
from documents import DOCS, README, blocks_of, pages, parse, run_page

every_page = pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(README.parent).as_posix())


@every_page
def test_the_code_of_the_page_runs(page, request, tmp_path, monkeypatch):
    run_page(page, request.config, tmp_path, monkeypatch)


@every_page
def test_every_block_is_valid_python(page):
    for block in blocks_of(page):
        block.compiled()


def test_the_readme_and_the_guide_have_code_that_runs():
    for page in (README, DOCS / "guide" / "training.rst"):
        assert any(not block.skip and block.file is None for block in blocks_of(page))


def test_the_complete_example_of_the_readme_learns(request, tmp_path, monkeypatch):
    names = run_page(README, request.config, tmp_path, monkeypatch)
    assert names["loss"] < 5
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


class TestFragmentsOfTheReadme:
    """Blocks that use names which the reader has to bring."""

    FRAGMENTS = (
        "model = DataParallel(model)",
        'units="auto"',
        "set_requires_gradient_sync",
    )

    def test_each_is_run_below(self):
        skipped = [block.text for block in blocks_of(README) if block.skip]
        for text, word in zip(skipped, self.FRAGMENTS, strict=True):
            assert word in text

    def run(self, word, **names):
        assert word in self.FRAGMENTS
        (found,) = [block for block in blocks_of(README) if block.skip and word in block.text]
        names = {"torch": torch, "nn": nn, "dataparallel": dataparallel, "DataParallel": DataParallel, **names}
        exec(found.compiled(), names)
        return names

    @pytest.fixture
    def model(self, root):
        torch.manual_seed(0)
        return nn.Linear(20, 1).double().to(root)

    @pytest.fixture
    def batches(self):
        return list(torch.randn(3, 64, 20, dtype=torch.float64))

    def test_one_line(self, model):
        assert self.run("model = DataParallel(model)", model=model)["model"].module is model

    def test_a_model_that_fits_on_no_device(self, slots, root, monkeypatch):
        torch.manual_seed(0)
        one = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double().to(root)
        x = torch.randn(64, 20, dtype=torch.float64, device=root)
        model = copy.deepcopy(one)
        monkeypatch.setattr(composable, "fully_shard", partial(composable.fully_shard, devices=slots))
        names = self.run('units="auto"', model=model)
        for each, optimizer in ((model, names["optimizer"]), (one, torch.optim.AdamW(one.parameters()))):
            each(x).square().mean().backward()
            optimizer.step()
        for parameter, expected in zip(model.parameters(), one.parameters(), strict=True):
            assert isinstance(parameter, ShardedTensor)
            torch.testing.assert_close(parameter.full_tensor(root), expected.detach())

    def test_gradients_that_wait(self, model, batches, root):
        y = torch.randn(64, 1, dtype=torch.float64, device=root)
        loss = sum(nn.functional.mse_loss(model(batch.to(root)), y) for batch in batches) / len(batches)
        expected = torch.autograd.grad(loss, list(model.parameters()))
        self.run("set_requires_gradient_sync", model=model, batches=batches, y=y)
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(expected))


class TestReadme:
    """It is the front page, here and on a package index, which shows no files beside it and no markup of Sphinx.

    There a picture of this repository is what its ``:alt:`` says.
    """

    text = README.read_text(encoding="utf-8")

    def test_it_is_short(self):
        assert len(self.text.splitlines()) <= 250

    def test_its_links_need_no_file_beside_it(self):
        targets = [line.partition("<")[2] for line in self.text.splitlines() if ">`_" in line]
        assert [target for target in targets if not target.strip().startswith("https://")] == []

    def test_its_pictures_are_small_and_described_in_words(self):
        pictures = re.findall(r"^\.\. image:: (.+)\n(?:   :alt: (.+))?", self.text, re.M)
        assert pictures
        for path, words in pictures:
            assert 0 < (README.parent / path).stat().st_size < 200_000
            assert words

    def test_docutils_renders_it_without_a_warning(self):
        core = pytest.importorskip("docutils.core")
        writers = pytest.importorskip("docutils.writers")
        settings = {"report_level": 1, "halt_level": 2, "raw_enabled": False, "file_insertion_enabled": False}
        writer = writers.get_writer_class("html5")()
        page = core.publish_string(self.text, writer=writer, settings_overrides=settings).decode()
        assert "dataparallel" in page


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (".. test: skp a reason\n\n.. code-block:: python\n\n    x = 1\n", "README.rst:1: '.. test: skp' is none"),
        (".. test: skip\n\n.. code-block:: python\n\n    x = 1\n", "README.rst:1: '.. test: skip' needs a reason"),
        (".. test: skip a reason\n\nWords.\n", "README.rst:3: .* directly before"),
        (".. test: skip a reason\n", "README.rst:1: .* directly before"),
        (".. test: hidden\n\nWords.\n", "README.rst:1: no code follows"),
    ],
)
def test_a_mark_without_effect_is_an_error(text, problem):
    with pytest.raises(ValueError, match=problem):
        list(parse(text, README))
