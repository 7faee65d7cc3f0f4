"""The notebooks of colab/: made from their scripts, and executed on the CPU."""

import ast
import inspect
import pathlib
import re

import jupytext
import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "colab"
NAMES = ("decoding", "rules", "drafts", "pods")
OURS = ("specjax", "models", "configs", "launch")


def committed(name):
  return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def cells(name):
  return jupytext.read(FOLDER / f"{name}.py", fmt="py:percent").cells


@pytest.mark.parametrize("name", NAMES)
def test_committed_notebook_matches_its_script(name):
  """If not: `make notebooks`, and commit what it wrote."""
  made = committed(name)
  source = lambda cells: [(cell.cell_type, cell.source) for cell in cells]
  assert source(made.cells) == source(cells(name))
  assert not any(cell.get("outputs") for cell in made.cells)


@pytest.mark.parametrize("name", NAMES)
def test_files_named_in_notebooks_exist(name):
  text = "\n".join(c.source for c in cells(name) if c.cell_type == "markdown")
  named = set(re.findall(r"`([\w/-]+(?:\.[\w]+)+|[\w/-]+/)`", text))
  for path in named:
    if "/" in path or path.endswith(".md"):
      assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", NAMES)
def test_calls_in_notebooks_match_signatures(name):
  """Of imported functions; three notebooks are executed in slow tests only."""
  tree, scope = ast.parse((FOLDER / f"{name}.py").read_text()), {}
  nodes = list(ast.walk(tree))
  for node in nodes:
    if isinstance(node, ast.Import | ast.ImportFrom):
      exec(ast.unparse(node), scope)
  for call in (x for x in nodes if isinstance(x, ast.Call)):
    text = ast.unparse(call.func)
    ours = re.fullmatch(r"(\w+)(\.\w+)*", text) and text.split(".")[0] in scope
    if not ours or any(isinstance(x, ast.Starred) for x in call.args):
      continue
    called = eval(text, scope)
    if getattr(called, "__module__", "").split(".")[0] in OURS:
      named = {x.arg: None for x in call.keywords if x.arg}
      inspect.signature(called).bind(*call.args, **named)


# ------------------------------------------------------------------ executed


def execute(name, folder, monkeypatch, *, last=""):
  """Runs the committed notebook in a process of its own; its code cells.

  It runs and writes in `folder`, and `last` is code to run after it.
  """
  monkeypatch.setenv("SPECJAX_SMALL", "1")
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("TMPDIR", str(folder))
  monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
  monkeypatch.setenv("MPLCONFIGDIR", str(folder / "matplotlib"))
  book = committed(name)
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


def test_rules_notebook_runs(tmp_path, monkeypatch):
  code = execute("rules", tmp_path, monkeypatch)
  assert len(outputs(code, "image/png")) == 2
  text = printed(code)
  assert re.search(r"^accepts 0\.5589, error \de-1[67]$", text, re.M)  # barker
  assert "1e-09: error 8.5e-10\n" in text
  assert "1e-09: 2e+18 samples needed" in text


@pytest.mark.slow
def test_decoding_notebook_runs(tmp_path, monkeypatch):
  code = execute("decoding", tmp_path, monkeypatch)
  assert len(outputs(code, "image/png")) == 3
  assert "color: #008000" in "".join(outputs(code, "text/html"))  # accepted


@pytest.mark.slow
def test_drafts_notebook_runs_and_writes_only_to_its_workdir(
  tmp_path, monkeypatch
):
  code = execute("drafts", tmp_path, monkeypatch)
  assert len(outputs(code, "image/png")) == 2
  # All that it wrote is where it was told to write.
  (workdir,) = (path for path in tmp_path.iterdir() if path.name[:3] == "tmp")
  assert (workdir / "total_variation/model/model.safetensors").exists()


@pytest.mark.slow
def test_pods_notebook_runs_without_initializing_a_backend(
  tmp_path, monkeypatch
):
  pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64 only")
  code = execute("pods", tmp_path, monkeypatch, last=_UNTOUCHED)
  assert len(outputs(code, "image/png")) == 3
  shown = "".join(outputs(code, "text/html"))
  assert "v5e:1x1 (v5litepod-1)" in shown  # compiled here


# A process that holds a TPU, or most of a GPU's memory, would leave none for
# the commands that it starts.
_UNTOUCHED = """
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
