"""Toy drafters, one for each feature of a draft's form."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import toys

from specjax import drafters
from specjax import warp as warp_lib
from specjax.siblings import GIVEN, IID
from specjax.tree import Form, Tree, bound, chain
from specjax.types import Draft, Drafter


def table_drafter(vocab_size, tree, siblings=IID):
  """The shipped drafter, with a table for its model."""
  model = toys.table_model(vocab_size)
  return drafters.model(
    model, tree=tree, siblings=siblings, vocab_size=vocab_size
  )


def masked(inner: Drafter, present, form=Form.MASKED) -> Drafter:
  """A drafter with some nodes masked.

  Args:
    inner: of a fixed tree.
    present: `(draft, context) -> bool[B, N + 1]`.
    form: of the tree.
  """
  tree = dataclasses.replace(inner.tree, form=form)
  above = np.array(tree.parents, np.int32)

  def propose(params, state, cache, context):
    draft, state, cache = inner.propose(params, state, cache, context)
    parents = jnp.where(present(draft, context), above, -1)
    draft = dataclasses.replace(draft, tree=tree, parents=parents)
    return draft, state, cache

  return dataclasses.replace(inner, name="masked", tree=tree, propose=propose)


def sums_above(draft: Draft) -> jax.Array:
  """Of each node's parent: the sum of the tokens drafted above, itself too."""
  tree = draft.tree
  below_root = np.arange(tree.num_nodes) > 0
  total = jnp.sum(
    jnp.where(tree.ancestors & below_root, draft.tokens[:, None], 0), axis=-1
  )
  return total[:, np.maximum(tree.parents, 0)]


def ends_early(draft, context):
  """Depth ends by what was drafted above, before a token is drawn below."""
  del context
  return sums_above(draft) % 3 != 1


def varying_families(draft, context):
  """Only some families have more than their eldest: decided before it."""
  del context
  return (draft.tree.rank == 0) | (sums_above(draft) % 2 == 1)


def random_stop(draft, context):
  """Depth ends by a coin of the row's own, which no token decides."""
  coins = jax.vmap(lambda key: jax.random.fold_in(key, 1 << 21))(context.keys)
  depth = jax.vmap(
    lambda key: jax.random.randint(key, (), 0, draft.tree.max_depth + 1)
  )(coins)
  return draft.tree.depth <= depth[:, None]


def after_its_elder(draft, context):
  """The second sibling is there only if the first is token 0: too late."""
  del context
  tree = draft.tree
  eldest = np.array([tree.children[max(p, 0)][0] for p in tree.parents])
  return (tree.rank == 0) | (draft.tokens[:, eldest] == 0)


def dropped_for_its_value(draft, context):
  """A token that was drawn is dropped because of what it is."""
  del context
  return draft.tokens != 2


