"""The distribution: what the wheel holds, what it needs, who imports whom."""

import ast
import email.parser
import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import specjax

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The folders of the research checkout: not in the wheel, not imported by it.
CHECKOUT = {"models", "configs", "launch", "tests", "colab"}
# What the library may import besides the standard library: install_requires.
LIBRARY_NEEDS = {"jax", "numpy", "scipy"}
# The modules of `specjax` that rules and drafters are made of.
FOUNDATION = {
  f"specjax.{name}"
  for name in (
    "types", "heads", "structs", "tree", "warp", "penalties", "cache", "calls",
    "quantized_cache", "recurrent", "random", "distributions", "siblings",
    "shapes", "cond_in_place",
  )
}  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  """A wheel built from a copy of the checkout's Python files."""
  folder = tmp_path_factory.mktemp("wheel")
  source = folder / "source"
  source.mkdir()
  for path in ROOT.iterdir():
    if path.is_file() and not path.name.startswith("."):
      shutil.copy(path, source)
  for name in {"specjax"} | CHECKOUT:
    for path in (ROOT / name).rglob("*"):
      if path.suffix == ".py" or path.name == "py.typed":
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
  subprocess.run(
    [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps",
     "--no-build-isolation", "--no-index", "-w", folder, source],
    cwd=folder, check=True, timeout=300,
  )  # fmt: skip
  (built,) = folder.glob("*.whl")
  return zipfile.ZipFile(built)


@pytest.fixture(scope="module")
def metadata(wheel):
  (name,) = (n for n in wheel.namelist() if n.endswith("/METADATA"))
  return email.parser.Parser().parsestr(wheel.read(name).decode("utf-8"))


def test_wheel_contains_only_specjax(wheel):
  """Complete too: a folder without __init__.py would be left out silently."""
  code = {n for n in wheel.namelist() if ".dist-info/" not in n}
  assert code == {"specjax/py.typed"} | {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "specjax").rglob("*.py")
  }


def test_metadata_lists_the_version_and_dependencies(metadata):
  assert metadata["Version"] == specjax.__version__
  needs = map(Requirement, metadata.get_all("Requires-Dist"))
  assert {need.name for need in needs if need.marker is None} == LIBRARY_NEEDS


def test_locks_pin_every_requirement(metadata):
  pins = {}
  for lock in ("requirements.lock", "requirements-test.lock"):
    for line in (ROOT / lock).read_text(encoding="utf-8").splitlines():
      if line and not line.startswith(("#", "-r ")):
        pin = Requirement(line)
        (specifier,) = pin.specifier
        assert specifier.operator == "==", line
        # The tests may need for all platforms what the commands need for some.
        known = pins.setdefault(canonicalize_name(pin.name), specifier.version)
        assert known == specifier.version, line
  for text in metadata.get_all("Requires-Dist"):
    need = Requirement(text)
    if 'extra == "tpu"' not in str(need.marker):
      assert need.specifier.contains(pins[canonicalize_name(need.name)]), text


def imports_under(folder):
  """Of each Python file under a folder: the modules that it imports."""
  result = {}
  for path in sorted((ROOT / folder).rglob("*.py")):
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if isinstance(node, ast.Import):
        names |= {alias.name for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        assert not node.level, f"{path}: a relative import"
        for alias in node.names:  # a module of a package, or a name in a module
          inside = ROOT.joinpath(*node.module.split("."), alias.name)
          is_module = inside.is_dir() or inside.with_suffix(".py").exists()
          names.add(f"{node.module}.{alias.name}" if is_module else node.module)
    result[str(path.relative_to(ROOT))] = names
  assert result, f"no Python file under {folder}"
  return result


def of_specjax(imports):
  return {name for name in imports if name.split(".")[0] == "specjax"}


def tops(imports):
  return {name.split(".")[0] for name in imports}


def test_specjax_imports_only_declared_dependencies():
  allowed = LIBRARY_NEEDS | {"specjax"} | sys.stdlib_module_names
  for file, imports in imports_under("specjax").items():
    assert tops(imports) <= allowed, file


@pytest.mark.parametrize("family", ["rules", "adaptive", "drafters"])
def test_rules_and_drafters_import_only_the_foundation(family):
  """And drafters what ends them; a ladder alone knows decoders."""
  beside = {f"specjax.{family}", "specjax.adaptive"}
  if family == "rules":
    beside.remove("specjax.adaptive")
  for file, imports in imports_under(f"specjax/{family}").items():
    if not file.endswith("adaptive/ladder.py"):
      inside = of_specjax(imports) - FOUNDATION
      assert {".".join(n.split(".")[:2]) for n in inside} <= beside, file


def test_foundation_imports_only_itself():
  every = imports_under("specjax")
  for name in sorted(FOUNDATION):
    file = name.replace(".", "/") + ".py"
    assert of_specjax(every[file]) <= FOUNDATION, file


def test_models_and_configs_import_only_allowed_modules():
  allowed = {f"specjax.{x}" for x in ("types", "cache", "recurrent", "structs")}
  for file, imports in imports_under("models").items():
    assert of_specjax(imports) <= allowed, file
    assert not tops(imports) & (CHECKOUT - {"models"}), file
  for file, imports in imports_under("configs").items():
    assert "launch" not in tops(imports), file


def test_no_module_imports_a_command():
  """Code that two commands share is in a module of its own."""
  every = imports_under("launch")
  commands = {
    file.removesuffix(".py").replace("/", ".")
    for file in every
    if "\n  cli.run(" in (ROOT / file).read_text(encoding="utf-8")
  }
  assert {"launch.decode", "launch.studies.rules.__main__"} <= commands
  for file, imports in every.items():
    assert not imports & commands, file


def test_listed_faults_match_one_source_location_and_name_tests():
  listed = (ROOT / "tests/faults/faults.toml").read_text(encoding="utf-8")
  for fault in tomllib.loads(listed)["fault"]:
    text = (ROOT / fault["file"]).read_text(encoding="utf-8")
    assert text.count(fault["before"]) == 1, fault["what"]
    assert all((ROOT / path).exists() for path in fault["tests"].split())
