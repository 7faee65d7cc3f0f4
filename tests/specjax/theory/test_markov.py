"""Chains as language models."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.theory import markov


def test_model_matches_chain_and_is_uniform_past_horizon():
  pair = markov.random_pair(3, vocab_size=3, horizon=3)
  model, params = markov.language_models(pair)
  text = jnp.array([[2, 0, 1, 2, 1]])  # any root, three tokens, one beyond
  output, _ = model.apply(params.target, text, model.init_cache(1, 8))
  np.testing.assert_allclose(
    jnp.exp(output.logits[0]),
    [
      pair.target_initial,
      pair.target[0, 0],
      pair.target[1, 1],
      np.full(3, 1 / 3),
      np.full(3, 1 / 3),
    ],
    rtol=1e-6,
  )


def test_cached_continuation_matches_full_pass():
  pair = markov.random_pair(4, vocab_size=4, horizon=3)
  model, params = markov.language_models(pair)
  apply = jax.jit(model.apply)
  text = jnp.array([[0, 3, 1], [1, 2, 2]])
  whole, _ = apply(params.draft, text, model.init_cache(2, 8))
  _, cache = apply(params.draft, text[:, :2], model.init_cache(2, 8))
  rest, cache = apply(params.draft, text[:, 2:], cache)
  np.testing.assert_array_equal(rest.logits[:, 0], whole.logits[:, 2])
  assert cache.length.tolist() == [3, 3]
