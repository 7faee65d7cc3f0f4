"""Features of the target, and inputs, reach a drafter at prefill and after.

The head of `tests/forms.py` has the target's own law if, and only if, it is
given the feature of the right token of the right layer: then the target accepts
all that it drafts.
"""

import dataclasses
import functools

import decoding
import forms
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import BUDGETS, LENGTHS, PROMPTS, TARGET, VOCAB, rows_of

import specjax
from specjax import random
from specjax.tree import Tree

pytestmark = pytest.mark.usefixtures("quick_to_compile")
PARAMS = specjax.Params(target=jnp.asarray(TARGET), draft=jnp.asarray(TARGET))
INPUTS = np.array([3, 50, 96, 0, 7], np.int32)
# The accepted path is 0, 1, 3: not the first nodes.
TREE = Tree((-1, 0, 0, 1, 2))


def make(drafter, with_inputs=False):
  model = toys.table_model(VOCAB, layers=3, with_inputs=with_inputs)
  return specjax.make_decoder(model, drafter=drafter, rule="recursive")


start = functools.partial(decoding.start, params=PARAMS)


def accepted_for_sure(decoder, state) -> bool:
  """True if every draft of four rounds is accepted with probability one."""
  step, deepest = jax.jit(decoder.step), decoder.drafter.tree.depth
  least = 1.0
  for _ in range(4):
    running = ~np.asarray(state.done)
    state, info = step(PARAMS, state)
    whole = info.node_probs[:, deepest == deepest.max()].sum(1)
    least = min(least, float(whole[running].min()))
  return least > 1 - 1e-5


@pytest.mark.parametrize(
  "layer", [1, *(pytest.param(x, marks=pytest.mark.heavy) for x in (0, 2))]
)
def test_all_that_a_head_with_the_right_feature_drafts_is_accepted(layer):
  decoder = make(forms.feature_head(VOCAB, layer=layer))
  assert accepted_for_sure(decoder, start(decoder))


def test_a_feature_of_the_node_that_stands_follows_the_path():
  decoder = make(forms.feature_head(VOCAB, tree=TREE))
  assert accepted_for_sure(decoder, start(decoder))


def shifted(commit):
  """The feature of the token before: an error by one."""
  path = jnp.roll(commit.path, 1, axis=1)
  return dataclasses.replace(commit, path=path)


def in_order(commit):
  """The nodes as they were fed, whatever is accepted."""
  index = jnp.arange(commit.path.shape[1], dtype=jnp.int32)
  path = jnp.broadcast_to(index, commit.path.shape)
  return dataclasses.replace(commit, path=path)


def other_layer(commit):
  features = jnp.roll(commit.target_output.features, 1, axis=-1)
  output = dataclasses.replace(commit.target_output, features=features)
  return dataclasses.replace(commit, target_output=output)


@pytest.mark.parametrize(
  ("where", "change"),
  [
    (("prefill",), shifted),
    (("commit",), shifted),
    (("commit",), in_order),
    (("prefill", "commit"), other_layer),
  ],
  ids=["shifted in prefill", "shifted", "not of the path", "another layer"],
)
def test_a_feature_that_is_off_by_one_is_caught(where, change):
  sound = forms.feature_head(VOCAB, tree=TREE)
  told = lambda params, state, commit: sound.commit(
    params, state, change(commit)
  )
  broken = make(dataclasses.replace(sound, **dict.fromkeys(where, told)))
  assert not accepted_for_sure(broken, start(broken))


def test_rows_decode_with_their_own_inputs():
  decoder = make(forms.feature_head(VOCAB), with_inputs=True)
  state = start(decoder, inputs=INPUTS, temperature=0.0)
  assert accepted_for_sure(decoder, state)
  for b, row in enumerate(rows_of(jax.jit(decoder.generate)(PARAMS, state))):
    text = PROMPTS[b, : LENGTHS[b]].tolist()
    for _ in range(BUDGETS[b]):
      logits = toys.context_logits(TARGET, text, added=INPUTS[b])
      text.append(int(np.argmax(logits)))
    assert row == text


def test_a_row_that_is_admitted_has_its_own_input():
  decoder = make(forms.feature_head(VOCAB), with_inputs=True)
  state = start(decoder, inputs=INPUTS)
  state = jax.jit(decoder.steps)(PARAMS, state, 100, num_idle=1)
  row = int(np.argmax(state.done))
  refilled = jax.jit(decoder.admit)(
    PARAMS, state, row, PROMPTS[2], LENGTHS[2],
    random.row_keys(jax.random.key(0), jnp.arange(5))[2],
    max_new_tokens=BUDGETS[2], inputs=jnp.array([INPUTS[2]]),
  )  # fmt: skip
  assert accepted_for_sure(decoder, refilled)
  generate = jax.jit(decoder.generate)
  alone = start(decoder, inputs=INPUTS, rows=slice(2, 3))
  actual = rows_of(generate(PARAMS, refilled))
  assert actual.pop(row) == rows_of(generate(PARAMS, alone))[0]
  undisturbed = rows_of(generate(PARAMS, state))
  assert actual == undisturbed[:row] + undisturbed[row + 1 :]


def test_inputs_that_nobody_reads_are_refused():
  decoder = make(forms.feature_head(VOCAB))
  with pytest.raises(ValueError, match="without an encoder was given some"):
    start(decoder, inputs=INPUTS)
  decoder = make(forms.feature_head(VOCAB), with_inputs=True)
  with pytest.raises(ValueError, match="with an encoder was given no inputs"):
    start(decoder)
