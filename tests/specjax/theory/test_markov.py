"""Chains as language models, and the drafter that is made for them."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, sampling
from specjax.theory import markov


def drafts_of(pair, num_tokens, num_drafts, rows):
  """What the drafter proposes before the first token, `[rows, ...]`."""
  model, params = markov.language_models(pair)
  drafter = markov.drafter(
    num_tokens=num_tokens, num_drafts=num_drafts, vocab_size=pair.vocab_size
  )
  decoder = decode.make_decoder(model, drafter=drafter, rule="batch")
  state = decoder.init(
    params, jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32),
    sampling.row_keys(jax.random.key(0), jnp.arange(rows)), buffer_length=8,
    max_new_tokens=num_tokens,
  )  # fmt: skip
  return decoder.step(params, state)[1].draft, params


def test_the_drafter_draws_the_chain_and_says_its_law():
  rows = 40_000
  pair = markov.random_pair(3, vocab_size=3, horizon=3)
  draft, params = drafts_of(pair, 3, 2, rows)
  # Nodes are numbered level by level: of path 1, then of path 2.
  tokens = np.asarray(draft.tokens)[:, 1:].reshape(rows, 3, 2)
  true = (
    pair.draft_initial[:, None, None]
    * pair.draft[0][:, :, None]
    * pair.draft[1][None]
  )
  both = []
  for path in range(2):
    law = np.zeros((3, 3, 3))
    np.add.at(law, tuple(tokens[:, :, path].T), 1 / rows)
    limit = np.sqrt(26 / rows) / 2 + np.sqrt(np.log(1e6) / (2 * rows))
    assert np.abs(law - true).sum() / 2 < limit
    both.append(tokens[:, 2, path] == 0)
  # The paths are independent.
  together = np.mean(both[0] & both[1]) - both[0].mean() * both[1].mean()
  assert abs(together) < 5 * 0.25 / np.sqrt(rows)
  said = np.asarray(draft.log_probs)
  table = np.asarray(params.draft)
  for node in (1, 2):
    np.testing.assert_array_equal(said[:, node], table[[0], 0].repeat(rows, 0))
  for node in range(3, 7):  # the law of each, after the one above it
    np.testing.assert_array_equal(
      said[:, node], table[(node - 1) // 2, draft.tokens[:, node - 2]]
    )


def test_tokens_without_mass_are_never_drafted():
  law = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
  pair = markov.repeated(law, np.full(5, 0.2), 4)
  draft, _ = drafts_of(pair, 4, 3, 2000)
  assert set(np.unique(draft.tokens[:, 1:])) == {1, 3}
