"""Sphinx: `make docs` builds the pages, and a reference from the docstrings.

The source folder is the repository, so that links are the same as elsewhere.
"""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import specjax

project = "specjax"
version = release = specjax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
  "*.md", "docs/**", "models/pretrained/*.md", "launch/tpu/*.md", "colab/*.md",
]  # fmt: skip
html_theme = "furo"
html_title = f"specjax {version}"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the text says shapes and types
napoleon_use_ivar = True
myst_heading_anchors = 4


def _code(app, what, name, obj, options, lines):
  """Docstrings write code in single backticks, reStructuredText in two."""
  text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``\\ ", "\n".join(lines))
  lines[:] = text.replace("\\ \n", "\n").split("\n")


def setup(app):
  """Called by Sphinx."""
  app.connect("autodoc-process-docstring", _code, priority=400)
