"""A real pair in slots: the tokens of `generate`, but for near-ties."""

import contextlib

import numpy as np
import pytest
import references
import served
import ties

from configs import embedded
from launch import prompts
from launch.assembly import pair
from launch.serving import server
from launch.serving.control import MOST_SCORED, Asked
from launch.training import corpus
from models import tokenizers
from specjax.runtime.requests import make_batches

MARGIN = 1e-3  # of two logits that may change places, see test_embedded.py
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def loaded():
  """The pair's config, its models and its slots."""
  config = embedded.get_config()
  config.update(max_new_tokens=NEW_TOKENS, drafter="model(tokens=3)")
  loaded = pair.load(config)
  slots = server.make_slots(config, loaded, num_slots=3, max_prompt=32)
  return config, loaded, slots


@contextlib.contextmanager
def serving(config, loaded, slots):
  scheduler = server.make_service(config, loaded, slots).scheduler
  scheduler.start()
  yield scheduler
  scheduler.close()
  assert scheduler.join(served.PATIENCE)


def test_scores_of_prompts_are_those_of_transformers(loaded):
  """Also where they are read in parts, while others decode."""
  config = loaded[0]
  model = references.read(config.target, dtype="float32")
  tokenizer = tokenizers.load(config.target)
  asked = prompts.first_tokens(
    corpus.held_out_prompts(4), tokenizer, num_tokens=32
  )
  new = lambda tokens, **more: served.Heard(
    Asked(token_ids=tuple(tokens), seed=0, temperature=0.0, **more)
  )
  with serving(*loaded) as scheduler:
    other = new((5,), max_new_tokens=NEW_TOKENS, ignore_stop=True)
    scores = [new(x.token_ids, max_new_tokens=0, scored=True) for x in asked]
    scheduler.submit([other.ticket])
    served.until(lambda: other.news)
    scheduler.submit([one.ticket for one in scores])
    actual = [one.wait().news[-1].scores for one in scores]
    assert not any(one.tokens for one in scores)
  for prompt, one in zip(asked, actual, strict=True):
    tokens = np.array(prompt.token_ids)
    logits = references.logits(model, tokens[None])[0, :-1].astype(np.float64)
    laws = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = laws[np.arange(len(laws)), tokens[1:]]
    np.testing.assert_allclose(one.log_probs, expected, atol=1e-4)
    best = np.sort(laws, axis=-1)[:, : -MOST_SCORED - 1 : -1]
    np.testing.assert_allclose(one.likeliest_log_probs, best, atol=1e-4)
    of_them = np.take_along_axis(laws, one.likeliest, axis=-1)
    np.testing.assert_allclose(of_them, best, atol=1e-4)


def test_greedy_completions_in_slots_are_those_of_generate(loaded):
  config, parts, _ = loaded
  models = pair.assemble(config, parts)
  asked = prompts.first_tokens(
    corpus.held_out_prompts(12), models.tokenizer, num_tokens=32
  )
  run = pair.engine_of(config, models)
  expected = {}
  for batch in make_batches(asked, batch_size=12, max_width=32):
    done, _ = run.run(batch)
    for prompt, completion in zip(batch.prompts, done, strict=True):
      expected[prompt.id] = completion.token_ids
  heard = [
    served.Heard(
      Asked(
        token_ids=tuple(one.token_ids), seed=0, max_new_tokens=NEW_TOKENS,
        temperature=0.0,
      )
    )
    for one in asked
  ]  # fmt: skip
  with serving(*loaded) as scheduler:
    scheduler.submit([h.ticket for h in heard])
    actual = [h.wait().tokens for h in heard]
  wanted = [expected[one.id] for one in asked]
  parted = ties.count(models, asked, actual, wanted, margin=MARGIN)
  assert parted <= 1
  assert np.mean([len(tokens) for tokens in actual]) > NEW_TOKENS / 2
