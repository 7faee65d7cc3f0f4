"""A real pair in slots: the tokens of `generate`, but for near-ties."""

import contextlib

import numpy as np
import pytest
import served
import ties

from configs import embedded
from launch import prompts
from launch.assembly import pair
from launch.serving import server
from launch.serving.control import Asked
from launch.training import corpus
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
