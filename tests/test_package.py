"""The distribution: what the wheel holds, what it needs, who imports whom."""

import ast
import email.message
import email.parser
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parents[1]

# The folders of the research checkout: not in the wheel, not imported by it.
CHECKOUT = {"models", "configs", "launch", "tests", "colab"}

# What the library may import besides the standard library: install_requires.
LIBRARY_NEEDS = {"jax", "numpy", "scipy"}

# The modules of `specjax` that rules and drafters are made of.
FOUNDATION = {
  f"specjax.{name}"
  for name in (
    "types",
    "heads",
    "structs",
    "tree",
    "warp",
    "penalties",
    "cache",
    "low_cache",
    "recurrent",
    "random",
    "distributions",
    "calls",
    "siblings",
    "shapes",
    "cond_in_place",
  )
}


def _clean_environment() -> dict[str, str]:
  """The environment without the caller's Python and pip settings."""
  kept = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("PYTHON", "PIP_")) and name != "VIRTUAL_ENV"
  }
  return kept | {"PIP_CONFIG_FILE": os.devnull}


def _run(*command: str | os.PathLike, cwd: pathlib.Path) -> str:
  """Runs a command and returns its output; its errors become the failure."""
  done = subprocess.run(
    command,
    cwd=cwd,
    env=_clean_environment(),
    capture_output=True,
    text=True,
    timeout=300,
  )
  if done.returncode:
    pytest.fail(f"{command} failed:\n{done.stdout}\n{done.stderr}")
  return done.stdout


