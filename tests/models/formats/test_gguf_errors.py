"""GGUF files that cannot be read: errors that say why, in one line."""

import re

import gguf as package
import ggufs
import numpy as np
import pytest
import references
from gguf import GGMLQuantizationType as Kind
from references import GATED, VOCAB

from models import checkpoints
from models.formats import gguf, gguf_file, weights


@pytest.fixture(scope="module")
def model():
  return references.make("llama", GATED | dict(num_key_value_heads=2))


@pytest.fixture
def llama(model, tmp_path):
  """Writes a model, with more arguments of `ggufs.write`."""

  def write(**options):
    return str(ggufs.write(tmp_path / "x.gguf", model, **options))

  return write


def message(path):
  """The one line in which a file is refused."""
  with pytest.raises(ValueError, match=r"x\.gguf") as caught:
    gguf.load(path)
  assert "\n" not in str(caught.value)
  return str(caught.value)


@pytest.mark.parametrize(
  ("metadata", "expected"),
  [
    (("add_string", "llama.rope.scaling.type", "yarn"), "must be 'none'"),
    (("add_uint32", "llama.expert_count", 8), "num_experts_per_tok must"),
    (("add_float32", "llama.logit_scale", 2.0), "logit_scale is not underst"),
    (("add_array", "llama.rope.scaling.factor", [1, 2]), "must be 1.0 or left"),
    (
      ("add_uint32", "llama.attention.key_length", 10),
      "dimension_count must be 10 or left out, got 8",
    ),
    (
      ("add_uint32", "llama.attention.value_length", 16),
      "value_length must be 8 or left out, got 16",
    ),
    (("add_uint16", "split.count", 2), "one of 2 files .* --merge"),
    (("add_uint32", "general.alignment", 33), "must be a power of two, got 33"),
  ],
)
def test_what_is_not_understood_is_refused(llama, metadata, expected):
  assert re.search(expected, message(llama(metadata=[metadata])))


@pytest.mark.parametrize("value", ["2", -1, 2.0])
def test_an_end_that_is_no_token_is_refused(llama, value):
  kind = {str: "string", int: "int32", float: "float32"}[type(value)]
  path = llama(metadata=[(f"add_{kind}", "tokenizer.ggml.eot_token_id", value)])
  with pytest.raises(ValueError, match=r"eot_token_id in .* must be a token"):
    checkpoints.eos_token_ids(path)


def test_a_rotation_of_another_size_is_refused(llama):
  def edit(tensors):
    tensors["rope_freqs.weight"] = np.ones(3, np.float32)

  assert "one entry per rotated pair (4), got 3" in message(llama(edit=edit))


def test_all_problems_with_tensors_are_told(llama):
  def edit(tensors):
    del tensors["blk.1.attn_q.weight"]
    tensors["blk.0.ffn_up.weight"] = np.zeros((3, 5), np.float32)
    tensors["blk.0.surprise.weight"] = np.zeros(7, np.float32)
    tensors["output_norm.weight"] = np.zeros(32, np.int32)

  with pytest.raises(weights.CheckpointError) as caught:
    gguf.load(llama(edit=edit))
  first, *problems = str(caught.value).split("\n  ")
  assert "those of the llama model in its metadata" in first
  assert problems == [
    "missing: layers.1.self_attn.q_proj.weight, of shape (32, 32)",
    "unexpected: blk.0.surprise.weight, of shape (7,)",
    "wrong shape: blk.0.ffn_up.weight, expected (48, 32), got (3, 5)",
    f"wrong type: output_norm.weight, expected one of {gguf.KINDS}, got I32",
  ]


def test_a_model_without_an_embedding_is_refused(llama):
  path = llama(edit=lambda tensors: tensors.pop("token_embd.weight"))
  assert "no tensor token_embd.weight" in message(path)


def test_a_vocabulary_of_another_size_is_refused(llama):
  def edit(tensors):
    tensors["token_embd.weight"] = np.zeros((98, 32), np.float32)

  said = message(llama(edit=edit))
  assert "llama.vocab_size must be 98 or left out, got 97" in said


