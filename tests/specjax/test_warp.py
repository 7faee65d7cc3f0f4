"""The warp, against NumPy and against transformers' own processors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from specjax.warp import make_sampling, warp


def _reference(logits, temperature, top_k, top_p, min_p):
  """Plain NumPy, one row, written from the definition."""
  if temperature == 0:
    law = np.zeros_like(logits)
    law[np.argmax(logits)] = 1
    return law
  x = logits / temperature
  if top_k:
    x = np.where(x < np.sort(x)[-min(top_k, len(x))], -np.inf, x)
  law = np.exp(x - x.max())
  law /= law.sum()
  more_probable = np.array([law[law > p].sum() for p in law])
  if top_p < 1:
    law = np.where((more_probable < top_p) | (law == law.max()), law, 0)
  law = np.where(law < min_p * law.max(), 0, law)
  return law / law.sum()


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
@pytest.mark.parametrize("seed", range(5))
def test_rows_with_different_settings_equal_the_definition(seed):
  rng = np.random.default_rng(seed)
  logits = 2 * rng.standard_normal((len(_SETTINGS), 11)).astype(np.float32)
  t, k, p, m = zip(*_SETTINGS, strict=True)
  sampling = make_sampling(len(t), temperature=t, top_k=k, top_p=p, min_p=m)
  got = np.exp(warp(jnp.asarray(logits), sampling))
  for row, setting in enumerate(_SETTINGS):
    np.testing.assert_allclose(
      got[row], _reference(logits[row], *setting), atol=2e-6
    )


@pytest.mark.parametrize("setting", [s for s in _SETTINGS if s[0] > 0])
def test_order_and_result_equal_transformers(setting):
  temperature, top_k, top_p, min_p = setting
  logits = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
  processors = [transformers.TemperatureLogitsWarper(temperature)]
  if top_k:
    processors.append(transformers.TopKLogitsWarper(top_k))
  if top_p < 1:
    processors.append(transformers.TopPLogitsWarper(top_p))
  if min_p:
    processors.append(transformers.MinPLogitsWarper(min_p))
  scores = torch.tensor(logits)
  for processor in processors:
    scores = processor(torch.zeros((3, 1), dtype=torch.long), scores)
  expected = torch.softmax(scores, -1).numpy()
  sampling = make_sampling(
    3, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
  )
  got = np.exp(warp(jnp.asarray(logits), sampling))
  np.testing.assert_allclose(got, expected, atol=2e-6)


def test_tied_tokens_are_kept_or_dropped_together():
  logits = jnp.log(jnp.array([[0.4, 0.2, 0.2, 0.2]]))
  law = np.exp(warp(logits, make_sampling(1, top_p=0.5)))[0]
  np.testing.assert_allclose(law, [0.4, 0.2, 0.2, 0.2], atol=1e-6)
  law = np.exp(warp(logits, make_sampling(1, top_k=2)))[0]
  np.testing.assert_allclose(law, [0.4, 0.2, 0.2, 0.2], atol=1e-6)


def test_permuting_the_vocabulary_permutes_the_law():
  rng = np.random.default_rng(3)
  logits = rng.standard_normal((1, 20)).astype(np.float32)
  order = rng.permutation(20)
  sampling = make_sampling(1, temperature=0.7, top_k=9, top_p=0.8, min_p=0.02)
  law = np.asarray(warp(jnp.asarray(logits), sampling))
  permuted = np.asarray(warp(jnp.asarray(logits[:, order]), sampling))
  np.testing.assert_allclose(permuted, law[:, order], atol=1e-6)


@pytest.mark.gpu
def test_greedy_takes_the_first_of_equal_logits():
  law = warp(jnp.array([[1.0, 3.0, 3.0]]), make_sampling(1, temperature=0.0))
  np.testing.assert_array_equal(np.exp(law), [[0, 1, 0]])


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [3, 4096])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_nan_logit_makes_its_law_nan_and_no_other(temperature, vocab):
  # Large vocabularies matter: XLA:CPU's vectorized max passes over NaNs.
  sampling = make_sampling(2, temperature=temperature)
  logits = np.zeros((2, vocab), np.float32)
  logits[0, vocab // 2] = np.nan
  law = np.asarray(jax.jit(warp)(logits, sampling))
  assert np.isnan(law[0]).all()
  assert not np.isnan(law[1]).any()


@pytest.mark.gpu
def test_low_precision_logits_are_cast_to_float32():
  law = warp(jnp.ones((1, 4), jnp.bfloat16), make_sampling(1))
  assert law.dtype == jnp.float32


def test_inner_axes_share_their_rows_settings():
  logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 5)))
  sampling = make_sampling(2, temperature=[0.5, 1.5], top_p=[0.9, 1.0])
  whole = warp(logits, sampling)
  for position in range(3):
    np.testing.assert_allclose(
      whole[:, position], warp(logits[:, position], sampling), rtol=1e-6
    )


def test_settings_are_traced():
  traces = []

  @jax.jit
  def law(logits, sampling):
    traces.append(1)
    return warp(logits, sampling)

  logits = jnp.zeros((1, 5))
  for temperature, top_k, top_p in [(0.0, 0, 1.0), (1.0, 2, 0.3), (2.0, 3, 1)]:
    law(
      logits,
      make_sampling(1, temperature=temperature, top_k=top_k, top_p=top_p),
    )
  assert len(traces) == 1


@pytest.mark.parametrize("temperature", [1e-20, 1e-38, 1e-45])
def test_a_temperature_next_to_zero_is_a_point_mass(temperature):
  """And no logit that was divided to infinity."""
  logits = np.array([[-20.0, 3.0, 20.0, 19.99, -np.inf]], np.float32)
  law = np.exp(warp(logits, make_sampling(1, temperature=temperature)))
  np.testing.assert_array_equal(law, [[0, 0, 1, 0, 0]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_allow_no_token_are_no_law(temperature):
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
def test_settings_out_of_range_are_refused(setting):
  (name,) = setting
  with pytest.raises(ValueError, match=f"{name} must be"):
    make_sampling(2, **setting)