# ------------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A wheel built from a copy, so that nothing is left in the checkout.

  The copy has every folder of the checkout, so that a packaging mistake would
  show, but of the large ones only their Python files.
  """
  folder = tmp_path_factory.mktemp("wheel")
  source = folder / "source"
  source.mkdir()
  for path in ROOT.iterdir():
    if path.is_file() and not path.name.startswith("."):
      shutil.copy(path, source)
  for name in sorted({"specjax"} | CHECKOUT):
    for path in (ROOT / name).rglob("*"):
      if path.suffix == ".py" or path.name == "py.typed":
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
  options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
  _run(
    *(sys.executable, "-m", "pip", "wheel", *options, "-w", folder, source),
    cwd=folder,
  )
  (built,) = folder.glob("*.whl")
  return built


@pytest.fixture(scope="module")
def metadata(wheel: pathlib.Path) -> email.message.Message:
  with zipfile.ZipFile(wheel) as archive:
    (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
    text = archive.read(name).decode("utf-8")
  return email.parser.Parser().parsestr(text)


def test_wheel_holds_specjax_and_nothing_else(wheel: pathlib.Path):
  with zipfile.ZipFile(wheel) as archive:
    names = set(archive.namelist())
  code = {n for n in names if n.startswith("specjax/")}
  others = {n for n in names - code if ".dist-info/" not in n}
  assert not others
  assert {n.split("/")[0] for n in names - code} == {
    wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
  }
  # Complete too: a folder without __init__.py would be left out silently.
  assert code == {"specjax/py.typed"} | {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "specjax").rglob("*.py")
  }
  assert any(n.endswith("/licenses/LICENSE") for n in names)


def test_metadata(metadata: email.message.Message):
  text = (ROOT / "specjax" / "__init__.py").read_text(encoding="utf-8")
  (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
  assert metadata["Name"] == "specjax"
  assert metadata["Version"] == version
  assert metadata["License-Expression"] == "Apache-2.0"

  needs = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
  library = {need.name: need for need in needs if need.marker is None}
  assert set(library) == LIBRARY_NEEDS
  for jax_version, allowed in {
    "0.10.1": False,
    "0.10.2": True,
    "0.11.1": False,
    "0.11.2": True,
    "0.12.0.1": True,
  }.items():
    assert library["jax"].specifier.contains(jax_version) is allowed
  assert {"experiments", "test", "tpu", "cuda"} <= set(
    metadata.get_all("Provides-Extra")
  )


def test_locks_pin_every_requirement(metadata: email.message.Message):
  pins = {}
  for lock in ("requirements.lock", "requirements-test.lock"):
    for line in (ROOT / lock).read_text(encoding="utf-8").splitlines():
      if line and not line.startswith(("#", "-r ")):
        pin = Requirement(line)
        (specifier,) = pin.specifier
        assert specifier.operator == "==", line
        assert pin.url is None, line
        assert "+" not in specifier.version, line
        # The tests may need for all platforms what the commands need for some.
        known = pins.setdefault(canonicalize_name(pin.name), specifier.version)
        assert known == specifier.version, line
  for text in metadata.get_all("Requires-Dist"):
    need = Requirement(text)
    if 'extra == "tpu"' not in str(need.marker):
      assert need.specifier.contains(pins[canonicalize_name(need.name)]), text


def _distribution_closure(needs: list[Requirement]) -> dict[str, pathlib.Path]:
  """Packages of a set of requirements, in the running environment.

  Args:
    needs: requirements; their extras are followed.

  Returns:
    For every top-level file or folder of those distributions, its path.
  """
  actual: dict[str, pathlib.Path] = {}
  seen: set[tuple[str, str]] = set()
  pending = [(need, extra) for need in needs for extra in ("", *need.extras)]
  while pending:
    need, extra = pending.pop()
    if (canonicalize_name(need.name), extra) in seen:
      continue
    seen.add((canonicalize_name(need.name), extra))
    distribution = importlib.metadata.distribution(need.name)
    for file in distribution.files or ():
      top = file.parts[0]
      if top not in ("..", "__pycache__"):
        actual[top] = pathlib.Path(str(distribution.locate_file(top)))
    for text in distribution.requires or ():
      child = Requirement(text)
      if child.marker is None or child.marker.evaluate({"extra": extra}):
        pending += [(child, name) for name in ("", *child.extras)]
  return actual


def test_wheel_works_in_an_empty_environment(
  wheel: pathlib.Path, metadata: email.message.Message, tmp_path: pathlib.Path
):
  """Installed alone, the wheel imports, whole, from another directory.

  A new virtual environment gets the wheel and, through one `.pth` file, a
  folder of links to the distributions that the wheel's own metadata asks for,
  directly or not. This is what an index would install, without an index; a
  requirement that the metadata lacks is not there to be imported, and nor is
  the checkout: the editable install is no part of any of those distributions.
  """
  environment = tmp_path / "environment"
  _run(
    *(sys.executable, "-m", "venv", "--without-pip", environment),
    cwd=tmp_path,
  )
  python = environment / "bin" / "python"
  packages = pathlib.Path(
    _run(
      *(python, "-I", "-c"),
      "import sysconfig; print(sysconfig.get_path('purelib'))",
      cwd=tmp_path,
    ).strip()
  )
  _run(
    *(sys.executable, "-m", "pip", "--python", python),
    *("install", "--quiet", "--no-deps", "--no-index", wheel),
    cwd=tmp_path,
  )

  links = tmp_path / "links"
  links.mkdir()
  needs = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
  closure = _distribution_closure([n for n in needs if n.marker is None])
  assert "jaxlib" in closure
  assert "specjax" not in closure
  for name, path in closure.items():
    (links / name).symlink_to(path)
  (packages / "needs.pth").write_text(f"{links}\n", encoding="utf-8")

  elsewhere = tmp_path / "elsewhere"
  elsewhere.mkdir()
  program = """
import importlib, json, pkgutil, sys
import specjax
for module in pkgutil.walk_packages(specjax.__path__, "specjax."):
  importlib.import_module(module.name)
