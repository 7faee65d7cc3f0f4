"""Files that torch saved are read by torch, and run nothing."""

import sys

import numpy as np
import pytest
import torch

from models.formats import torch_file


class Hostile:
  """Unpickled by the rules, it would make a file."""

  def __init__(self, path):
    self.path = str(path)

  def __reduce__(self):
    return (open, (self.path, "w"))


def read(path):
  tensors = torch_file.open_tensors(path)
  return {name: (t.kind, t.read(())) for name, t in tensors.items()}


def test_tensors_are_those_that_torch_saved(tmp_path):
  x = torch.arange(24.0).reshape(4, 6)
  saved = {"F16": x.half(), "BF16": (x / 7).bfloat16(), "F32": x[2:].T,
           "I64": torch.tensor([3, -1]), "BOOL": x > 3}  # fmt: skip
  torch.save(saved, tmp_path / "x.pt")
  for name, (kind, values) in read(tmp_path / "x.pt").items():
    assert kind == ("F32" if name == "BF16" else name)
    expected = saved.pop(name).double().numpy()
    np.testing.assert_array_equal(values.astype(np.float64), expected)
  assert not saved


def test_a_file_that_would_run_code_is_refused_and_runs_none(tmp_path):
  path, made = tmp_path / "x.pt", tmp_path / "made"
  torch.save({"a": Hostile(made)}, path)
  with pytest.raises(
    ValueError, match=r"torch cannot read .*Weights only load fail"
  ):
    read(path)
  assert not made.exists()


def test_without_torch_its_name_is_said(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "torch", None)
  with pytest.raises(ValueError, match="pip install torch"):
    read(tmp_path / "x.pt")