@pytest.mark.parametrize(
  ("old", "new", "expected"),
  [
    (b"rms_epsilon", b"rms_epsilom", "rms_epsilon is missing"),
    (b"blk.1.attn_q.w", b"blk.0.attn_q.w", "'blk.0.attn_q.weight' is there tw"),
    (b"llama.a", b"llama.b", "the key 'llama.block_count' is there twice"),
    (b"general.arch", b"general.arck", "must be one of .*, got None"),
  ],
)
def test_names_that_are_not_there_or_twice_are_told(llama, old, new, expected):
  path = llama(metadata=[("add_uint32", "llama.alock_count", 2)])
  data = open(path, "rb").read()
  assert old in data
  open(path, "wb").write(data.replace(old, new))
  assert re.search(expected, message(path))


def test_layers_that_are_not_there_are_told(llama):
  def edit(tensors):
    for name in [name for name in tensors if name.startswith("blk.1.")]:
      del tensors[name]

  assert "is of 2 layers, and the tensors beside it are of 1" in message(
    llama(edit=edit)
  )


@pytest.mark.parametrize(
  ("place", "new", "expected"),
  [
    (0, b"GGML", "does not begin with the letters GGUF"),
    (4, b"\1\0\0\0", "its version is 1, expected one of"),
    (4, b"\4\0\0\0", "its version is 4, expected one of"),
    (8, b"\0\0\0\0\0\0\0\x80", "cut short or damaged|axes"),
    (16, b"\0\0\0\0\0\0\0\x80", "cut short or damaged|no type of number"),
    (0, None, "has 0 bytes"),
  ],
)
def test_files_of_another_kind_are_refused(llama, place, new, expected):
  path = llama()
  with open(path, "r+b") as file:
    file.seek(place)
    file.truncate(0) if new is None else file.write(new)
  with pytest.raises(ValueError, match=expected):
    gguf.load(path)
  message(path)


def test_big_endian_files_are_refused(llama):
  path = llama(endianess=package.GGUFEndian.BIG)
  assert "it is big-endian, which is not read" in message(path)


@pytest.mark.parametrize(
  ("arch", "kind", "expected"),
  [
    (
      "mamba",
      Kind.F32,
      "general.architecture in .* must be one of .*.*got 'mamba'",
    ),
    ("llama", Kind.IQ4_NL, "wrong type: token_embd.weight, .* got IQ4_NL"),
  ],
)
def test_models_and_types_that_are_not_read_are_named(
  llama, arch, kind, expected
):
  embedding = lambda name, shape: kind if "token_embd" in name else Kind.F32
  path = llama(kinds=embedding)
  if arch != "llama":
    data = open(path, "rb").read()
    old, new = (
      len(x).to_bytes(8, "little") + x.encode() for x in ("llama", arch)
    )
    open(path, "wb").write(data.replace(old, new, 1))
  with pytest.raises(ValueError, match=expected):
    gguf.load(path)


def test_rows_that_are_no_blocks_are_refused(llama):
  path = llama()
  data = bytearray(open(path, "rb").read())
  name = b"output_norm.weight"
  place = data.index(name) + len(name) + 4 + 8  # after one axis of 32
  data[place] = Kind.Q4_K
  open(path, "wb").write(data)
  assert "are no blocks of 256: (32,)" in message(path)
  data[place] = 77
  open(path, "wb").write(data)
  assert "is of type 77, which is unknown" in message(path)


def test_a_file_that_is_not_there_is_told(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"no file .*none\.gguf'"):
    checkpoints.load_module(str(tmp_path / "none.gguf"))


def test_a_file_cut_anywhere_is_refused(llama, tmp_path):
  data = open(llama(metadata=ggufs.names(VOCAB)), "rb").read()
  header = gguf_file.read_header(str(tmp_path / "x.gguf"))
  ends = [
    entry.start + entry.row_bytes * int(np.prod(entry.shape[:-1]))
    for entry in header.tensors.values()
  ]
  begin = min(entry.start for entry in header.tensors.values())
  places = {*range(0, begin, 13), *(end - 1 for end in ends), max(ends) - 1}
  torn = tmp_path / "torn.gguf"
  for place in sorted(places):
    torn.write_bytes(data[:place])
    with pytest.raises(ValueError, match=r"torn\.gguf as GGUF: ") as caught:
      gguf_file.read_header(str(torn))
    assert "\n" not in str(caught.value)