print(json.dumps({
  "file": specjax.__file__,
  "version": importlib.import_module("importlib.metadata").version("specjax"),
  "modules": sorted({name.split(".")[0] for name in sys.modules}),
  "submodules": sorted(n for n in sys.modules if n.startswith("specjax.")),
}))
"""
  report = json.loads(_run(python, "-I", "-c", program, cwd=elsewhere))
  assert pathlib.Path(report["file"]).is_relative_to(packages)
  assert report["version"] == metadata["Version"]
  assert {"specjax.types", "specjax.tree", "specjax.cache"} <= set(
    report["submodules"]
  )
  strangers = CHECKOUT | {"flax", "absl", "transformers", "torch", "optax"}
  assert not strangers & set(report["modules"])

  page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
  (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
  printed = _run(python, "-I", "-c", example, cwd=elsewhere)
  assert len(re.findall(r"\d+", printed)) == 40


# -------------------------------------------------------------- the import law


def _imports(source: str, package: str, modules: set[str]) -> set[str]:
  """The modules that a source file names in its import statements.

  Args:
    source: the text of the file.
    package: the package that relative imports start from.
    modules: every module there is, to tell `from package import module` from
      `from package import name`.

  Returns:
    Dotted names; the statement's package is named only for what is imported
    from itself.
  """
  results = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      results |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        parts = package.split(".")
        parts = parts[: len(parts) - node.level + 1]
        base = ".".join([*parts, base] if base else parts)
      for alias in node.names:
        name = f"{base}.{alias.name}"
        results.add(name if name in modules else base)
  return results


def _module_name(path: pathlib.Path) -> str:
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports_under(folder: str) -> dict[str, set[str]]:
  """For each Python file under a folder of the checkout, what it imports."""
  modules = {
    _module_name(path)
    for top in {"specjax"} | CHECKOUT
    for path in (ROOT / top).rglob("*.py")
  }
  result = {}
  for path in sorted((ROOT / folder).rglob("*.py")):
    package = ".".join(path.relative_to(ROOT).parent.parts)
    source = path.read_text(encoding="utf-8")
    result[str(path.relative_to(ROOT))] = _imports(source, package, modules)
  assert result, f"no Python file under {folder}"
  return result


@pytest.mark.parametrize(
  ("source", "expected"),
  [
    ("import models.llama", {"models.llama"}),
    ("import jax.numpy as jnp", {"jax.numpy"}),
    ("from specjax import cache as c, Tree", {"specjax.cache", "specjax"}),
    ("from specjax.tree import Tree", {"specjax.tree"}),
    ("from . import token", {"specjax.rules.token"}),
    ("from .token import RULE", {"specjax.rules.token"}),
    ("from ..decode import Decoder", {"specjax.decode"}),
    ("from .. import decode", {"specjax.decode"}),
    ("def f():\n  import flax", {"flax"}),
  ],
)
def test_imports_are_read_right(source: str, expected: set[str]):
  modules = {
    f"specjax.{name}" for name in ("cache", "tree", "decode", "rules.token")
  }
  assert _imports(source, "specjax.rules", modules) == expected


def test_specjax_imports_only_what_it_declares():
  allowed = LIBRARY_NEEDS | {"specjax"} | sys.stdlib_module_names
  for file, imports in _imports_under("specjax").items():
    assert {name.split(".")[0] for name in imports} <= allowed, file


@pytest.mark.parametrize(
  ("family", "beside"),
  [("rules", ()), ("adaptive", ("ladder.py",)), ("drafters", ())],
)
def test_rules_and_drafters_import_only_the_foundation(family, beside):
  """And drafters what ends them; lengths alone know decoders."""
  foundation = {f"specjax.{family}", "specjax.adaptive"}
  if family == "rules":
    foundation.remove("specjax.adaptive")
  for file, imports in _imports_under(f"specjax/{family}").items():
    if file.endswith(beside):
      continue
    inside = {name for name in imports if name.split(".")[0] == "specjax"}
    inside = {n for n in inside if ".".join(n.split(".")[:2]) not in foundation}
    assert inside <= FOUNDATION, file


def test_the_foundation_knows_no_rule_and_no_loop():
  imports_by_file = _imports_under("specjax")
  for name in sorted(FOUNDATION):
    file = name.replace(".", "/") + ".py"
    inside = {n for n in imports_by_file[file] if n.startswith("specjax")}
    assert inside <= FOUNDATION, file


def test_models_import_only_types_structs_and_what_caches_hold():
  for file, imports in _imports_under("models").items():
    inside = {name for name in imports if name.split(".")[0] == "specjax"}
    names = ("types", "cache", "recurrent", "structs")
    allowed = {f"specjax.{name}" for name in names}
    assert inside <= allowed, file
    assert not {n.split(".")[0] for n in imports} & (CHECKOUT - {"models"}), (
      file
    )


def test_configs_and_models_do_not_import_launch():
  for folder in ("configs", "models"):
    for file, imports in _imports_under(folder).items():
      assert "launch" not in {n.split(".")[0] for n in imports}, file


def test_no_module_imports_a_command():
  """Code that two commands share is in a module of its own."""
  imports_by_file = _imports_under("launch")
  commands = {
    _module_name(ROOT / file)
    for file in imports_by_file
    if "\n  cli.run(" in (ROOT / file).read_text(encoding="utf-8")
  }
  assert {"launch.decode", "launch.studies.rules.__main__"} <= commands
  for file, imports in imports_by_file.items():
    assert not imports & commands, file
