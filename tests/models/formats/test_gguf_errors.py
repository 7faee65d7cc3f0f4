"""GGUF files that cannot be read: errors that say why, in one line."""

import ggufs
import pytest
import references
from references import GATED

from models.formats import gguf


@pytest.fixture(scope="module")
def model():
  return references.make("llama", GATED | dict(num_key_value_heads=2))


@pytest.fixture
def llama(model, tmp_path):
  """Writes a model, with more arguments of `ggufs.write`."""

  def write(**options):
    return str(ggufs.write(tmp_path / "x.gguf", model, **options))

  return write


@pytest.mark.parametrize(
  ("metadata", "expected"),
  [
    (("add_string", "llama.rope.scaling.type", "yarn"), "must be 'none'"),
    (("add_float32", "llama.logit_scale", 2.0), "logit_scale is not unders"),
    (
      ("add_array", "llama.rope.scaling.factor", [1, 2]),
      "must be 1.0 or left out",
    ),
    (
      ("add_uint32", "llama.attention.value_length", 16),
      "must be 8 or left out",
    ),
    (("add_uint16", "split.count", 2), "one of several files .* --merge"),
  ],
)
def test_what_is_not_understood_is_refused(llama, metadata, expected):
  with pytest.raises(ValueError, match=expected):
    gguf.load(llama(metadata=[metadata]))


def test_a_file_that_is_cut_is_named(llama, tmp_path):
  data = open(llama(), "rb").read()
  (tmp_path / "torn.gguf").write_bytes(data[:400])
  with pytest.raises(ValueError, match=r"torn\.gguf as GGUF: .*\Z"):
    gguf.load(str(tmp_path / "torn.gguf"))
