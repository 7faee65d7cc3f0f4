"""`mtp(tokens=3)`: a head that nobody has to name."""

import shutil

import decoding
import mtp_heads
import numpy as np
import pytest
import references

from configs import huggingface
from launch.assembly import pair as pair_lib
from models import tokenizers

TOKENIZER = "models/pretrained/target"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  """`name -> directory` of a target with a head and a tokenizer."""
  words = tokenizers.load(TOKENIZER).vocab_size
  made = {}

  def get(kind):
    if kind in made:
      return made[kind]
    path = made[kind] = tmp_path_factory.mktemp(kind)
    kind, _, depths = kind.partition("-x")
    family, settings, _ = references.MODELS[kind]
    settings = settings | dict(vocab_size=words)
    if depths:
      settings |= dict(num_mtp_layers=int(depths))
    references.make(family, settings).save_pretrained(path)
    if kind == "qwen3-5":
      mtp_heads.add(path, settings)
    else:
      theirs = mtp_heads.Theirs(
        references.read(path), num_depths=int(depths or 1)
      ).tensors()
      references.edit_tensors(path, lambda tensors: tensors.update(theirs))
    for name in ("tokenizer.json", "tokenizer_config.json"):
      shutil.copy(f"{TOKENIZER}/{name}", path)
    return path

  return get


def slow(*case):
  return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  ("kind", "drafter", "rule"),
  [
    ("deepseek", "mtp(tokens=3)", "token"),
    ("qwen3-5", "mtp(tokens=3)", "token"),
    slow("glm-moe", "mtp(tokens=2, tree=paths(2))", "recursive"),
    slow("deepseek-x3", "mtp(tokens=4)", "block"),
    slow("qwen3-5", "mtp(tokens=2, normed=False)", "token"),
    slow("glm-lite", "mtp(tree=k_ary(2, 1), siblings=top_k)", "match"),
    slow("qwen3-5", "mtp(tree=dynamic(6, top_k=2), tokens=3)", "match"),
  ],
)
def test_mtp_greedy_text_matches_plain_decoding_and_transformers(
  target, kind, drafter, rule
):
  """Greedily, what it says alone, and in transformers."""
  path = target(kind)
  config = huggingface.get_config(f"target={path}")
  config.drafter, config.rule = drafter, rule
  built = pair_lib.assemble(config, pair_lib.load(config))
  assert built.decoder.drafter.name == "mtp"
  prompts = np.random.default_rng(0).integers(
    0, built.decoder.vocab_size, (2, 6)
  )

  drafted, plain = (
    decoding.greedy(one, built.params, prompts, (6, 3), budget=9)
    for one in (built.decoder, built.baseline)
  )
  assert int(drafted.counters.num_drafted.sum()) > 0
  theirs = references.read(path)
  assert decoding.rows_of(drafted) == decoding.rows_of(plain)
  for row, length in enumerate((15, 12)):
    said = references.generated(theirs, prompts[row, : length - 9], count=9)
    np.testing.assert_array_equal(plain.tokens[row, :length], said)
