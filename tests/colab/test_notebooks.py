"""The notebooks of colab/: made from their scripts, and executed on the CPU."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import types

import jupytext
import nbclient
import nbformat
import pytest
from absl.testing import flagsaver

from launch import cli
from launch.tools import notebooks

pytestmark = pytest.mark.usefixtures("quick_to_compile")
ROOT = notebooks.FOLDER.parent


def committed(name):
  return nbformat.read(notebooks.FOLDER / f"{name}.ipynb", as_version=4)


def cells(name):
  return jupytext.read(notebooks.FOLDER / f"{name}.py", fmt="py:percent").cells


# ------------------------------------------------------------------- the files


def test_every_script_has_a_notebook_and_every_notebook_a_script():
  for suffix in ("py", "ipynb"):
    actual = {path.stem for path in notebooks.FOLDER.glob(f"*.{suffix}")}
    assert actual == {*notebooks.NAMES}


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_is_what_its_script_makes(name):
  """If not: `make notebooks`, and commit what it wrote."""
  text = (notebooks.FOLDER / f"{name}.ipynb").read_text("utf-8")
  address = notebooks.repository()
  assert text == notebooks.notebook(name, address)
  made = nbformat.reads(text, as_version=4)
  nbformat.validate(made)
  source = lambda cells: [(cell.cell_type, cell.source) for cell in cells]
  added = 2 if notebooks.badge(name, address) else 1
  assert source(made.cells[added:]) == source(cells(name))
  assert len({cell.id for cell in made.cells}) == len(made.cells)
  for cell in made.cells:
    assert not cell.get("outputs")


ON_GITHUB = "https://github.com/some-one/specjax.git"


def test_the_index_is_of_the_address_that_the_notebooks_have():
  text = (notebooks.FOLDER / "README.md").read_text("utf-8")
  assert text == notebooks.readme(notebooks.repository())
  assert notebooks.index(notebooks.repository()) in text


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_only_what_is_on_github_has_badges(name):
  shown = notebooks.badge(name, ON_GITHUB)
  assert f"github/some-one/specjax/blob/main/colab/{name}.ipynb" in shown
  assert shown in notebooks.index(ON_GITHUB)
  made = nbformat.reads(notebooks.notebook(name, ON_GITHUB), as_version=4)
  assert made.cells[0].source == shown
  for address in ("", "/srv/specjax.git", "https://example.com/a/specjax"):
    assert notebooks.badge(name, address) == ""
    made = nbformat.reads(notebooks.notebook(name, address), as_version=4)
    assert made.cells[0].source.startswith(f'REPOSITORY = "{address}"\n')


def test_the_address_is_one_argument_and_stays(tmp_path, monkeypatch):
  """`make notebooks REPOSITORY=...` sets it, `make notebooks` keeps it."""
  for path in notebooks.FOLDER.iterdir():
    if path.is_file():
      shutil.copy(path, tmp_path)
  monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
  monkeypatch.setattr(notebooks, "_ROOT", tmp_path)
  for arguments in ((f"--repository={ON_GITHUB}",), ()):
    with flagsaver.flagsaver():
      assert cli.execute(notebooks.run, ["notebooks", *arguments]) == 0
    assert notebooks.repository() == ON_GITHUB
    for name in notebooks.NAMES:
      text = (tmp_path / f"{name}.ipynb").read_text("utf-8")
      assert text == notebooks.notebook(name, ON_GITHUB)
    text = (tmp_path / "README.md").read_text("utf-8")
    assert notebooks.badge("rules", ON_GITHUB) in text
  makefile = (ROOT / "Makefile").read_text("utf-8")
  assert "'--repository=$(REPOSITORY)'" in makefile


# --------------------------------------------------------------- installation


@pytest.fixture
def bare(tmp_path):
  """A bare repository with what the installation looks for."""
  work = tmp_path / "work"
  work.mkdir()
  (work / "requirements.lock").write_text("")
  git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.com"]
  for command in (
    ["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"],
    ["clone", "-q", "--bare", ".", str(tmp_path / "bare.git")],
  ):  # fmt: skip
    subprocess.run([*git, *command], cwd=work, check=True)
  return str(tmp_path / "bare.git")


@pytest.fixture
def install(tmp_path, monkeypatch):
  """Runs the first cell, as on Colab but for pip; where pip would have run."""
  where, real = [], subprocess.run

  def run(command, **options):
    if command[0] == "git":
      return real(command, **options)
    assert command[:3] == [sys.executable, "-m", "pip"]
    where.append(os.getcwd())
    return None

  monkeypatch.setattr(subprocess, "run", run)
  monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("colab"))
  content = tmp_path / "content"
  content.mkdir()
  monkeypatch.chdir(content)

  def of(address):
    book = nbformat.reads(notebooks.notebook("rules", address), as_version=4)
    (cell,) = (
      c for c in book.cells if notebooks.INSTALL in c.metadata.get("tags", [])
    )
    for _ in range(2):  # run again it does nothing
      exec(cell.source, {})
    (actual,) = where
    return content, actual

  return of


def test_the_first_cell_clones_the_repository(bare, install):
  content, actual = install(bare)
  assert actual == str(content / "specjax")
  assert (content / "specjax" / ".git").is_dir()


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_the_first_cell_takes_an_uploaded_checkout(bare, install, form):
  subprocess.run(["git", "clone", "-q", bare, "specjax-main"], check=True)
  if form == "zip":
    shutil.make_archive("specjax-main", "zip", ".", "specjax-main")
    shutil.rmtree("specjax-main")
  content, actual = install("")
  assert actual == str(content / "specjax-main")


def test_without_an_address_or_a_checkout_the_first_cell_says_so(install):
  with pytest.raises(ValueError, match="upload a checkout, or set REPOSITORY"):
    install("")


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_explains_every_cell_and_calls_the_library(name):
  actual = cells(name)
  for before, cell in itertools.pairwise(actual):
    if cell.cell_type == "code":
      assert before.cell_type == "markdown", cell.source
      lines = [line for line in cell.source.splitlines() if line.strip()]
      assert len(lines) <= 10, cell.source
  assert actual[-1].cell_type == "markdown"
  assert actual[-1].source.startswith("## Where to go next\n")
  assert sum("assert " in cell.source for cell in actual) >= 2


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_the_files_that_a_notebook_names_exist(name):
  text = "\n".join(c.source for c in cells(name) if c.cell_type == "markdown")
  named = set(re.findall(r"`([\w/-]+(?:\.[\w]+)+|[\w/-]+/)`", text))
  files = {path for path in named if "/" in path or path.endswith(".md")}
  assert len(files) >= 4
  for path in files:
    assert (ROOT / path).exists(), path


# ------------------------------------------------------------------ executed


def execute(name, folder, monkeypatch, *, last=""):
  """Runs the committed notebook in a process of its own; its code cells.

  The installation is left out, and what it writes is written to `folder`.

  Args:
    name: of the notebook.
    folder: where it runs, as if the checkout were elsewhere.
    monkeypatch: the fixture.
    last: code to run after it.
  """
  monkeypatch.setenv("SPECJAX_SMALL", "1")
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("TMPDIR", str(folder))
  monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
  monkeypatch.setenv("MPLCONFIGDIR", str(folder / "matplotlib"))
  book = committed(name)
  for cell in book.cells:
    if notebooks.INSTALL in cell.metadata.get("tags", []):
      cell.source = ""
  book.cells.append(nbformat.v4.new_code_cell(last))
  client = nbclient.NotebookClient(
    book,
    timeout=600,
    kernel_name="python3",
    resources={"metadata": {"path": str(folder)}},
  )
  client.execute()
  return [cell for cell in book.cells if cell.cell_type == "code"]


def outputs(code, kind):
  """All outputs of a MIME type."""
  return [
    output.data[kind]
    for cell in code
    for output in cell.outputs
    if kind in output.get("data", {})
  ]


def printed(code):
  return "".join(
    output.text
    for cell in code
    for output in cell.outputs
    if output.get("name") == "stdout"
  )


@pytest.mark.heavy  # half a minute, and what it calls has tests of its own
def test_decoding(tmp_path, monkeypatch):
  code = execute("decoding", tmp_path, monkeypatch)
  assert printed(code).count("12 tokens in ") == 2
  assert len(outputs(code, "image/png")) == 3
  shown = "".join(outputs(code, "text/html"))
  assert "color: #008000" in shown  # accepted tokens are green
  for words in ("drafted and accepted", "corrected (residual)", "bonus"):
    assert words in shown


def test_rules(tmp_path, monkeypatch):
  code = execute("rules", tmp_path, monkeypatch)
  assert len(outputs(code, "image/png")) == 3
  text = printed(code)
  assert re.search(r"^accepts 0\.5589, error \de-1[67]$", text, re.M)  # barker
  assert "1e-09: error 8.5e-10\n" in text
  assert "1e-09: 2e+18 samples needed" in text


@pytest.mark.heavy  # a minute, and what it calls has tests of its own
def test_drafts(tmp_path, monkeypatch):
  code = execute("drafts", tmp_path, monkeypatch)
  assert len(outputs(code, "image/png")) == 2
  toys, measured = outputs(code, "text/markdown")
  assert [line.split("|")[1] for line in toys.splitlines()[2:]] == [
    " `a` ", " `b` "
  ]  # fmt: skip
  assert "| `before` |" in measured
  for name in ("before", "next_token", "total_variation"):
    assert re.search(rf"^{name} \d\.\d\d$", printed(code), re.M)
  # All that it wrote is where it was told to write.
  (workdir,) = (path for path in tmp_path.iterdir() if path.name[:3] == "tmp")
  assert (workdir / "total_variation/model/model.safetensors").exists()


@pytest.mark.heavy  # half a minute, and what it calls has tests of its own
def test_pods(tmp_path, monkeypatch):
  pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64 only")
  code = execute("pods", tmp_path, monkeypatch, last=_UNTOUCHED)
  assert len(outputs(code, "image/png")) == 4
  shown = "".join(outputs(code, "text/html"))
  assert "v5e:1x1 (v5litepod-1)" in shown  # compiled here, not a committed one
  assert "No accelerator here" in outputs(code, "text/markdown")[-1]


# A process that holds a TPU, or most of a GPU's memory, would leave none for
# the commands that it starts.
_UNTOUCHED = """
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
