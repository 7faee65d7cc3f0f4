"""The command without the packages that it needs."""

import subprocess
import sys

import several

# A finder that says of a package that it is not there.
_WITHOUT = """
import runpy, sys
class Nowhere:
  def find_spec(self, name, path=None, target=None):
    if name == {name!r}:
      raise ModuleNotFoundError("no such module", name=name)
sys.meta_path.insert(0, Nowhere())
sys.argv = ["launch.serve"]
runpy.run_module("launch.serve", run_name="__main__")
"""


def test_a_package_that_is_not_installed_is_named_in_one_line():
  done = subprocess.run(
    [sys.executable, "-c", _WITHOUT.format(name="starlette")],
    capture_output=True, text=True, check=False, timeout=several.PATIENCE,
  )  # fmt: skip
  assert done.returncode == 2
  assert done.stderr == (
    "error: starlette is not installed: pip install -e '.[serve]'\n"
  )
