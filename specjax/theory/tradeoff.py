"""The bias-rejection trade-off of one position (Yin et al., 2024).

A drafted token x ~ p is accepted with probability b(x); after a rejection the
token is drawn from a law P. The output law is `A = b p + Z P`, with `Z = sum (1
- b) p` the probability of a rejection. The loss is its total variation from the
target, `TV(q, A)`. Arrays are `f64[V]`.
"""

import numpy as np


def rejection(draft: np.ndarray, accept: np.ndarray) -> float:
  """`Z`, the probability of a rejection.

  Args:
    draft: p.
    accept: b, in [0, 1].
  """
  draft, accept = _checked(draft, accept)
  return float(np.sum((1 - accept) * draft))


def best_loss(
  draft: np.ndarray, target: np.ndarray, accept: np.ndarray
) -> float:
  """The least loss over all laws P, `min_P TV(q, b p + Z P)` (Theorem 4).

  `sum |q - b p| / 2 - Z / 2`; without rejections it is `TV(p, q)`.

  Args:
    draft: p.
    target: q.
    accept: b.
  """
  draft, accept = _checked(draft, accept)
  target = np.asarray(target, np.float64)
  z = rejection(draft, accept)
  # Rounding may leave a negative loss.
  return float(max(np.abs(target - accept * draft).sum() - z, 0) / 2)


def loss(
  draft: np.ndarray,
  target: np.ndarray,
  accept: np.ndarray,
  residual: np.ndarray,
) -> float:
  """`TV(q, b p + Z P)` for any law P, `f64[V]`."""
  draft, accept = _checked(draft, accept)
  output = accept * draft + rejection(draft, accept) * np.asarray(residual)
  return float(np.abs(np.asarray(target) - output).sum() / 2)


def over_acceptance(
  draft: np.ndarray, target: np.ndarray, epsilon: float
) -> np.ndarray:
  """`b(x) = min(1, (q + epsilon) / p)`, of Decoding-OPT and Decoding-UNO.

  Raises:
    ValueError: if `epsilon` is negative.
  """
  if not epsilon >= 0:
    raise ValueError(f"epsilon must be >= 0, got {epsilon}")
  draft, target = np.asarray(draft, float), np.asarray(target, float)
  wanted = target + epsilon
  return np.where(wanted < draft, wanted / np.where(draft > 0, draft, 1), 1.0)


def decoding_opt(
  draft: np.ndarray, target: np.ndarray, epsilon: float
) -> tuple[float, float]:
  """Rejection and loss of Decoding-OPT, on the Pareto front.

  `Z = sum [p - q - epsilon]_+`, and the loss is `TV - Z`. The residual is that
  of ordinary speculative decoding.
  """
  accept = over_acceptance(draft, target, epsilon)
  return rejection(draft, accept), best_loss(draft, target, accept)


def decoding_uno(
  draft: np.ndarray, target: np.ndarray, epsilon: float
) -> tuple[float, float]:
  """Rejection and loss of Decoding-UNO, which draws from q after a rejection.

  Rejections are those of Decoding-OPT, and the loss is never less.
  """
  accept = over_acceptance(draft, target, epsilon)
  return rejection(draft, accept), loss(draft, target, accept, target)


def known_target(
  draft: np.ndarray, target: np.ndarray, law: np.ndarray
) -> tuple[float, float]:
  """Rejection and loss of lossless verification against another law.

  `TV(p, pi)` and `TV(pi, q)`, which add up to at least `TV(p, q)`, with
  equality exactly if pi is between p and q at every token: the front of Theorem
  5 as a triangle inequality.

  Args:
    draft: p.
    target: q.
    law: pi, the output law.
  """
  draft, target, law = (np.asarray(x, float) for x in (draft, target, law))
  distance = lambda one: float(np.abs(law - one).sum() / 2)
  return distance(draft), distance(target)


def _checked(draft, accept) -> tuple[np.ndarray, np.ndarray]:
  draft, accept = np.asarray(draft, float), np.asarray(accept, float)
  if not ((accept >= 0) & (accept <= 1)).all():
    raise ValueError("acceptance probabilities must be in [0, 1]")
  return draft, accept
