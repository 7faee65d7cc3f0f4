"""`check_drafter`: every drafter here passes, and liars do not."""

import dataclasses

import forms
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from specjax import drafters, exact, random
from specjax.exact import samples
from specjax.siblings import GREEDY, HUB, IID, SHARED_NOISE, TOP_K
from specjax.tree import Tree, chain, k_ary, paths
from specjax.types import pick_nodes

VOCAB = 3
TARGET = toys.table(VOCAB, seed=0)
MODEL = toys.table_model(VOCAB)
PARAMS = toys.pair(TARGET, noise=0.8, seed=1)
FAMILY = Tree((-1, 0, 0, 1))


def check(drafter, **options):
  return exact.check_drafter(
    drafter, PARAMS, MODEL, vocab_size=VOCAB, **options
  )


of_table = lambda *args: forms.table_drafter(VOCAB, *args)


@pytest.mark.parametrize(
  ("drafter", "method"),
  [
    (of_table(chain(2)), "exact"),
    pytest.param(
      of_table(FAMILY, GREEDY), "exact", marks=pytest.mark.slow),
    pytest.param(
      of_table(k_ary(2), HUB), "exact", marks=pytest.mark.slow),
    pytest.param(
      of_table(FAMILY, TOP_K), "exact", marks=pytest.mark.slow),
    (of_table(paths(1, 2), SHARED_NOISE), "sampled"),
    (
      drafters.layer_skip(MODEL, tree=chain(2), vocab_size=VOCAB),
      "exact",
    ),
    (
      drafters.quantized_self(MODEL, tree=chain(2), vocab_size=VOCAB),
      "exact",
    ),
    (
      drafters.ngram(tokens=2),
      "deterministic",
    ),
    (forms.masked(of_table(FAMILY), forms.varying_families), "exact"),
    pytest.param(
      forms.masked(of_table(chain(2)), forms.random_stop), "exact",
      marks=pytest.mark.slow),
    (forms.confidence_tree(VOCAB, nodes=4, depth=2), "deterministic"),
    (forms.mixed(VOCAB), "exact"),
    pytest.param(
      forms.with_lanes(VOCAB), "exact", marks=pytest.mark.slow),
  ],
  ids=[
    "model", "greedy", "hub", "top_k", "shared noise", "layer skip",
    "quantized self", "ngram", "varying families", "random stop",
    "dynamic tree", "mixed", "lanes",
  ],
)  # fmt: skip
def test_correct_drafters_pass(drafter, method):
  assert check(drafter).method == method


def changed(drafter, change):
  """A drafter whose draft is changed: `(draft, context) -> draft`."""

  def propose(params, state, cache, context):
    draft, state, cache = drafter.propose(params, state, cache, context)
    return change(draft, context), state, cache

  return dataclasses.replace(drafter, propose=propose)


def hotter(draft, context):
  law = jax.nn.log_softmax(draft.log_probs / 0.7, axis=-1)
  return dataclasses.replace(draft, log_probs=law.at[:, 0].set(-jnp.inf))


def other_token(draft, context):
  tokens = draft.tokens.at[:, 1].set((draft.tokens[:, 1] + 1) % VOCAB)
  return dataclasses.replace(draft, tokens=tokens)


def claims_to_be_certain(draft, context):
  point = draft.tokens[..., None] == jnp.arange(VOCAB)
  law = jnp.where(point, 0.0, -jnp.inf).astype(draft.log_probs.dtype)
  return dataclasses.replace(draft, log_probs=law)


def reads_beyond(draft, context):
  stale = context.tokens[jnp.arange(len(context.length)), context.length]
  law = jnp.where(
    (stale % 2 == 0)[:, None, None], draft.log_probs, hotter(draft, 0).log_probs
  )
  return dataclasses.replace(draft, log_probs=law)


def reads_its_neighbor(draft, context):
  near = jnp.roll(context.root[:, 0], 1)
  law = jnp.where(
    (near % 2 == 0)[:, None, None], draft.log_probs, hotter(draft, 0).log_probs
  )
  return dataclasses.replace(draft, log_probs=law)


