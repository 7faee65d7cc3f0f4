"""Shares of the heavy tests, of which a run takes one.

`pytest` runs all of them; `pytest --heavy=commit`, which is in `make test`, one
of `COUNT` shares, after the commit that is checked out. A test is always in the
same share, whatever else is added.
"""

import subprocess
import zlib

import pytest

COUNT = 16


def add_option(parser) -> None:
  parser.addoption(
    "--heavy",
    default="all",
    metavar="all|commit|N",
    help=f"heavy tests: all, or share N of 0..{COUNT - 1}, or the commit's",
  )


def configure(config, folder) -> None:
  """Settles which share; workers are told by their controller."""
  asked = config.getoption("heavy")
  if asked == "commit":
    config.option.heavy = asked = str(of_commit(folder))
  if asked != "all" and asked not in map(str, range(COUNT)):
    raise pytest.UsageError(
      f"--heavy must be all, commit or one of 0..{COUNT - 1}, got {asked!r}"
    )
  config.pluginmanager.register(_Plugin(config), "heavy share")


def of_commit(folder) -> int:
  """The commit's share; 0 where there is none."""
  try:
    done = subprocess.run(
      ["git", "rev-parse", "HEAD"],
      cwd=folder, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return int(done.stdout, 16) % COUNT
  except (OSError, subprocess.SubprocessError, ValueError):
    return 0


def of_test(item) -> int:
  """A heavy test's share; `@pytest.mark.heavy("name")` joins several tests."""
  name = next(iter(item.get_closest_marker("heavy").args), item.nodeid)
  return zlib.crc32(name.encode()) % COUNT


class _Plugin:
  def __init__(self, config):
    self.asked = config.getoption("heavy")

  def pytest_report_header(self):
    if self.asked == "all":
      return "heavy tests: all"
    return (
      f"heavy tests: share {self.asked} of 0..{COUNT - 1} (--heavy="
      f"{self.asked} again; all: make test-heavy)"
    )

  def pytest_collection_modifyitems(self, config, items):
    if self.asked == "all":
      return
    left = [
      item
      for item in items
      if item.get_closest_marker("heavy") and of_test(item) != int(self.asked)
    ]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in set(left)]
