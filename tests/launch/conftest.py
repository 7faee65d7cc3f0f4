"""A tiny pair on disk, and the command lines as functions."""

import files
import numpy as np
import pytest
from commands import execute


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


@pytest.fixture(scope="session")
def target(pair):
  return pair[0]


@pytest.fixture(scope="session")
def cli(pair):
  """Runs a command in this process: `cli(command, *flags) -> exit code`."""
  target, draft = pair

  def run(command, *args, config=None):
    config = config or f"configs/huggingface.py:target={target},draft={draft}"
    return execute(command, f"--config={config}", *args)

  return run


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
  """A folder of text to train on."""
  folder = tmp_path_factory.mktemp("texts")
  rng = np.random.default_rng(0)
  for split, count in (("train", 40), ("validation", 8)):
    (folder / split).mkdir()
    for i in range(count):
      body = "".join(
        f"x{k} = {k} + {rng.integers(9)}\n" for k in range(rng.integers(5, 30))
      )
      (folder / split / f"{i}.txt").write_text(f"# file {i}\n{body}")
  return folder
