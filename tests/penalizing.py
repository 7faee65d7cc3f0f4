"""Penalties in plain Python: the oracle of decoding with them."""

import collections

import numpy as np
import toys

NEUTRAL = dict(
  presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
  logit_bias={}, min_tokens=0, stop_token_ids=[],
)  # fmt: skip


def logits_of(
  logits, prompt, emitted, ends, *, presence_penalty, frequency_penalty,
  repetition_penalty, logit_bias, min_tokens, stop_token_ids,
):  # fmt: skip
  """The definition, token by token."""
  penalized, counts = np.array(logits, np.float64), collections.Counter(emitted)
  for token in range(len(penalized)):
    x = penalized[token] + logit_bias.get(token, 0)
    if counts[token] or token in prompt:
      x = x / repetition_penalty if x > 0 else x * repetition_penalty
    x -= counts[token] * frequency_penalty
    x -= (counts[token] > 0) * presence_penalty
    if token in (*ends, *stop_token_ids) and len(emitted) < min_tokens:
      x = -np.inf
    penalized[token] = x
  return penalized


def decoded(table, prompt, settings, *, budget, ends):
  """Greedy decoding of a table model, one token at a time."""
  emitted, settings = [], NEUTRAL | settings
  while len(emitted) < budget:
    logits = toys.context_logits(table, [*prompt, *emitted])
    law = logits_of(logits, prompt, emitted, ends, **settings)
    emitted.append(int(np.argmax(law)))
    if emitted[-1] in (*ends, *settings["stop_token_ids"]):
      break
  return emitted
