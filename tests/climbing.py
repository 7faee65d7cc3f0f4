"""A toy ladder: chains of several lengths on one state."""

import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
from decoding import MODEL, PARAMS, VOCAB

import specjax
from specjax import drafters, rules
from specjax.adaptive import policies
from specjax.adaptive.ladder import make_ladder

LENGTHS = (0, 1, 4)


def fixed(tree):
  """A drafter that reads what it lacks of a text."""
  return drafters.model(
    MODEL, tree=tree, vocab_size=VOCAB, policy=policies.fixed(tree.max_depth)
  )  # fmt: skip


def ladder(**settings):
  """The ladder, which has seen nothing yet."""
  made = make_ladder(
    MODEL, fixed, rule=rules.get("token"), vocab_size=VOCAB, lengths=LENGTHS
  )
  for name, value in settings.items():
    setattr(made, name, value)
  return made


DECODERS = ladder().decoders


def start(
  temperature=0.0, *, decoder=DECODERS[4], params=PARAMS, prompts=(0, 1)
):
  """A state of two rows, one with a longer answer."""
  prompts = np.array(prompts)
  return jax.jit(decoder.init, static_argnames="buffer_length")(
    params, jnp.asarray(decoding.PROMPTS[prompts]),
    jnp.asarray(decoding.LENGTHS[prompts]), jax.random.key(2), buffer_length=70,
    max_new_tokens=jnp.array([60, 50]),
    sampling=specjax.make_sampling(2, temperature=temperature),
  )  # fmt: skip


@functools.cache
def program(length):
  """The compiled rounds of a length."""
  return jax.jit(DECODERS[length].steps)
