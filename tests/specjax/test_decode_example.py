"""The round that `Decoder.step` works through by hand, run."""

import jax
import jax.numpy as jnp
import numpy as np
import toys

import specjax
from specjax import cache as cache_lib
from specjax.siblings import IID
from specjax.state import Origin, StopReason
from specjax.tree import chain
from specjax.types import Draft, Drafter
from specjax.warp import make_sampling

VOCAB = 10
COUNTS_UP = -10.0 * (
  np.arange(VOCAB) != (np.arange(VOCAB)[:, None] + 1) % VOCAB
)


def counting_model():
  """After a token comes the next number, wherever it stands."""
  inner = toys.table_model(VOCAB)

  def apply(params, tokens, cache, **options):
    _, cache = inner.apply(jnp.zeros((97, VOCAB)), tokens, cache, **options)
    return specjax.ModelOutput(logits=params[tokens]), cache

  return specjax.LanguageModel(
    vocab_size=VOCAB, init_cache=inner.init_cache, apply=apply
  )


def fixed_drafter(drafted):
  tree = chain(drafted.shape[1])

  def propose(params, state, target_cache, context):
    tokens = jnp.concatenate([context.root, jnp.asarray(drafted)], axis=1)
    draft = Draft(tree=tree, siblings=IID, tokens=tokens, log_probs=None)
    return draft, state, target_cache

  return Drafter(name="fixed", tree=tree, siblings=IID, propose=propose)


def test_step_matches_its_docstring_example():
  drafted = np.array([[5, 6, 7], [9, 9, 9], [2, 3, 4]], np.int32)
  decoder = specjax.make_decoder(
    counting_model(), drafter=fixed_drafter(drafted)
  )
  params = specjax.Params(target=jnp.asarray(COUNTS_UP, jnp.float32))
  state = decoder.init(
    params, np.array([[3, 4, 0], [8, 0, 0], [0, 0, 1]]), [2, 1, 3],
    jax.random.key(0), buffer_length=12, max_new_tokens=jnp.array([9, 9, 2]),
    sampling=make_sampling(3, temperature=0.0),
  )  # fmt: skip
  state, info = jax.jit(decoder.step)(params, state)
  assert info.node_probs.tolist() == [[0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1]]
  assert info.node.tolist() == [3, 1, 3]
  emitted = [
    info.tokens[row, : info.num_emitted[row]].tolist() for row in range(3)
  ]
  assert emitted == [[5, 6, 7, 8], [9, 0], [2, 3]]
  a, bonus, residual = Origin.ACCEPTED, Origin.BONUS, Origin.RESIDUAL
  origins = [
    state.origins[row, first : state.length[row]].tolist()
    for row, first in enumerate([2, 1, 3])
  ]
  assert origins == [[a, a, a, bonus], [a, residual], [a, a]]
  assert state.length.tolist() == [6, 3, 5]
  running, ended = StopReason.RUNNING, StopReason.LENGTH
  assert state.stop_reason.tolist() == [running, running, ended]
  cache = state.target_cache
  kept = [
    np.asarray(cache.keys[0][row, 0, : cache.length[row], 0]).tolist()
    for row in range(3)
  ]
  assert kept == [[3, 4, 5, 6, 7], [8, 9], [0, 0, 1, 2]]
  assert isinstance(cache, cache_lib.Cache)
