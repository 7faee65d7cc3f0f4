"""Makes the notebooks of colab/ from the scripts beside them.

  python -m launch.tools.notebooks    # or: make notebooks
  make notebooks REPOSITORY=https://github.com/OWNER/specjax

colab/NAME.py, in the percent format, is the source of colab/NAME.ipynb: edit
the script and run this. A cell that every notebook begins with is added here:
the installation on Colab, from an uploaded checkout or from where the project
is published. That address is said once, with --repository, and kept in the
notebooks; of one on GitHub there are badges, too. No outputs are kept, and a
cell's id follows from its text: the same script gives the same file, byte for
byte. The table in colab/README.md is drawn too.

Needs jupytext, which `make notebooks` installs with the tests.
"""

import hashlib
import json
import pathlib
import re
from typing import Any

from absl import flags

from launch import cli, results

cli.reads()
_REPOSITORY = flags.DEFINE_string(
  "repository", None,
  "Where git clones the project from; what the notebooks have by default.",
)  # fmt: skip

# Of the cell that installs, which nothing but Colab runs.
INSTALL = "install"

_ROOT = pathlib.Path(__file__).parents[2]
FOLDER = _ROOT / "colab"
# In the order in which they are best read.
NAMES = ("decoding", "rules", "drafts", "pods")

_VARIABLE = "REPOSITORY"
_INSTALLATION = """\
# On Colab: two minutes, and before anything imports jax, because Colab's own is
# too old; the versions are those of the tests. Elsewhere: `make setup`.
# A checkout that is uploaded, as a folder specjax or a file specjax*.zip, is
# taken as it is. Else `make notebooks REPOSITORY=...` says what is cloned.
import glob, os, shutil, subprocess, sys
if "google.colab" in sys.modules and not os.path.isfile("requirements.lock"):
  for archive in glob.glob("specjax*.zip"):
    shutil.unpack_archive(archive)
  if not glob.glob("specjax*/requirements.lock"):
    if not REPOSITORY:
      raise ValueError("upload a checkout, or set REPOSITORY to its address")
    clone = ["git", "clone", "--quiet", "--depth=1", REPOSITORY, "specjax"]
    subprocess.run(clone, check=True)
  os.chdir(os.path.dirname(glob.glob("specjax*/requirements.lock")[0]))
  extras = "cuda,experiments" if shutil.which("nvidia-smi") else "tpu"
  install = [sys.executable, "-m", "pip", "install", "--quiet"]
  install += ["-c", "requirements.lock", "-e", f".[{extras}]"]
  subprocess.run(install, check=True)"""


def repository() -> str:
  """The address that the committed notebooks have; "" if they have none."""
  cells = json.loads((FOLDER / f"{NAMES[0]}.ipynb").read_text("utf-8"))["cells"]
  for cell in cells:
    if INSTALL in cell["metadata"].get("tags", ()):
      name, _, value = cell["source"][0].partition(" = ")
      return json.loads(value) if name == _VARIABLE else ""
  return ""


def badge(name: str, address: str) -> str:
  """Markdown that opens a notebook in Colab; "" if it is not on GitHub."""
  match = re.fullmatch(
    r"https://github\.com/([\w.-]+/[\w.-]+?)(\.git)?/?", address
  )
  if not match:
    return ""
  colab = "https://colab.research.google.com"
  return (
    f"[![Open in Colab]({colab}/assets/colab-badge.svg)]"
    f"({colab}/github/{match[1]}/blob/main/colab/{name}.ipynb)"
  )


def notebook(name: str, address: str) -> str:
  """The text of a notebook, made from its script.

  Args:
    name: of the script.
    address: where the project can be cloned from, or "".

  Raises:
    UserError: if jupytext is not installed.
  """
  cells = [
    {
      "cell_type": "code",
      "metadata": {"tags": [INSTALL]},
      "source": f"{_VARIABLE} = {json.dumps(address)}\n{_INSTALLATION}",
    },
    *_script(name),
  ]
  if shown := badge(name, address):
    cells.insert(0, {"cell_type": "markdown", "metadata": {}, "source": shown})
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


def index(address: str) -> str:
  """The table of all notebooks, with their badges if there are any."""
  lines = ["| notebook |", "|---|"]
  if badge("", address):
    lines = ["| notebook | |", "|---|---|"]
  for name in NAMES:
    (title, *_) = _script(name)[0]["source"].removeprefix("# ").splitlines()
    shown = badge(name, address)
    lines.append(f"| [{title}]({name}.py) |" + (f" {shown} |" if shown else ""))
  return "\n".join(lines) + "\n"


def readme(address: str) -> str:
  """colab/README.md with the table that there should be."""
  text = (FOLDER / "README.md").read_text("utf-8")
  before, start, rest = text.partition("| notebook |")
  _, gap, after = (start + rest).partition("\n\n")
  return before + index(address) + gap[1:] + after


def run(_) -> int:
  """The command."""
  address = _REPOSITORY.value
  if address is None:
    address = repository()
  files = {FOLDER / f"{name}.ipynb": notebook(name, address) for name in NAMES}
  files[FOLDER / "README.md"] = readme(address)
  for path, text in files.items():
    results.write(path, text)
    print(path.relative_to(_ROOT))
  return 0


if __name__ == "__main__":
  cli.run(run, required=())
