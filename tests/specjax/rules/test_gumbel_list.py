"""Shared noise: exact over the noise, invariant to the draft given it."""

import dataclasses

import instances
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from specjax import random, rules, tree
from specjax.siblings import IID, SHARED_NOISE

RULE = rules.get("gumbel_list")
VOCAB = 3


def bound(samples, cells, failure=1e-6):
  """TV(empirical, true) is below this but with probability `failure`."""
  return np.sqrt((cells - 1) / samples) / 2 + np.sqrt(
    np.log(1 / failure) / (2 * samples)
  )


def draw(p, q, *, count, samples, seed=0):
  """Drafted tokens and the text of one round on context-free laws.

  Args:
    p, q: `f32[G, V]`, `f32[G + 1, V]`, laws at each depth.
    count: K.
    samples: rows.
    seed: of the noise.

  Returns:
    Tokens `i32[S, K, G]`, depth `i32[S]`, next token `i32[S]`.
  """
  depth = len(p)
  shape = tree.paths(depth, count)
  noise = jax.random.gumbel(
    jax.random.key(seed), (samples, count, depth + 1, VOCAB)
  )
  tokens = random.race(noise[:, :, :depth], jnp.log(p))  # [S, K, G]
  nodes = tokens.transpose(0, 2, 1).reshape(samples, -1)
  laws = lambda table, last: jnp.broadcast_to(
    jnp.concatenate([table, last])[shape.depth],
    (samples, shape.num_nodes, VOCAB),
  )
  draft = instances.make_draft(
    shape,
    SHARED_NOISE,
    jnp.pad(nodes, ((0, 0), (1, 0))),
    laws(jnp.log(p), jnp.full((1, VOCAB), -jnp.inf)),
    noise,
  )
  target = laws(jnp.log(q[:-1]), jnp.log(q[-1:]))
  actual = RULE.verify(draft, draft.topology(), target)
  node = jnp.argmax(actual.node_probs, axis=1)
  law = actual.next_log_probs(node)
  return tokens, shape.depth[np.asarray(node)], jnp.argmax(law, axis=1), node


def laws(seed, length):
  return np.random.default_rng(seed).dirichlet(np.ones(VOCAB), length)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_output_distribution_matches_target(count):
  samples = 1_000_000
  p, q = laws(0, 2), laws(1, 3)
  tokens, depth, last, node = map(
    np.asarray, draw(p, q, count=count, samples=samples)
  )
  # The emitted text, completed from the target.
  path = np.where(depth > 0, (node - 1) % count, 0)
  text = tokens[np.arange(samples), path]  # [S, 2]
  rng = np.random.default_rng(2)
  fill = np.stack([rng.choice(VOCAB, samples, p=law) for law in q], 1)
  full = np.concatenate([text, last[:, None]], axis=1)
  place = np.arange(3)
  full = np.where(place < depth[:, None], full, fill)
  full[np.arange(samples), depth] = last
  counts = np.zeros((VOCAB,) * 3)
  np.add.at(counts, tuple(full.T), 1 / samples)
  true = np.einsum("a,b,c->abc", *q)
  assert np.abs(counts - true).sum() / 2 < bound(samples, VOCAB**3)
  # Drafted tokens follow the draft.
  for t in range(2):
    share = np.bincount(tokens[:, -1, t], minlength=VOCAB) / samples
    assert np.abs(share - p[t]).sum() / 2 < bound(samples, VOCAB)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_acceptance_meets_list_matching_bound(count):
  samples = 200_000
  for seed in range(3):
    p, q = laws(seed, 1)[0], laws(seed + 10, 2)
    _, depth, _, _ = draw(p[None], q, count=count, samples=samples)
    target = q[0]
    ratio = np.maximum(target[:, None] / target, p[:, None] / p)
    least = (
      count / (ratio + (count - 1) * target[:, None] / target).sum(0)
    ).sum()
    actual, spread = depth.mean(), np.sqrt(0.25 / samples)
    assert actual > least - 5 * spread
    if count == 1:  # attained
      assert actual == pytest.approx(least, abs=5 * spread)


def texts_of(rule, *, samples):
  """Rows of tokens from a decoder whose laws are the same everywhere."""
  vocab, new = 2, 6
  model = toys.table_model(vocab)
  same = lambda law: jnp.log(jnp.tile(jnp.asarray(law), (97, 1)))
  params = specjax.Params(target=same([0.3, 0.7]), draft=same([0.9, 0.1]))
  drafter = specjax.drafters.model(
    model, tree=tree.chain(3), siblings=SHARED_NOISE, vocab_size=vocab
  )
  decoder = specjax.make_decoder(model, drafter=drafter, rule=rule)
  state = decoder.init(
    params, jnp.ones((samples, 1), int), [1] * samples, jax.random.key(0),
    buffer_length=1 + new, max_new_tokens=new,
  )  # fmt: skip
  state = jax.jit(decoder.generate)(params, state)
  return np.asarray(state.tokens[:, 1 : 1 + new])


def test_reused_noise_biases_block_but_not_gumbel_list():
  """A token that was not accepted leaves its noise to the round after it.

  `gumbel_list` uses noise of a position once, whoever drafted there; a rule
  that draws a residual of its own sees tokens drafted from noise that it has
  judged before, and is biased over rounds though exact in each.
  """
  samples, new = 100_000, 6
  true = np.array([0.3, 0.7])
  for _ in range(new - 1):
    true = np.multiply.outer(true, [0.3, 0.7])

  def error(rule):
    counts = np.zeros((2,) * new)
    np.add.at(counts, tuple(texts_of(rule, samples=samples).T), 1 / samples)
    return np.abs(counts - true).sum() / 2

  limit = bound(samples, 2**new)
  assert error("gumbel_list") < limit
  block = rules.get("block")
  with pytest.raises(ValueError, match="does not verify drafts with noise"):
    texts_of("block", samples=1)
  assert error(dataclasses.replace(block, with_noise=True)) > limit


def test_separate_paths_with_shared_noise_are_required():
  with pytest.raises(ValueError, match="shared_noise"):
    RULE.check(tree.chain(2), IID)
  with pytest.raises(ValueError, match="separate paths"):
    RULE.check(tree.k_ary(2, 2), SHARED_NOISE)
