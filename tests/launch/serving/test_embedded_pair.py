"""A real pair in slots: the tokens of `generate`, but for near-ties."""

import numpy as np
import pytest
import served
import ties

from configs import embedded
from launch import prompts
from launch.build import pair
from launch.serving import assembly, server
from launch.serving.assembly import Sizes
from launch.serving.control import Asked
from launch.training import corpus
from specjax.runtime import engine

pytestmark = pytest.mark.usefixtures("quick_to_compile")

MARGIN = 1e-3  # of two logits that may change places, see test_embedded.py
NEW_TOKENS = 24


def test_greedy_completions_in_slots_are_those_of_generate():
  config = embedded.get_config()
  config.update(max_new_tokens=NEW_TOKENS, num_speculative_tokens=3)
  loaded = pair.load(config)
  models = pair.assemble(config, loaded)
  asked = prompts.first_tokens(
    corpus.held_out_prompts(12), models.tokenizer, num_tokens=32
  )
  run = pair.engine_of(config, models)
  expected = {}
  for batch in engine.make_batches(asked, batch_size=12, max_width=32):
    done, _ = run.run(batch)
    for prompt, completion in zip(batch.prompts, done, strict=True):
      expected[prompt.id] = completion.token_ids
  sizes = Sizes(slots=3, max_prompt=32, rounds=4)
  slots = assembly.make_slots(config, loaded, sizes)
  service = server.make_service(config, loaded, slots, sizes)
  heard = [
    served.Heard(
      Asked(
        token_ids=tuple(one.token_ids), seed=0, max_new_tokens=NEW_TOKENS,
        temperature=0.0,
      )
    )
    for one in asked
  ]  # fmt: skip
  service.scheduler.submit([h.ticket for h in heard])
  service.scheduler.start()
  found = [h.wait().tokens for h in heard]
  service.scheduler.close()
  assert service.scheduler.join(served.PATIENCE)
  wanted = [expected[one.id] for one in asked]
  parted = ties.count(models, asked, found, wanted, margin=MARGIN)
  assert parted <= 1
  assert np.mean([len(tokens) for tokens in found]) > NEW_TOKENS / 2
