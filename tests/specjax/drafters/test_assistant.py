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
from decoding import BUDGETS, LENGTHS, PROMPTS, TARGET, VOCAB

import specjax
from specjax import drafters, exact, random, rules, shapes
from specjax.adaptive import policies
from specjax.adaptive.ladder import make_ladder
from specjax.tree import Form, Tree, bound, chain
from specjax.warp import make_sampling

TOY = toy_heads.target(VOCAB)
READER = toys.cache_reader(VOCAB, num_features=toy_heads.LAYERS)
# The accepted path is 0, 1, 3, 5: not the first nodes.
TREE = Tree((-1, 0, 0, 1, 2, 3))
MUTANTS = ("a stale slot", "a stale position", "another parent", "the root's")


def params_of(mutant=None):
  """Those of the pair, and which mutant it is: all are one program."""
  wrong = jnp.array([mutant == name for name in MUTANTS], jnp.int32)
  table = jnp.asarray(TARGET)
  return specjax.Params(target=table, draft=(table, wrong))


def _apply(params, tokens, hidden, cache, *, positions):
  table, wrong = params
  cache = cache.replace(length=cache.length + wrong[0])
  hidden = jnp.where(wrong[2], jnp.roll(hidden, 1, axis=1), hidden)
  return READER.apply(
    table, tokens, hidden, cache, positions=positions - wrong[1]
  )


def _made():
  inner = drafters.assistant(
    dataclasses.replace(READER, apply=_apply), tree=TREE, vocab_size=VOCAB
  )

  def commit(params, state, commit):
    path = jnp.where(params.draft[1][3], 0, commit.path)
    return inner.commit(params, state, dataclasses.replace(commit, path=path))

  return dataclasses.replace(inner, commit=commit)


DECODER = specjax.make_decoder(TOY, drafter=_made(), rule="recursive")
jitted = {
  name: jax.jit(
    getattr(DECODER, name),
    static_argnames="buffer_length" if name == "init" else None,
  )
  for name in ("init", "step", "generate", "admit")
}


def start(rows=range(5)):
  rows = np.array(rows)
  return jitted["init"](
    params_of(), PROMPTS[rows], LENGTHS[rows],
    random.row_keys(jax.random.key(0), jnp.asarray(rows)),
    buffer_length=40, max_new_tokens=BUDGETS[rows],
    sampling=make_sampling(len(rows), temperature=0.8),
  )  # fmt: skip


def accepted_for_sure(params, *, rounds=3) -> bool:
  """True if the deepest node of every draft is accepted with probability one.

  The row whose prompt is one token has no hidden state in its first round.
  """
  state = start()
  for number in range(rounds):
    running = ~np.asarray(state.done)
    if not number:
      running[np.asarray(LENGTHS) == 1] = False
    state, info = jitted["step"](params, state)
    if info.node_probs[running, -1].min() < 1 - 1e-5:
      return False
  return True


def test_all_that_a_reader_of_the_right_slots_drafts_is_accepted():
  assert accepted_for_sure(params_of())


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_slots_positions_and_hidden_states_are_caught(mutant):
  assert not accepted_for_sure(params_of(mutant))


@pytest.mark.slow
def test_rounds_of_no_tokens_keep_what_it_needs():
  """A ladder's chains go on with each other's state."""
  ladder = make_ladder(
    TOY,
    lambda tree: drafters.assistant(READER, tree=tree, vocab_size=VOCAB),
    rule=rules.get("token"), vocab_size=VOCAB, lengths=(0, 2),
  )  # fmt: skip
  table = jnp.asarray(TARGET)
  params = specjax.Params(target=table, draft=table)
  state = jax.jit(ladder.longest.init, static_argnames="buffer_length")(
    params, PROMPTS[2:3], LENGTHS[2:3], jax.random.key(0), buffer_length=40,
    max_new_tokens=np.int32(30),
  )  # fmt: skip
  steps = {n: jax.jit(one.steps) for n, one in ladder.decoders.items()}
  for length in (2, 0, 0, 2):
    state = steps[length](params, state, 1)
  assert state.counters.num_drafted.tolist() == [4]
  assert state.counters.num_accepted.tolist() == [4]


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


def test_a_law_without_the_floor_is_caught():
  """With it rounds have the target's law (`test_head_forms`)."""
  broken = without_the_floor(
    drafters.assistant(FLOORED, tree=chain(1), vocab_size=WORDS)
  )
  wide = lambda x: np.asarray(x, np.float64)
  with jax.enable_x64(True):
    error = exact_cases.round_error(
      broken, "token", model=toy_heads.target(WORDS),
      target=wide(FEW.target), draft=wide(FEW.draft),
    )  # fmt: skip
  assert error > 1e-3


@pytest.mark.slow
def test_chains_that_a_policy_ends_have_their_laws():
  drafter = drafters.assistant(
    FLOORED, tree=chain(2), vocab_size=WORDS,
    policy=policies.confidence(threshold=0.5),
  )  # fmt: skip
  assert drafter.tree.form is Form.MASKED
  actual = exact.check_drafter(
    drafter, FEW, toy_heads.target(WORDS), vocab_size=WORDS
  )
  assert actual.method == "exact"


def test_a_dynamic_tree_is_bounded_by_its_sizes():
  actual = drafters.assistant(
    READER, tree=shapes.dynamic(9, top_k=3), tokens=4, vocab_size=VOCAB
  )
  assert actual.tree == bound(9, 4, 3)
  assert actual.passes == (1, 3, 3, 3)
  with pytest.raises(ValueError, match="of which num_nodes"):
    drafters.assistant(READER, tree=bound(99, 4, 3), vocab_size=VOCAB)
