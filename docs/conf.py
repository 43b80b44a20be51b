"""How Sphinx builds the manual: ``sphinx-build -W --keep-going -b html docs build/docs``, from the repository's root.

Nothing is fetched: references to Python's and torch's own names are shown as code, without a link.
"""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from sphinx.application import Sphinx

import dataparallel
from nogpu.simulated import device_module

# `simulate` registers this module as torch.sim, after it has compiled the devices. The manual needs the names alone.
torch.sim = sys.modules["torch.sim"] = device_module

project = "dataparallel"
author = "the dataparallel authors"
project_copyright = author
version = release = dataparallel.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
root_doc = "index"

# Single backticks in docstrings and pages: a link where the manual has the name, else code.
default_role = "py:obj"
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 88

napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_attr_annotations = False
napoleon_use_rtype = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("Batch", "Build", "Case", "DeviceLike", "Loss", "MakeBatch", "Wrap")}

html_theme = "pydata_sphinx_theme"
html_title = f"dataparallel {release}"
html_show_sourcelink = False
html_theme_options = {
    "navigation_depth": 3,
    "show_toc_level": 2,
    "header_links_before_dropdown": 8,
    "footer_start": ["copyright"],
    "footer_end": [],
}


def setup(app: Sphinx) -> None:
    """Sphinx calls this with itself."""
    app.connect("autodoc-process-signature", _readable)


def _readable(app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str) -> Any:
    """The signature as the source has it: names of aliases, functions and classes instead of their ``repr``."""
    if name == "dataparallel.composable.replicate":  # its annotations are those of the function that prepares a module
        returns = "Module"
    return _plain(signature), _plain(returns)


def _plain(text: str | None) -> str | None:
    for written in (r"TypeAliasForwardRef\('(\w+)'\)", r"<function (\w+)>", r"<class '(?:\w+\.)*(\w+)'>"):
        text = text and re.sub(written, r"\1", text)
    return text
