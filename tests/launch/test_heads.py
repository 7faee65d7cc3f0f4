"""Heads from the command line."""

import re

import heads_on_disk
import jax
import jax.numpy as jnp
import pytest

from configs import huggingface
from launch import prompts
from launch.assembly import pair
from specjax.runtime.requests import make_batches


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  path = tmp_path_factory.mktemp("heads")
  heads_on_disk.write_all(path)
  return path


def settings(saved, head, drafter, **changes):
  config = huggingface.get_config(
    f"target={saved / 'target'},draft={saved / head}"
  )
  config.update({"max_new_tokens": 12, "drafter": drafter, **changes})
  return config


TREE = "tree=(-1, 0, 0, 1, 2, 3)"
RUNS = {
  "a chain": ("eagle3(tokens=3)", "token"),
  "a dynamic tree": ("eagle3(tokens=3, tree=dynamic(8, top_k=3))", "match"),
  "a certain tree": (f"medusa({TREE}, siblings=given)", "match"),
  "a drawn tree": ("medusa(tokens=3, tree=paths(2))", "kseq"),
  "typical acceptance": (f"medusa({TREE}, siblings=top_k)", "typical"),
  "a block": ("dflash(tokens=3)", "block"),
  "the best tree of a block": (
    "dflash(tokens=3, tree=dynamic(8, top_k=3))", "match"
  ),
  "a text that is read on": (
    "repeats(eagle3(tokens=2), tokens=3, min_match=1, max_ngram=3)", "token"
  ),
  "a ladder of chains": ("ladder(eagle3, lengths=(0, 1, 3))", "token"),
  "a ladder of marginals": ("ladder(medusa, lengths=(0, 1, 3))", "token"),
}  # fmt: skip


def head_of(drafter):
  """The folder of the head that a call drafts with."""
  return re.findall("eagle3|medusa|dflash", drafter)[0]


@pytest.mark.parametrize(
  "name",
  [n if n in ("a ladder of chains", "a certain tree",
              "the best tree of a block")
   else pytest.param(n, marks=pytest.mark.slow) for n in RUNS],
)  # fmt: skip
def test_greedy_text_matches_plain_decoding(saved, name):
  drafter, rule = RUNS[name]
  config = settings(saved, head_of(drafter), drafter, rule=rule)
  built = pair.build(config)
  items = prompts.built_in(built.tokenizer, max_tokens=60)[:2]
  (batch,) = make_batches(items, batch_size=2, max_width=60)
  texts = []
  for plain in (True, False):
    decodes = pair.engine_of(config, built, baseline=plain)
    if decodes.ladder is not None:  # whatever the clock says, all are tried
      decodes.ladder.interval, decodes.ladder.patience = 2, 1
    done, _ = decodes.run(batch)
    texts.append([c.token_ids for c in done])
  assert texts[0] == texts[1]
  assert sum(c.num_drafted for c in done) > 0


def test_max_length_is_bounded_by_the_heads_positions(saved):
  """The target knows 256 positions, its heads that have any 200."""

  def begin(built, length):
    prompts = jnp.zeros((1, 4), jnp.int32)
    return jax.eval_shape(
      lambda: built.decoder.init(
        built.params, prompts, jnp.array([4]), jax.random.key(0),
        buffer_length=length, max_new_tokens=8,
      )
    )  # fmt: skip

  for head, most in (("eagle3", 200), ("dflash", 200), ("medusa", 256)):
    config = settings(saved, head, f"{head}(tokens=3)", max_length=250)
    built = pair.build(config)
    assert built.max_length == min(most, 250)
    assert begin(built, most).tokens.shape[1] >= most
    with pytest.raises(ValueError, match=rf"model has {most} positions"):
      begin(built, most + 1)