def unnormalized(draft, context):
  return dataclasses.replace(draft, log_probs=draft.log_probs + 0.5)


def law_of_its_own_path(params, state, cache, context):
  """Two paths, drawn as they say, of which the second is ever less sure."""
  tokens, laws = [context.root[:, 0]] * 3, [params.draft[1]] * 2
  first = jax.nn.log_softmax(jnp.stack([params.draft[1]] * 2))
  first = jnp.broadcast_to(first, (len(context.length), 2, VOCAB))
  above = context.draw([1, 2], first)
  second = jax.nn.log_softmax(params.draft[above] * jnp.array([[[1], [0.3]]]))
  tokens = [context.root, above, context.draw([3, 4], second)]
  laws = jnp.concatenate([first[:, :1], first, second], axis=1)
  draft = specjax.Draft(
    tree=paths(2, 2), siblings=IID, tokens=jnp.concatenate(tokens, axis=1),
    log_probs=laws,
  )  # fmt: skip
  return draft, state, cache


def by_its_twins_token(draft, context):
  """Where the first path goes on, the second has decided."""
  goes_on = jnp.where(np.arange(5) == 3, draft.tokens[:, 2:3] == 0, True)
  return goes_on | (draft.tree.depth < 2)


@pytest.mark.parametrize(
  ("drafter", "words"),
  [
    (changed(of_table(chain(2)), hotter), "drawn from another law"),
    (changed(of_table(chain(2)), unnormalized), "sums to 1.65, not to 1"),
    (
      dataclasses.replace(
        of_table(paths(2, 2)), propose=law_of_its_own_path
      ),
      "below equal paths, are drawn from laws that differ",
    ),
    (
      forms.masked(of_table(paths(2, 2)), by_its_twins_token),
      "and 2, with equal paths, has children",
    ),
    (changed(of_table(chain(2)), other_token), "not the token that was drawn"),
    (changed(of_table(chain(2)), claims_to_be_certain), "deterministic token"),
    (changed(of_table(chain(2)), reads_beyond), "depends on stale data"),
    (changed(of_table(chain(2)), reads_its_neighbor), "depends on other rows"),
    (
      forms.masked(of_table(chain(2)), forms.dropped_for_its_value),
      "drawn with it or after it",
    ),
    (
      forms.masked(of_table(paths(1, 2)), forms.after_its_elder),
      "drawn with it or after it",
    ),
    (
      dataclasses.replace(of_table(chain(2)), row_axes=lambda state: 0),
      "[Ee]xpected",
    ),
  ],
  ids=[
    "law", "logits", "own path", "twin", "token", "certain", "stale tokens",
    "neighbor", "dropped", "elder", "axes",
  ],
)  # fmt: skip
def test_incorrect_drafters_are_caught(drafter, words):
  with pytest.raises(ValueError, match=words):
    check(drafter)


def test_private_draws_are_checked_by_sampling():
  """A drafter that draws with keys of its own, truly and not."""

  def own_draws(draft, context, bend):
    keys = random.role_keys(context.keys, range(2, 3))
    law = draft.log_probs[:, 1:2]
    token = random.categorical(keys, law * bend)[:, 0]
    return dataclasses.replace(
      draft,
      tokens=jnp.stack([draft.tokens[:, 0], token.astype(jnp.int32)], axis=1),
    )

  inner = of_table(chain(1))
  silent = lambda bend: changed(
    dataclasses.replace(
      inner,
      propose=lambda params, state, cache, context: inner.propose(
        params, state, cache,
        dataclasses.replace(context, draws=pick_nodes),
      ),
    ),
    lambda draft, context: own_draws(draft, context, bend),
  )  # fmt: skip
  actual = check(silent(1.0))
  assert actual.method == "sampled"
  assert actual.p_value > 1e-6
  with pytest.raises(ValueError, match="is not drawn from the law"):
    check(silent(0.6))


