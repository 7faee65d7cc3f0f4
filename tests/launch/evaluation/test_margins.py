"""Places where greedy completions part, and the margins there."""

import jax
import numpy as np

from configs import common
from launch.assembly import pair as assembly
from launch.evaluation import margins, systems


def test_a_margin_is_the_gap_between_the_two_tokens_after_what_is_alike():
  asked = []

  def next_logits(tokens):
    asked.append(tokens)
    return np.array([0.0, 1.0, 4.5, 3.0])

  actual = margins.difference((7, 8), [1, 3, 0], [1, 2], next_logits)
  assert actual == {
    "place": 1, "token": 3, "reference_token": 2, "margin": 1.5,
  }  # fmt: skip
  assert asked == [(7, 8, 1)]
  assert margins.difference((7,), [1, 2], [1, 2], next_logits) is None
  for one, other, place in (([1], [1, 2], 1), ([1, 2], [1], 1), ([], [1], 0)):
    ended = margins.difference((7,), one, other, next_logits)
    assert (ended["place"], ended["margin"]) == (place, None)
  assert len(asked) == 1
  nobody = margins.difference((7,), [1], [2], None)
  assert nobody["margin"] is None


def test_the_targets_logits_do_not_depend_on_the_padding(pair):
  config = common.get_config()
  config.update(dict(target=pair[0], max_new_tokens=8, drafter="plain"))
  pairs = systems.assemble(systems.parse("plain", config))
  engine = assembly.engine_of(config, pairs["plain"], baseline=True)
  tokens = tuple(range(5, 5 + 66))
  target = engine.decoder.target
  cache = target.init_cache(1, len(tokens))
  output, _ = jax.jit(target.apply)(
    engine.params.target, np.array([tokens]), cache
  )
  next_logits = margins.next_logits_of(engine)
  for length in (3, 66):
    np.testing.assert_allclose(
      next_logits(tokens[:length]), output.logits[0, length - 1], atol=1e-4
    )
