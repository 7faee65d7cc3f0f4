"""`assistant("DIR")`: a draft on its target's own cache, from files."""

import shutil

import assistants
import decoding
import numpy as np
import pytest

from configs import huggingface
from launch.assembly import pair as pair_lib
from models import tokenizers

TOKENIZER = "models/pretrained/target"
LENGTHS = (9, 4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Target and assistant with a tokenizer, whose clusters are of 16 tokens."""
  path = tmp_path_factory.mktemp("pair")
  words = tokenizers.load(TOKENIZER).vocab_size
  words += -words % 16
  target = assistants.TARGET | dict(
    vocab_size=words, vocab_size_per_layer_input=words, num_hidden_layers=2,
    layer_types=assistants.TARGET["layer_types"][:2], num_kv_shared_layers=0,
    hidden_size_per_layer_input=0, use_double_wide_mlp=False,
  )  # fmt: skip
  assistants.save(
    path, target,
    **assistants.ORDERED | dict(num_centroids=words // 16),
  )  # fmt: skip
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(f"{TOKENIZER}/{name}", path / "target")
  return path


@pytest.mark.parametrize(
  ("drafter", "rule"),
  [
    ('assistant("DIR", tree=(-1, 0, 0, 1))', "recursive"),
    pytest.param('assistant("DIR", tokens=3)', "token",
                 marks=pytest.mark.slow),
    pytest.param('assistant("DIR", tree=dynamic(6, top_k=2), tokens=3)',
                 "match", marks=pytest.mark.slow),
    pytest.param('repeats(assistant("DIR", tokens=1), tokens=3)', "token",
                 marks=pytest.mark.slow),
  ],
)  # fmt: skip
def test_greedy_text_matches_plain_decoding(saved, drafter, rule):
  config = huggingface.get_config(f"target={saved / 'target'}")
  config.drafter = drafter.replace("DIR", str(saved / "assistant"))
  config.rule = rule
  built = pair_lib.assemble(config, pair_lib.load(config))
  assert "assistant" in built.decoder.drafter.name
  prompts = np.random.default_rng(0).integers(
    0, built.decoder.vocab_size, (2, LENGTHS[0])
  )

  drafted, plain = (
    decoding.greedy(one, built.params, prompts, LENGTHS, budget=9)
    for one in (built.decoder, built.baseline)
  )
  assert int(drafted.counters.num_drafted.sum()) > 0
  assert decoding.rows_of(drafted) == decoding.rows_of(plain)
