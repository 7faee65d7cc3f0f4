"""Assistants read the right slots from the right place, and say their law.

The toy has the target's very law if the slots, the position, the hidden state
and the token are all right, and another one otherwise: then not all is
accepted. What all heads owe the loop is in `test_head_forms`.
"""

import dataclasses

import exact_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_heads
import toys
from decoding import BUDGETS, LENGTHS, PROMPTS, TARGET, VOCAB, rows_of

import specjax
from specjax import exact, random
from specjax.adaptive import policies
from specjax.drafters import assistant
from specjax.tree import Form, Tree, bound, chain
from specjax.warp import make_sampling

pytestmark = pytest.mark.usefixtures("quick_to_compile")

PARAMS = specjax.Params(target=jnp.asarray(TARGET), draft=jnp.asarray(TARGET))
TOY = toy_heads.target(VOCAB)
READER = toys.cache_reader(VOCAB, num_features=toy_heads.LAYERS)
# The path that stands is 0, 1, 3, 5: not the first nodes.
TREE = Tree((-1, 0, 0, 1, 2, 3))


def of(reader, **more):
  return assistant.drafter(reader, tree=TREE, vocab_size=VOCAB, **more)


def start(decoder, temperature=1.0):
  return jax.jit(decoder.init, static_argnames="buffer_length")(
    PARAMS, PROMPTS, LENGTHS,
    random.row_keys(jax.random.key(0), jnp.arange(len(PROMPTS))),
    buffer_length=40, max_new_tokens=BUDGETS,
    sampling=make_sampling(len(PROMPTS), temperature=temperature),
  )  # fmt: skip


def accepted_for_sure(drafter, *, rounds=3) -> bool:
  """Whether the deepest path of every draft has probability one to stand.

  The row whose prompt is one token has no hidden state in its first round.
  """
  decoder = specjax.make_decoder(TOY, drafter=drafter, rule="recursive")
  state = start(decoder)
  step = jax.jit(decoder.step)
  for number in range(rounds):
    running = ~np.asarray(state.done)
    if not number:
      running[np.asarray(LENGTHS) == 1] = False
    state, info = step(PARAMS, state)
    topology = info.draft.topology()
    deepest = np.broadcast_to(topology.depth, info.node_probs.shape)
    deepest = deepest == drafter.tree.max_depth
    sure = (deepest * np.asarray(info.node_probs)).sum(1)
    if sure[running].min() < 1 - 1e-5:
      return False
  return True


def with_apply(change):
  """The reader, some of whose arguments are others."""

  def apply(params, tokens, hidden, cache, *, positions):
    hidden, cache, positions = change(hidden, cache, positions)
    return READER.apply(params, tokens, hidden, cache, positions=positions)

  return of(dataclasses.replace(READER, apply=apply))


def of_the_root():
  """What a round leaves is the hidden state of its first node."""
  inner = of(READER)

  def commit(params, state, commit):
    path = jnp.zeros_like(commit.path)
    return inner.commit(params, state, dataclasses.replace(commit, path=path))

  return dataclasses.replace(inner, commit=commit)


def test_all_that_a_reader_of_the_right_slots_drafts_is_accepted():
  assert accepted_for_sure(of(READER))


@pytest.mark.parametrize(
  "mutant",
  [
    lambda: with_apply(lambda h, c, p: (h, c.replace(length=c.length + 1), p)),
    lambda: with_apply(lambda h, c, p: (h, c, p - 1)),
    lambda: with_apply(lambda h, c, p: (jnp.roll(h, 1, axis=1), c, p)),
    of_the_root,
  ],
  ids=["a stale slot", "a stale position", "another parent", "the root's"],
)
def test_wrong_slots_positions_and_hidden_states_are_caught(mutant):
  assert not accepted_for_sure(mutant())


def test_greedy_text_is_that_of_plain_decoding():
  """The floor's draft is another than the target, and sometimes right."""
  decoder = specjax.make_decoder(
    TOY, drafter=toy_heads.make("assistant, drawn chain", VOCAB)
  )
  state = jax.jit(decoder.generate)(PARAMS, start(decoder, temperature=0.0))
  plain = specjax.make_decoder(TOY)
  expected = jax.jit(plain.generate)(PARAMS, start(plain, temperature=0.0))
  assert rows_of(state) == rows_of(expected)
  assert int(state.counters.num_accepted.sum()) > 0


# --------------------------------------------------------------------- its law

WORDS = 3
FEW = specjax.Params(
  target=jnp.asarray(toys.table(WORDS, seed=0)),
  draft=jnp.asarray(toys.near(toys.table(WORDS, seed=0), noise=1.0, seed=1)),
)
FLOORED = toys.cache_reader(WORDS, num_features=toy_heads.LAYERS, num_own=2)


def without_the_floor(drafter):
  """Drawn with it, and verified as if the chosen tokens were all."""

  def propose(params, state, cache, context):
    draft, state, cache = drafter.propose(params, state, cache, context)
    law = draft.log_probs
    least = jax.lax.top_k(law, 2)[0][..., -1:]
    law = jax.nn.log_softmax(jnp.where(law < least, -jnp.inf, law), axis=-1)
    return dataclasses.replace(draft, log_probs=law), state, cache

  return dataclasses.replace(drafter, propose=propose)


def law_error(drafter, rule) -> float:
  wide = lambda x: np.asarray(x, np.float64)
  with jax.enable_x64(True):
    return exact_cases.round_error(
      drafter, rule, model=toy_heads.target(WORDS), target=wide(FEW.target),
      draft=wide(FEW.draft), rounds=1, temperature=0.7,
    )  # fmt: skip


def test_a_law_without_the_floor_is_caught():
  sound = assistant.drafter(FLOORED, tree=chain(2), vocab_size=WORDS)
  broken = without_the_floor(sound)
  assert law_error(sound, "block") < 1e-10
  assert law_error(broken, "block") > 1e-3
  with pytest.raises(ValueError, match=r"from another law than"):
    exact.check_drafter(broken, FEW, toy_heads.target(WORDS), vocab_size=WORDS)


def test_chains_that_a_policy_ends_have_their_laws():
  drafter = assistant.drafter(
    FLOORED, tree=chain(2), vocab_size=WORDS,
    depth=policies.confidence(threshold=0.5),
  )  # fmt: skip
  assert drafter.tree.form is Form.MASKED
  found = exact.check_drafter(
    drafter, FEW, toy_heads.target(WORDS), vocab_size=WORDS
  )
  assert found.method == "exact"


def test_features_that_the_target_does_not_give_are_refused():
  decoder = specjax.make_decoder(
    toys.table_model(VOCAB), drafter=of(READER), rule="recursive"
  )
  with pytest.raises(ValueError, match=r"reads 3 features.*gives none"):
    start(decoder)


def test_a_dynamic_tree_is_bounded_by_its_sizes():
  found = assistant.dynamic(
    READER, num_nodes=9, depth=4, top_k=3, vocab_size=VOCAB
  )
  assert found.tree == bound(9, 4, 3)
  assert found.passes == (1, 3, 3, 3)
  with pytest.raises(ValueError, match="of which num_nodes"):
    assistant.dynamic(READER, num_nodes=99, depth=4, top_k=3, vocab_size=VOCAB)
