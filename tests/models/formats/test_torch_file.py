"""Files that torch saved are read without torch, and run nothing."""

import contextlib
import pickle
import zipfile

import numpy as np
import pytest
import torch

from models.formats import torch_file


def read(path):
  with contextlib.ExitStack() as stack:
    return {
      name: (t.kind, np.asarray(t.read(())).astype(np.float64))
      for name, t in torch_file.open_tensors(path, stack).items()
    }


def test_tensors_are_those_that_torch_saved(tmp_path):
  base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
  saved = {
    "half": base.half(),
    "brain": (base / 7).bfloat16(),
    "part": base[2:],  # in the middle of a storage
    "double": base.double(),
    "ids": torch.tensor([3, -1]),
    "flags": torch.tensor([True, False]),
    "number": torch.tensor(2.5),
  }
  torch.save(saved, tmp_path / "x.pt")
  actual = read(tmp_path / "x.pt")
  assert {n: k for n, (k, _) in actual.items()} == {
    "half": "F16", "brain": "BF16", "part": "F32", "double": "F64",
    "ids": "I64", "flags": "BOOL", "number": "F32",
  }  # fmt: skip
  for name, tensor in saved.items():
    np.testing.assert_array_equal(actual[name][1], tensor.double().numpy())


class Hostile:
  """Unpickled by the rules, it would make a file."""

  def __init__(self, path):
    self.path = str(path)

  def __reduce__(self):
    return (open, (self.path, "w"))


def test_a_pickle_that_calls_anything_else_is_refused_and_calls_nothing(
  tmp_path,
):
  made = tmp_path / "made"
  with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
    archive.writestr("x/data.pkl", pickle.dumps({"a": Hostile(made)}))
  with pytest.raises(ValueError, match=r"it asks for \w*io\.open"):
    read(tmp_path / "x.pt")
  assert not made.exists()


@pytest.mark.parametrize(
  "saved, message",
  [
    ([torch.ones(2)], "no dictionary of tensors"),
    ({"a": 3}, "no dictionary of tensors"),
    ({"a": torch.ones(2, 3).T}, "strides .* is not whole"),
    ({"a": torch.ones(2, dtype=torch.complex64)}, "ComplexFloatStorage"),
    ({"a": torch.nn.Linear(1, 1)}, "it asks for torch.nn.modules.linear"),
  ],
)
def test_what_is_no_plain_tensor_is_refused_in_one_line(
  saved, message, tmp_path
):
  torch.save(saved, tmp_path / "x.pt")
  with pytest.raises(ValueError, match=message) as error:
    read(tmp_path / "x.pt")
  assert "\n" not in str(error.value)


def test_a_damaged_byte_is_one_line(tmp_path):
  torch.save({"a": torch.arange(100.0)}, tmp_path / "x.pt")
  whole = bytearray((tmp_path / "x.pt").read_bytes())
  at = whole.find(np.arange(100, dtype=np.float32).tobytes())
  whole[at + 5] ^= 1
  (tmp_path / "x.pt").write_bytes(whole)
  with pytest.raises(ValueError, match="the bytes of a are damaged"):
    read(tmp_path / "x.pt")


def test_what_is_compressed_is_refused(tmp_path):
  torch.save({"a": torch.zeros(100)}, tmp_path / "x.pt")
  with (
    zipfile.ZipFile(tmp_path / "x.pt") as source,
    zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as packed,
  ):
    for name in source.namelist():
      packed.writestr(name, source.read(name))
  with pytest.raises(ValueError, match="is compressed"):
    read(tmp_path / "y.pt")


def test_torn_files_are_refused_in_one_line(tmp_path):
  torch.save({"a": torch.arange(100.0)}, tmp_path / "x.pt")
  whole = (tmp_path / "x.pt").read_bytes()
  for cut in range(0, len(whole) - 1, 97):
    (tmp_path / "y.pt").write_bytes(whole[:cut])
    with pytest.raises(ValueError, match="cannot read") as error:
      read(tmp_path / "y.pt")
    assert "\n" not in str(error.value)
