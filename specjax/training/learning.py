"""The loss for online learning, from verified rounds.

`loss` returns a function of a draft's parameters and of the ring that
`specjax.drafters.online` keeps, for any optimizer. The contexts are the emitted
text, which is the target's own (Liu et al., ICML 2024), and the distributions
are the target's at temperature 1, whatever the warp.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.drafters.families import online
from specjax.drafters.families.online import DraftFn, Ring
from specjax.training.losses import Objective


def loss(draft: DraftFn, objective: Objective) -> Callable[[Any, Ring], Array]:
  """The draft's mean loss over a ring's entries with a known distribution.

  If a ring keeps some tokens of a distribution and lumps the others, the
  objective is that of the lumped distributions. A divergence of those is at
  most the full one, and the draft learns nothing about the lumped tokens.

  Args:
    draft: the draft's distributions (`online.model_logits`,
      `online.head_logits`).
    objective: of `specjax.training.losses`.

  Returns:
    `(draft parameters, ring) -> f32[]`, 0 if nothing is known. A text's newest
    entry counts only once its next token is in the ring.
  """

  def of(params, ring: Ring) -> Array:
    ring = online.in_order(ring)
    student, valid = draft(params, ring)
    text = online.texts(ring)
    followed = jnp.pad(text[:, :-1] == text[:, 1:], ((0, 0), (0, 1)))
    labels = jnp.roll(ring.tokens, -1, axis=1)
    if ring.ids is not None:
      student = online.lumped(student, ring.ids)
      labels = _place(labels, ring.ids)
    # Tokens that the draft cannot produce get the floor.
    student = jnp.maximum(jax.nn.log_softmax(student), online.FLOOR)
    weights = ring.known & valid & followed
    return objective(
      student, ring.log_probs, labels, weights.astype(student.dtype)
    )

  return of


def _place(tokens: Array, ids: Array) -> Array:
  """`i32[B, R]`, each token's index among the kept ones, else K."""
  equal = ids == tokens[..., None]
  place = jnp.argmax(equal, axis=-1)
  return jnp.where(equal.any(axis=-1), place, np.int32(ids.shape[-1]))
