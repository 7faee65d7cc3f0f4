"""Makes the notebooks of colab/ from the scripts beside them.

  python -m launch.tools.notebooks    # or: make notebooks

colab/NAME.py, in the percent format, is the source of colab/NAME.ipynb: edit
the script and run this. Two cells that every notebook begins with are added
here, the badge and the installation on Colab, which alone need the project's
public address. No outputs are kept, and a cell's id follows from its text: the
same script gives the same file, byte for byte. The table in colab/README.md is
drawn too.

Needs jupytext, which `make notebooks` installs with the tests.
"""

import hashlib
import json
import pathlib
from typing import Any

from launch import cli, outputs

cli.reads()

# The one place that names the project's public address. It has none yet: with
# ORG/... the badges lead nowhere.
REPOSITORY = "ORG/specjax"

# Of the cell that installs, which nothing but Colab runs.
INSTALL = "install"

_ROOT = pathlib.Path(__file__).parents[2]
FOLDER = _ROOT / "colab"
# In the order in which they are best read.
NAMES = ("decoding", "rules", "drafts", "pods")

_INSTALLATION = f"""\
# On Colab: two minutes, and before anything imports jax, because Colab's own is
# too old; the versions are those of the tests. Elsewhere: `make setup`.
import os
import shutil
import sys
if "google.colab" in sys.modules and not os.path.isdir("/content/specjax"):
  extras = "cuda,experiments" if shutil.which("nvidia-smi") else "tpu"
  !git clone --quiet --depth=1 https://github.com/{REPOSITORY} /content/specjax
  %cd /content/specjax
  %pip install --quiet -c requirements.lock -e .[{{extras}}]"""


def badge(name: str) -> str:
  """Markdown that opens a notebook in Colab."""
  colab = "https://colab.research.google.com"
  return (
    f"[![Open in Colab]({colab}/assets/colab-badge.svg)]"
    f"({colab}/github/{REPOSITORY}/blob/main/colab/{name}.ipynb)"
  )


def notebook(name: str) -> str:
  """The text of a notebook, made from its script.

  Raises:
    UserError: if jupytext is not installed.
  """
  cells = [
    {"cell_type": "markdown", "metadata": {}, "source": badge(name)},
    {
      "cell_type": "code",
      "metadata": {"tags": [INSTALL]},
      "source": _INSTALLATION,
    },
    *_script(name),
  ]
  seen: dict[str, int] = {}
  for cell in cells:
    digest = hashlib.sha256(cell["source"].encode()).hexdigest()[:12]
    seen[digest] = seen.get(digest, 0) + 1
    cell["id"] = f"{digest}-{seen[digest]}"
    cell["source"] = cell["source"].splitlines(keepends=True)
    if cell["cell_type"] == "code":
      cell |= {"execution_count": None, "outputs": []}
  made = {
    "cells": [dict(sorted(cell.items())) for cell in cells],
    "metadata": {
      "colab": {"name": f"{name}.ipynb", "provenance": []},
      "kernelspec": {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
      },
      "language_info": {"name": "python"},
    },
    "nbformat": 4,
    "nbformat_minor": 5,
  }
  return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _script(name: str) -> list[dict[str, Any]]:
  """The cells of a script: their type, metadata and source."""
  try:
    import jupytext  # for the tests, and not among what commands need
  except ImportError:
    raise cli.UserError(
      "jupytext is not installed: `make notebooks` does it"
    ) from None
  read = jupytext.read(FOLDER / f"{name}.py", fmt="py:percent")
  return [
    {
      "cell_type": cell.cell_type,
      "metadata": dict(cell.metadata),
      "source": cell.source,
    }
    for cell in read.cells
  ]


def index() -> str:
  """The table of all notebooks, with their badges."""
  lines = ["| notebook | |", "|---|---|"]
  for name in NAMES:
    (title, *_) = _script(name)[0]["source"].removeprefix("# ").splitlines()
    lines.append(f"| [{title}]({name}.py) | {badge(name)} |")
  return "\n".join(lines) + "\n"


def readme() -> str:
  """colab/README.md with the table that there should be."""
  text = (FOLDER / "README.md").read_text("utf-8")
  before, start, rest = text.partition("| notebook |")
  _, gap, after = (start + rest).partition("\n\n")
  return before + index() + gap[1:] + after


def run(_) -> int:
  """The command."""
  files = {FOLDER / f"{name}.ipynb": notebook(name) for name in NAMES}
  files[FOLDER / "README.md"] = readme()
  for path, text in files.items():
    outputs.replace(path, text)
    print(path.relative_to(_ROOT))
  return 0


if __name__ == "__main__":
  cli.run(run, required=())
