"""Target passes as wide as the draft that is there, and no wider."""

import functools

import decoding
import forms
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from models.networks.description import llama_config
from models.networks.transformer import Transformer, as_language_model
from specjax import drafters
from specjax.adaptive import widths
from specjax.siblings import IID
from specjax.tree import chain
from specjax.types import Draft, Params

MODEL = forms.table_drafter(decoding.VOCAB, chain(3))
EARLY = forms.masked(MODEL, forms.ends_early)


@functools.cache
def decoder(*narrower, rule="token"):
  return specjax.make_decoder(
    decoding.MODEL, drafter=EARLY, rule=rule, widths=narrower
  )


def ended(*narrower, rows=slice(None), temperature=1.0):
  one = decoder(*narrower)
  state = decoding.start(one, rows=rows, temperature=temperature)
  return decoding.decode(one, state)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_narrow_passes_emit_the_same_tokens_as_full_passes(temperature):
  """Table lookups are exact, so tokens are the same, not only their law."""
  whole = ended(temperature=temperature)
  narrow = ended(1, 2, 3, temperature=temperature)
  assert decoding.rows_of(narrow) == decoding.rows_of(whole)
  same = vars(narrow.counters) | {"num_fed": whole.counters.num_fed}
  jax.tree.map(np.testing.assert_array_equal, same, vars(whole.counters))


def test_num_fed_counts_only_root_and_drafted_tokens():
  rows = slice(0, 1)
  whole, narrow = ended(rows=rows), ended(1, 2, 3, rows=rows)
  counters = narrow.counters
  calls = int(counters.num_target_calls[0])
  assert int(whole.counters.num_fed[0]) == 4 * calls
  # Alone, with a pass for each width: the root and what was drafted.
  assert int(counters.num_fed[0]) == calls + int(counters.num_drafted[0])


def test_done_rows_do_not_widen_passes():
  """Row 4 may emit one token, and drafts on until all are done."""
  both = np.array([0, 4])
  narrow, alone = ended(1, 2, 3, rows=both), ended(1, 2, 3, rows=both[:1])
  fed = lambda state: int(state.counters.num_fed[0])
  more = fed(narrow) - fed(alone)
  assert 0 <= more <= 3  # the one round that both took part in


def draft_of(present):
  tree = EARLY.tree
  present = np.asarray(present, bool)
  parents = np.where(present, np.array(tree.parents), -1)
  return Draft(
    tree=tree,
    siblings=IID,
    tokens=jnp.zeros(present.shape, jnp.int32),
    log_probs=None,
    parents=jnp.asarray(parents, jnp.int32),
  )


@pytest.mark.parametrize(
  ("present", "done", "index", "num_fed"),
  [
    ([[1, 0, 0, 0]], [False], 0, 1),
    ([[1, 1, 0, 0]], [False], 1, 3),
    ([[1, 1, 1, 0]], [False], 1, 3),
    ([[1, 1, 1, 1]], [False], 2, 4),
    ([[1, 0, 0, 0], [1, 1, 1, 1]], [False, False], 2, 4),
    ([[1, 0, 0, 0], [1, 1, 1, 1]], [False, True], 0, 1),
    ([[1, 1, 1, 1]], [True], 0, 1),
  ],
)
def test_narrowest_pass_covering_active_rows_is_chosen(
  present, done, index, num_fed
):
  actual = widths.choose(
    (1, 3), draft_of(present).topology(), jnp.asarray(done)
  )
  assert tuple(map(int, actual)) == (index, num_fed)


def test_invalid_widths_are_rejected():
  for wrong in ((0,), (4,), (2, 2), (3, 1)):
    with pytest.raises(ValueError, match=r"must increase within 1\.\.3 .* got"):
      decoder(*wrong)
  assert widths.within((3, 0, 1, 9, 3), EARLY.tree) == (1, 3)
  lanes = forms.with_lanes(decoding.VOCAB)
  for drafter, what in ((MODEL, "a fixed form"), (lanes, "lanes")):
    with pytest.raises(ValueError, match=f"got a tree with {what}"):
      specjax.make_decoder(decoding.MODEL, drafter=drafter, widths=(1,))
    assert widths.within((1, 2), drafter.tree) == ()


CONFIG = llama_config(
  vocab_size=32, embed_dim=16, num_layers=3, num_heads=4, num_kv_heads=2,
  head_dim=4, mlp_dim=24, max_positions=128,
)  # fmt: skip


def loop(*narrower):
  """Copies of a cache in a loop, its temporary bytes, and those of all keys."""
  model, params = as_language_model(Transformer(CONFIG, rngs=nnx.Rngs(0)))
  one = specjax.make_decoder(
    model, drafter=drafters.suffix(nodes=6, tokens=4), rule="match",
    widths=narrower,
  )  # fmt: skip
  state = jax.eval_shape(
    functools.partial(one.init, buffer_length=97, max_new_tokens=50),
    Params(target=params),
    np.zeros((3, 8), np.int32),
    np.full(3, 8, np.int32),
    jax.random.key(0),
  )
  made = (
    jax.jit(one.generate, donate_argnums=1)
    .lower(Params(target=params), state)
    .compile()
  )
  keys = state.target_cache.keys
  shape = f"f32[{','.join(map(str, keys[0].shape))}]"
  lines = made.as_text().splitlines()
  assert any(shape in line for line in lines)
  copies = sum(shape in line and " copy(" in line for line in lines)
  size = sum(x.size * 4 for x in jax.tree.leaves(keys))
  return copies, made.memory_analysis().temp_size_in_bytes, size


def test_narrow_widths_add_no_cache_copies_or_memory():
  copies, whole, _ = loop()
  narrow_copies, narrow, size = loop(1, 2, 4)
  assert copies == narrow_copies == 0
  assert narrow - whole < size / 2
