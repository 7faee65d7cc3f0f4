"""The warp, against transformers' own processors, and at its edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from specjax.warp import make_sampling, warp

_SETTINGS = [
  (1.0, 0, 1.0, 0.0),
  (0.0, 0, 1.0, 0.0),
  (0.0, 3, 0.5, 0.2),
  (0.6, 0, 1.0, 0.0),
  (1.7, 4, 1.0, 0.0),
  (1.0, 0, 0.7, 0.0),
  (0.8, 5, 0.6, 0.0),
  (1.3, 0, 1.0, 0.3),
  (0.7, 6, 0.9, 0.1),
  (1.0, 100, 1e-6, 0.0),
]


@pytest.mark.gpu
def test_mixed_row_settings_match_transformers():
  rng = np.random.default_rng(0)
  logits = 2 * rng.standard_normal((len(_SETTINGS), 50)).astype(np.float32)
  t, k, p, m = zip(*_SETTINGS, strict=True)
  sampling = make_sampling(len(t), temperature=t, top_k=k, top_p=p, min_p=m)
  got = np.exp(warp(jnp.asarray(logits), sampling))
  for row, (temperature, top_k, top_p, min_p) in enumerate(_SETTINGS):
    if not temperature:
      expected = np.eye(50)[logits[row].argmax()]
    else:
      processors = [transformers.TemperatureLogitsWarper(temperature)]
      if top_k:
        processors.append(transformers.TopKLogitsWarper(top_k))
      if top_p < 1:
        processors.append(transformers.TopPLogitsWarper(top_p))
      if min_p:
        processors.append(transformers.MinPLogitsWarper(min_p))
      scores = torch.tensor(logits[row : row + 1])
      for processor in processors:
        scores = processor(torch.zeros((1, 1), dtype=torch.long), scores)
      expected = torch.softmax(scores[0], -1).numpy()
    np.testing.assert_allclose(got[row], expected, atol=2e-6)


def test_tied_tokens_are_kept_or_dropped_together():
  logits = jnp.log(jnp.array([[0.4, 0.2, 0.2, 0.2]]))
  law = np.exp(warp(logits, make_sampling(1, top_p=0.5)))[0]
  np.testing.assert_allclose(law, [0.4, 0.2, 0.2, 0.2], atol=1e-6)
  law = np.exp(warp(logits, make_sampling(1, top_k=2)))[0]
  np.testing.assert_allclose(law, [0.4, 0.2, 0.2, 0.2], atol=1e-6)


@pytest.mark.gpu
def test_greedy_takes_the_first_of_equal_logits():
  law = warp(jnp.array([[1.0, 3.0, 3.0]]), make_sampling(1, temperature=0.0))
  np.testing.assert_array_equal(np.exp(law), [[0, 1, 0]])


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [3, 4096])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logit_invalidates_only_its_row(temperature, vocab):
  # Large vocabularies matter: XLA:CPU's vectorized max passes over NaNs.
  sampling = make_sampling(2, temperature=temperature)
  logits = np.zeros((2, vocab), np.float32)
  logits[0, vocab // 2] = np.nan
  law = np.asarray(jax.jit(warp)(logits, sampling))
  assert np.isnan(law[0]).all()
  assert not np.isnan(law[1]).any()


@pytest.mark.parametrize("temperature", [1e-20, 1e-38, 1e-45])
def test_tiny_temperature_gives_a_point_mass(temperature):
  """And no logit that was divided to infinity."""
  logits = np.array([[-20.0, 3.0, 20.0, 19.99, -np.inf]], np.float32)
  law = np.exp(warp(logits, make_sampling(1, temperature=temperature)))
  np.testing.assert_array_equal(law, [[0, 0, 1, 0, 0]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_negative_infinity_logits_give_nan(temperature):
  """Greedy decoding too has nothing to emit there."""
  logits = np.full((2, 5), -np.inf, np.float32)
  logits[1, 3] = -1e30
  law = warp(logits, make_sampling(2, temperature=temperature))
  assert np.isnan(law[0]).all()
  np.testing.assert_array_equal(np.exp(law[1]), [0, 0, 0, 1, 0])


@pytest.mark.parametrize(
  "setting",
  [
    dict(temperature=-0.1),
    dict(temperature=float("nan")),
    dict(top_k=-1),
    dict(top_p=0.0),
    dict(top_p=1.1),
    dict(min_p=-0.1),
    dict(min_p=[0.1, 2.0]),
  ],
)
def test_out_of_range_settings_are_rejected(setting):
  (name,) = setting
  with pytest.raises(ValueError, match=f"{name} must be"):
    make_sampling(2, **setting)