def drawn_with_its_keys(params, state, cache, context):
  """A token drawn as anybody would who needs a coin for node 1."""
  keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(context.keys)
  rows = len(context.length)
  law = jax.nn.log_softmax(params.draft[1])
  law = jnp.broadcast_to(law, (rows, 1, VOCAB))
  token = random.categorical(keys[:, None], law)
  draft = specjax.Draft(
    tree=chain(1), siblings=IID, log_probs=jnp.concatenate([law, law], axis=1),
    tokens=jnp.concatenate([context.root, token], axis=1),
  )  # fmt: skip
  return draft, state, cache


def test_drafter_keys_are_disjoint_from_verification_keys(monkeypatch):
  """The mutant gives a draft the keys that the loop verifies with."""
  drafter = dataclasses.replace(of_table(chain(1)), propose=drawn_with_its_keys)
  assert check(drafter).method == "sampled"
  monkeypatch.setattr(random, "drafter_keys", lambda keys: keys)
  with pytest.raises(ValueError, match="random numbers with its verification"):
    check(drafter)


def drawn_alike(keys_of, nodes):
  """A drafter of some nodes of one law, each with a key that it makes.

  Args:
    keys_of: `(context, node) -> key[B]`.
    nodes: the tree.
  """

  def propose(params, state, cache, context):
    count = nodes.num_drafted
    law = jax.nn.log_softmax(params.draft[1])
    law = jnp.broadcast_to(law, (len(context.length), count, VOCAB))
    keys = [keys_of(context, node) for node in range(1, count + 1)]
    tokens = random.categorical(jnp.stack(keys, axis=1), law)
    draft = specjax.Draft(
      tree=nodes, siblings=IID,
      tokens=jnp.concatenate([context.root, tokens], axis=1),
      log_probs=jnp.concatenate([law[:, :1], law], axis=1),
    )  # fmt: skip
    return draft, state, cache

  return dataclasses.replace(of_table(nodes), propose=propose)


@pytest.mark.parametrize(
  ("keys_of", "nodes", "words"),
  [
    (lambda c, n: c.keys, chain(2), "2 shares a random number with node 1"),
    (lambda c, n: c.keys, paths(2, 1), "2 shares a random number with node 1"),
    (
      lambda c, n: jax.vmap(jax.random.fold_in, (0, None))(c.row_keys, n),
      chain(1),
      "node 1 shares a random number with the round",
    ),
  ],
  ids=["chain", "siblings", "rounds"],
)
def test_reused_random_numbers_are_detected(keys_of, nodes, words):
  """Each token follows its law, and the text does not."""
  with pytest.raises(ValueError, match=words):
    check(drawn_alike(keys_of, nodes))


def test_per_position_keys_are_not_flagged_as_reused():
  """The purpose of `Context.row_keys`."""
  of_position = lambda c, n: jax.vmap(jax.random.fold_in)(
    c.row_keys, c.length + n
  )
  assert check(drawn_alike(of_position, chain(1))).method == "sampled"


def test_sampling_check_allows_rare_tokens_but_not_excess():
  laws = np.tile([1 - 3e-7, 2e-7, 1e-7], (4096, 1))
  everywhere = np.ones(4096, bool)
  tokens = np.zeros(4096, np.int32)
  tokens[5] = 1
  assert samples._test(laws, tokens, everywhere)[0] > 1e-4
  tokens[:8] = 2
  assert samples._test(laws, tokens, everywhere)[0] < 1e-12


def test_mislabeled_iid_siblings_are_rejected():
  """Rules read one law for all of them: a silent loss, were it not refused."""

  def two_laws(draft, context):
    laws = draft.log_probs.at[:, 2].set(jnp.roll(draft.log_probs[:, 2], 1, -1))
    return dataclasses.replace(draft, log_probs=laws)

  with pytest.raises(ValueError, match="from laws that differ"):
    check(changed(of_table(paths(1, 2)), two_laws))
  certain = changed(
    of_table(paths(1, 2)), lambda d, _: dataclasses.replace(d, log_probs=None)
  )
  with pytest.raises(ValueError, match="siblings must be 'given', got 'iid'"):
    check(certain)
