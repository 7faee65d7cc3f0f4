"""Assistants read the right slots from the right place.

The toy has the target's very law if the slots, the position, the hidden state
and the token are all right, and another one otherwise: then not all is
accepted. What all heads owe the loop is in `test_head_forms`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_heads
import toys
from decoding import BUDGETS, LENGTHS, PROMPTS, TARGET, VOCAB

import specjax
from specjax import drafters, random, shapes
from specjax.tree import Tree, bound
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


def test_correct_cache_reads_make_every_draft_accepted():
  assert accepted_for_sure(params_of())


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_slots_positions_or_hidden_states_cause_rejections(mutant):
  assert not accepted_for_sure(params_of(mutant))


def test_dynamic_tree_sizes_set_bound_and_pass_widths():
  actual = drafters.assistant(
    READER, tree=shapes.dynamic(9, top_k=3), tokens=4, vocab_size=VOCAB
  )
  assert actual.tree == bound(9, 4, 3)
  assert actual.passes == (1, 3, 3, 3)
  with pytest.raises(ValueError, match="fewer than the"):
    drafters.assistant(READER, tree=bound(99, 4, 3), vocab_size=VOCAB)
