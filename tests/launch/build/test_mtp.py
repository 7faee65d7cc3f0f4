"""`mtp(tokens=3)`: a head that nobody has to name."""

import shutil

import jax
import jax.numpy as jnp
import mtp_heads
import numpy as np
import pytest
import references

from configs import huggingface
from launch.build import drafters
from launch.build import pair as pair_lib
from models import tokenizers
from specjax.warp import make_sampling

pytestmark = pytest.mark.usefixtures("quick_to_compile")

TOKENIZER = "models/pretrained/target"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  """A hybrid with a head and a tokenizer."""
  path = tmp_path_factory.mktemp("hybrid")
  words = tokenizers.load(TOKENIZER).vocab_size
  family, settings, _ = references.MODELS["qwen3-5"]
  settings = settings | dict(vocab_size=words)
  references.make(family, settings).save_pretrained(path)
  mtp_heads.add(path, settings)
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(f"{TOKENIZER}/{name}", path)
  return path


@pytest.mark.parametrize(
  ("drafter", "rule"),
  [
    ("mtp(tokens=3)", "token"),
    pytest.param("mtp(tree=dynamic(6, top_k=2), tokens=3)", "match",
                 marks=pytest.mark.heavy),
  ],
)  # fmt: skip
def test_a_target_drafts_with_its_own_head(target, drafter, rule):
  config = huggingface.get_config(f"target={target}")
  config.drafter, config.rule = drafter, rule
  found = pair_lib.assemble(config, pair_lib.load(config))
  assert found.decoder.drafter.name in ("mtp", "eagle2")
  prompts = np.random.default_rng(0).integers(
    0, found.decoder.vocab_size, (2, 6)
  )

  def run(decoder):
    @jax.jit
    def decoded(params):
      state = decoder.init(
        params, prompts, jnp.array([6, 3]), jax.random.key(0),
        buffer_length=20, max_new_tokens=9,
        sampling=make_sampling(2, temperature=0.0),
      )  # fmt: skip
      return decoder.generate(params, state)

    return decoded(found.params)

  drafted, plain = run(found.decoder), run(found.baseline)
  assert int(drafted.counters.num_drafted.sum()) > 0
  for row, length in enumerate((15, 12)):
    np.testing.assert_array_equal(
      drafted.tokens[row, :length], plain.tokens[row, :length]
    )


def test_no_checkpoint_is_asked_for(target):
  config = huggingface.get_config(f"target={target}")
  config.drafter = "mtp"
  assert drafters.of(config).checkpoint == ""
