"""Decoders of table-lookup toys, five ragged rows, and how to run them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from specjax import drafters, random
from specjax.tree import chain, paths
from specjax.warp import make_sampling

VOCAB = 11
TARGET = toys.table(VOCAB, seed=0)
DRAFT = toys.near(TARGET, noise=0.8, seed=1)
MODEL = toys.table_model(VOCAB)
PARAMS = specjax.Params(target=jnp.asarray(TARGET), draft=jnp.asarray(DRAFT))
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (5, 6)).astype(np.int32)
LENGTHS = np.array([1, 3, 6, 2, 5], np.int32)
BUDGETS = np.array([30, 21, 34, 5, 1], np.int32)


_OF = dict(vocab_size=VOCAB)
DRAFTERS = {
  "plain": drafters.plain(),
  "model": drafters.model(MODEL, tree=chain(3), **_OF),
  "model1": drafters.model(MODEL, tree=chain(1), **_OF),
  "paths": drafters.model(MODEL, tree=paths(3, 3), **_OF),
  "ngram": drafters.ngram(tokens=3),
  "layer_skip": drafters.layer_skip(MODEL, tree=chain(3), **_OF),
  "layer_skip_paths": drafters.layer_skip(MODEL, tree=paths(2, 2), **_OF),
}
# Each is a program: those named here are compiled in every run.
_ALWAYS = [
  ("token", "model"),
  ("match", "paths"),
  ("match", "ngram"),
  ("match", "layer_skip_paths"),
  ("token", "plain"),
]


def _pairs(always):
  return [
    pytest.param(
      rule, name, marks=() if (rule, name) in always else pytest.mark.slow
    )
    for rule in ("token", "match")
    for name, drafter in DRAFTERS.items()
    if rule != "token" or drafter.tree.is_chain
  ]


PAIRS = _pairs(_ALWAYS)
# For tests that compile one more program each.
FEWER_PAIRS, FEWEST_PAIRS = _pairs(_ALWAYS[:3]), _pairs(_ALWAYS[:2])
NO_STOP = (-1, -1)  # two: another number of them is another program


@functools.cache
def make(drafter="model", rule="token", **records):
  """One decoder per combination, so that its programs are compiled once."""
  return specjax.make_decoder(
    MODEL, drafter=DRAFTERS[drafter], rule=rule, **records
  )


@functools.cache
def jitted(decoder, name):
  function = getattr(decoder, name)
  static = "buffer_length" if name == "init" else None
  return jax.jit(function, static_argnames=static)


def start(
  decoder, *, rows=slice(None), key=0, prompts=PROMPTS, temperature=1.0,
  max_new_tokens=BUDGETS, stop_tokens=NO_STOP, params=PARAMS, inputs=None,
):  # fmt: skip
  ids = np.arange(len(PROMPTS))[rows]
  return jitted(decoder, "init")(
    params,
    jnp.asarray(prompts[rows]),
    jnp.asarray(LENGTHS[rows]),
    random.row_keys(jax.random.key(key), jnp.asarray(ids)),
    buffer_length=40,
    max_new_tokens=jnp.asarray(max_new_tokens[rows]),
    sampling=make_sampling(len(ids), temperature=temperature),
    stop_tokens=jnp.asarray(stop_tokens),
    inputs=None if inputs is None else inputs[rows],
  )


def admit(
  decoder, state, row, prompt, length, key, *, budget, temperature=1.0,
  params=PARAMS, **more,
):  # fmt: skip
  """The state with a row that begins anew."""
  return jitted(decoder, "admit")(
    params, state, jnp.int32(row), jnp.asarray(prompt), jnp.int32(length), key,
    max_new_tokens=jnp.int32(budget),
    sampling=make_sampling(1, temperature=temperature), **more,
  )  # fmt: skip


def extend(decoder, state, row, tokens, *, budget, params=PARAMS, **more):
  """The state with a row whose text goes on."""
  padded = np.full(8, -7, np.int32)  # padding may be anything
  padded[: len(tokens)] = tokens
  return jitted(decoder, "extend")(
    params, state, jnp.int32(row), jnp.asarray(padded), jnp.int32(len(tokens)),
    max_new_tokens=jnp.int32(budget), **more,
  )  # fmt: skip


def alone(decoder, text, keys, *, budget, temperature=1.0, params=PARAMS):
  """The last state of a text that is the prompt of a state of its own."""
  prompt = np.zeros((1, 30), np.int32)
  prompt[0, : len(text)] = text
  state = jitted(decoder, "init")(
    params, jnp.asarray(prompt), jnp.array([len(text)]), keys,
    buffer_length=40, max_new_tokens=jnp.array([budget]),
    sampling=make_sampling(1, temperature=temperature),
    stop_tokens=jnp.asarray(NO_STOP),
  )  # fmt: skip
  return decode(decoder, state, params)


def decode(decoder, state, params=PARAMS):
  return jitted(decoder, "generate")(params, state)


def rows_of(state):
  """The committed tokens of every row."""
  return [
    np.asarray(state.tokens[b, : state.length[b]]).tolist()
    for b in range(state.tokens.shape[0])
  ]


def greedy_reference(prompt, count):
  context = list(prompt)
  for _ in range(count):
    context.append(int(np.argmax(toys.context_logits(TARGET, context))))
  return context


def greedy(decoder, params, prompts, lengths, *, budget):
  """The last state of prompts without stop tokens, in one program."""

  @jax.jit
  def run(params):
    state = decoder.init(
      params, jnp.asarray(prompts), jnp.asarray(lengths), jax.random.key(0),
      buffer_length=prompts.shape[1] + budget, max_new_tokens=budget,
      sampling=make_sampling(len(lengths), temperature=0.0),
    )  # fmt: skip
    return decoder.generate(params, state)

  return run(params)
