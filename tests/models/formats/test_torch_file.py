"""Files that torch saved are read by torch, and run nothing."""

import pytest
import torch

from models.formats import torch_file


class Hostile:
  """Unpickled by the rules, it would make a file."""

  def __init__(self, path):
    self.path = str(path)

  def __reduce__(self):
    return (open, (self.path, "w"))


def test_malicious_pickle_is_rejected_without_running(tmp_path):
  path, made = tmp_path / "x.pt", tmp_path / "made"
  torch.save({"a": Hostile(made)}, path)
  with pytest.raises(ValueError, match=r"cannot read .*Weights only load fail"):
    torch_file.open_tensors(path)
  assert not made.exists()
