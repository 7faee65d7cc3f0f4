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
  text = text.replace("\\ \n", "\n")
  # Napoleon has one attribute an entry: "a, b: text" becomes two entries.
  before, heading, entries = text.partition("Attributes:\n")
  entries = re.sub(
    r"^( +)(\w+(?:,\s+\w+)+):(.*(?:\n\1 +.*)*)",
    lambda entry: "\n".join(
      f"{entry[1]}{name}:{entry[3]}" for name in re.split(r",\s+", entry[2])
    ),
    entries,
    flags=re.MULTILINE,
  )
  lines[:] = (before + heading + entries).split("\n")


def _signature(app, what, name, obj, options, signature, returns):
  """Defaults that are functions have no name worth reading."""
  if signature:
    signature = re.sub(r"=<(function|factory).*?>+", "=...", signature)
    signature = re.sub(r"=Siblings\(name='(\w+)'[^)]*\)", r"='\1'", signature)
    return signature, returns
  return None


def setup(app):
  """Called by Sphinx."""
  app.connect("autodoc-process-docstring", _code, priority=400)
  app.connect("autodoc-process-signature", _signature)
