"""A tiny pair on disk, and the command lines as functions."""

import files
import pytest
from absl.testing import flagsaver

from launch import main


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
  """Directories of a tiny target and draft; the draft pads its vocabulary."""
  root = tmp_path_factory.mktemp("pair")
  return (
    files.make_checkpoint(root / "target"),
    files.make_checkpoint(
      root / "draft", seed=1, embed_dim=16, vocab_size=4100
    ),
  )


@pytest.fixture
def cli(pair):
  """Runs a command in this process: `cli(command, *flags) -> exit code`."""
  target, draft = pair

  def run(command, *args, config=None):
    config = config or f"configs/huggingface.py:target={target},draft={draft}"
    with flagsaver.flagsaver():
      return main.execute(command, ["test", f"--config={config}", *args])

  return run
