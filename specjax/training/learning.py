"""Loss of a draft that learns online, from verified rounds.

`loss` makes a function of a draft's parameters and of the ring that
`specjax.drafters.online` keeps; its gradient is for any optimizer. The contexts
are the text that was emitted, so the target's own (Liu et al., ICML 2024), and
the distributions are the target's at temperature 1, whatever the warp is.
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
  """The loss of a draft over all entries of a ring whose distribution is known.

  Where a ring keeps some tokens of a distribution and lumps the others, the
  objective is that of the lumped distributions: a divergence of those is at
  most that of the whole ones, and nothing tells the draft how to share out the
  rest.

  Args:
    draft: the draft's distributions (`online.model_logits`,
      `online.head_logits`).
    objective: of `specjax.training.losses`.

  Returns:
    `(draft parameters, ring) -> f32[]`, 0 where nothing is known. The newest
    entry of a text, whose next token is not read yet, waits for it.
  """

  def of(params, ring: Ring) -> Array:
    ring = online.in_order(ring)
    student, said = draft(params, ring)
    text = online.texts(ring)
    followed = jnp.pad(text[:, :-1] == text[:, 1:], ((0, 0), (0, 1)))
    labels = jnp.roll(ring.tokens, -1, axis=1)
    if ring.ids is not None:
      student = online.lumped(student, ring.ids)
      labels = _place(labels, ring.ids)
    # Tokens that the draft cannot say differ by as much as there is.
    student = jnp.maximum(jax.nn.log_softmax(student), online.FLOOR)
    weights = ring.known & said & followed
    return objective(
      student, ring.log_probs, labels, weights.astype(student.dtype)
    )

  return of


def _place(tokens: Array, ids: Array) -> Array:
  """`i32[B, R]`, which of the kept tokens each is, K if it is none."""
  equal = ids == tokens[..., None]
  place = jnp.argmax(equal, axis=-1)
  return jnp.where(equal.any(axis=-1), place, np.int32(ids.shape[-1]))