def reranked_by_its_tokens(draft, context):
  """The half of a sampled tree that its law thinks the likeliest."""
  del context
  tree = draft.tree
  each = jnp.take_along_axis(draft.log_probs, draft.tokens[..., None], axis=-1)[
    ..., 0
  ]
  path = jnp.sum(
    jnp.where(
      tree.ancestors & (np.arange(tree.num_nodes) > 0), each[:, None], 0
    ),
    axis=-1,
  )
  least = jnp.sort(path[:, 1:], axis=1)[:, tree.num_drafted // 2]
  return path >= least[:, None]


def not_there_but_named(inner: Drafter) -> Drafter:
  """The last node has no law, and a token all the same, in a fixed tree."""

  def propose(params, state, cache, context):
    draft, state, cache = inner.propose(params, state, cache, context)
    laws = draft.log_probs.at[:, -1].set(-jnp.inf)
    return dataclasses.replace(draft, log_probs=laws), state, cache

  return dataclasses.replace(inner, propose=propose)


def confidence_tree(vocab_size: int, *, nodes: int, depth: int) -> Drafter:
  """The likeliest continuations of a bigram table, as a tree of any shape.

  All tokens are certain, and where each hangs is data: the `nodes`
  continuations of the largest cumulative probability, found in a whole tree.
  """
  whole = [(-1, -1)]  # parent, token; by level
  level = [0]
  for _ in range(depth):
    below = []
    for parent in level:
      for token in range(vocab_size):
        whole.append((parent, token))
        below.append(len(whole) - 1)
    level = below
  above, token = np.array(whole).T
  full = Tree((-1, *above[1:].tolist()))
  tree = bound(nodes, depth, min(vocab_size, nodes))

  def propose(params, state, cache, context):
    rows = len(context.length)
    tokens = jnp.broadcast_to(token, (rows, len(token)))
    tokens = tokens.at[:, 0].set(context.root[:, 0])
    law = jax.nn.log_softmax(params.draft[:vocab_size])  # a bigram table
    each = law[tokens[:, np.maximum(above, 0)], tokens]
    below_root = full.ancestors & (np.arange(len(token)) > 0)
    score = jnp.sum(jnp.where(below_root, each[:, None], 0), axis=-1)
    # Parents first, among equals: a child's score is never above its parent's.
    best = jnp.sort(
      jnp.argsort(-score + 1e-6 * full.depth, axis=1)[:, : nodes + 1], axis=1
    )
    place = jnp.argmax(
      best[:, None] == jnp.asarray(above)[best][..., None], axis=-1
    )
    parents = place.astype(jnp.int32).at[:, 0].set(-1)
    drafted = jnp.take_along_axis(tokens, best, axis=1).astype(jnp.int32)
    draft = Draft(
      tree=tree, siblings=GIVEN, tokens=drafted, log_probs=None, parents=parents
    )
    return draft, state, cache

  return Drafter(name="confidence", tree=tree, siblings=GIVEN, propose=propose)


def mixed(vocab_size: int) -> Drafter:
  """A certain sibling before a drawn one, and a drawn child of the first."""
  tree = Tree((-1, 0, 0, 1))

  def propose(params, state, cache, context):
    law = jax.nn.log_softmax(params.draft[:vocab_size])  # a bigram table
    sure = (context.root[:, 0] + 1) % vocab_size
    point = jnp.where(
      sure[:, None] == jnp.arange(vocab_size), 0, -jnp.inf
    ).astype(law.dtype)
    second_law = law[context.root[:, 0]]
    second = context.draw([2], second_law[:, None])[:, 0]
    third_law = law[sure]
    third = context.draw([3], third_law[:, None])[:, 0]
    draft = Draft(
      tree=tree, siblings=GIVEN,
      tokens=jnp.stack([context.root[:, 0], sure, second, third], axis=1),
      log_probs=jnp.stack([point, point, second_law, third_law], axis=1),
    )  # fmt: skip
    return draft, state, cache

  return Drafter(name="mixed", tree=tree, siblings=GIVEN, propose=propose)


def with_lanes(vocab_size: int) -> Drafter:
  """A chain of one token; two lanes ask the target what would come after it.

  Lane 0 carries the guess (the newest token plus one), lane 1 the token after.
  What the target says after lane 0 is kept in the state, which nothing reads
  but the tests.
  """
  tree = Tree((-1, 0), lanes=(0, 2))

  def propose(params, state, cache, context):
    root = context.root[:, 0]
    after = lambda n: (root + n) % vocab_size
    law = jax.nn.log_softmax(params.draft[:vocab_size])[root]
    drafted = context.draw([1], law[:, None])[:, 0]
    nothing = jnp.full_like(law, -jnp.inf)
    draft = Draft(
      tree=tree, siblings=IID,
      tokens=jnp.stack([root, drafted, after(1), after(2)], axis=1),
      log_probs=jnp.stack([nothing, law], axis=1),
    )  # fmt: skip
    return draft, state, cache

  def commit(params, state, commit):
    del params, state
    return commit.target_output.logits[:, 2]

  return Drafter(
    name="lanes", tree=tree, siblings=IID, propose=propose, commit=commit,
    init=lambda params, batch, slots, inputs: jnp.zeros((batch, vocab_size)),
    row_axes=lambda state: 0,
  )  # fmt: skip


def shared_counts(vocab_size: int) -> Drafter:
  """Drafts the commonest successor, counted over all rows together."""
  tree = chain(1)

  def propose(params, state, cache, context):
    root = context.root[:, 0]
    guess = jnp.argmax(state["counts"][root], axis=-1).astype(jnp.int32)
    tokens = jnp.stack([root, guess], axis=1)
    draft = Draft(tree=tree, siblings=IID, tokens=tokens, log_probs=None)
    return draft, state, cache

  def commit(params, state, commit):
    del params
    index = jnp.arange(commit.path.shape[1])
    kept = (index < commit.count[:, None]) & (
      index >= commit.num_refed[:, None]
    )
    text = jnp.take_along_axis(commit.tokens, commit.path, axis=1)
    before = jnp.concatenate([state["last"][:, None], text[:, :-1]], axis=1)
    one = lambda t: t[..., None] == jnp.arange(vocab_size)  # nobody is -1
    pairs = one(before)[..., None] & one(text)[..., None, :]
    pairs &= kept[..., None, None]
    newest = jnp.maximum(commit.count - 1, 0)[:, None]
    newest = jnp.take_along_axis(text, newest, axis=1)[:, 0]
    return {
      "counts": state["counts"] + pairs.sum(axis=(0, 1), dtype=jnp.int32),
      "last": jnp.where(commit.count > 0, newest, state["last"]),
    }

  return Drafter(
    name="shared",
    tree=tree,
    siblings=IID,
    init=lambda params, batch, slots, inputs: {
      "counts": jnp.zeros((vocab_size, vocab_size), jnp.int32),
      "last": jnp.full((batch,), -1, jnp.int32),
    },
    prefill=commit,
    propose=propose,
    commit=commit,
    row_axes=lambda state: {"counts": None, "last": 0},
  )


def feature_head(vocab_size: int, *, layer: int = 1, tree=None) -> Drafter:
  """A head on the target's features (`toys.table_model(.., layers=..)`).

  It knows what the target had read before the newest token from one layer's
  feature of the token before it, and so draws from the very law that a draft
  with `params.draft` for its table has there. Every mistake by one, of a
  position, a node or a layer, is another row of that table.

  Args:
    vocab_size: V.
    layer: whose features it reads.
    tree: by default a path of two tokens.
  """
  tree = tree or chain(2)

  def propose(params, state, cache, context):
    contexts = params.draft.shape[0]
    tokens, laws = [context.root[:, 0]], [None]
    read = [state]  # the hash of what was read before each node
    for node in range(1, tree.num_nodes):
      above = tree.parents[node]
      place = context.length - 1 + int(tree.depth[above])
      seen = read[above] + (tokens[above] + 1) * toys.weight_at(place)
      seen = jnp.mod(seen, contexts)
      law = warp_lib.warp(params.draft[seen][:, None], context.sampling)[:, 0]
      laws.append(law)
      tokens.append(context.draw([node], law[:, None])[:, 0])
      read.append(seen)
    laws[0] = laws[1]  # not looked at
    draft = Draft(
      tree=tree, siblings=IID, tokens=jnp.stack(tokens, axis=1),
      log_probs=jnp.stack(laws, axis=1),
    )  # fmt: skip
    return draft, state, cache

  def commit(params, state, commit):
    del params
    newest = jnp.maximum(commit.count - 1, 0)[:, None]
    node = jnp.take_along_axis(commit.path, newest, axis=1)
    features = commit.target_output.features[..., layer] - layer * toys.SHIFT
    of_newest = jnp.take_along_axis(features, node, axis=1)[:, 0]
    return jnp.where(commit.count > 0, of_newest, state)

  def init(params, batch, slots, inputs):
    del params, slots
    # Before the first token the target has read its input, if anything.
    return jnp.zeros(batch, jnp.int32) if inputs is None else inputs

  return Drafter(
    name="features", tree=tree, siblings=IID, init=init, prefill=commit,
    propose=propose, commit=commit, row_axes=lambda state: 0,
  )  # fmt: skip
