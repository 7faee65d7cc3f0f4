"""Gemma 4's assistant beside transformers', on every step of a chain.

Transformers is given keys and values of the tokens before the newest alone, row
by row. Its `generate` gives an assistant more after a rejection, keys of tokens
that were rejected, and takes one floor for all rows of a batch.
"""

import dataclasses

import assistants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references

from models import checkpoints
from models.networks import gemma_assistant
from models.networks.transformer import SkippedLayers

STEPS, SLOTS = 3, 20
TOKENS = np.random.default_rng(0).integers(0, 96, (3, 14))
# Windows of target and assistant are shorter, but for the last.
LENGTHS = np.array([14, 9, 3], np.int32)


@pytest.fixture(autouse=True, scope="module")
def _x64():
  with jax.enable_x64(True):
    yield


@dataclasses.dataclass(frozen=True)
class Case:
  """Assistants of one target, and what transformers' have drafted.

  Attributes:
    head: ours.
    cache: of the target, with all of `TOKENS`.
    hidden: `f[B, F]`, of the last token before each row's newest.
    drafted: of each row what each step reads and says.
  """

  head: checkpoints.Head
  cache: object
  hidden: jax.Array
  drafted: list

  def run(self, module=None):
    """The function of a pass, compiled once for any slots and positions."""
    module = module or self.head.module
    model, params = gemma_assistant.as_cache_reader(module)
    apply = jax.jit(
      lambda params, tokens, hidden, cache, positions: model.apply(
        params, tokens, hidden, cache, positions=positions
      )
    )
    return lambda *arguments: apply(params, *arguments)

  def error(self, run, *, slots=LENGTHS - 1, positions=LENGTHS - 1) -> float:
    """The largest relative error of logits and states, over all steps."""
    hidden, worst = self.hidden[:, None], 0.0
    cache = self.cache.replace(length=jnp.asarray(slots))
    for step in zip(*self.drafted, strict=True):
      tokens, *expected = map(np.stack, zip(*step, strict=True))
      logits, hidden = run(
        tokens[:, None], hidden, cache, jnp.asarray(positions)[:, None]
      )
      for ours, theirs in zip((logits, hidden), expected, strict=True):
        error = references.relative_error(ours[:, 0], theirs)
        worst = max(worst, error)
    return worst


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
  """`ordered -> Case`."""
  path, made = tmp_path_factory.mktemp("assistants"), {}
  for ordered in (True, False):
    where = path / str(ordered)
    theirs, assistant = assistants.save(
      where, **(assistants.ORDERED if ordered else {})
    )
    theirs, assistant = theirs.double(), assistant.double()
    if not made:
      target = checkpoints.load(
        str(where / "target"), dtype=jnp.float64, mesh=None, sharding=None
      )
      model = target.functions(SkippedLayers(), ("final",))
      output, cache = jax.jit(
        lambda params, model=model: model.apply(
          params, jnp.asarray(TOKENS), model.init_cache(3, SLOTS)
        )
      )(target.params)
      last = jnp.asarray(LENGTHS - 2)[:, None, None]
      hidden = jnp.take_along_axis(output.features, last, axis=1)[:, 0]
    made[ordered] = Case(
      head=checkpoints.load_head(
        str(where / "assistant"), target, dtype=jnp.float64
      ),
      cache=cache,
      hidden=hidden,
      drafted=[
        [*assistants.draft(theirs, assistant, row[:n].tolist(), STEPS)]
        for row, n in zip(TOKENS, LENGTHS, strict=True)
      ],
    )
  return made


@pytest.fixture(scope="module")
def ordered(cases):
  return cases[True], cases[True].run()


def test_every_draft_step_matches_transformers(cases, ordered):
  """Its norms and its softmax are float32 whatever the model is."""
  case, run = ordered
  assert case.error(run) < 1e-5
  assert cases[False].error(cases[False].run()) < 1e-5


def test_stale_slots_are_ignored_and_nan_stays_in_its_row(ordered):
  """Also where nothing is seen yet: the text is one token."""
  case, run = ordered
  length = jnp.asarray([13, 8, 0], jnp.int32)
  stale = np.arange(SLOTS) >= length[:, None, None, None]  # [B, 1, 1, S]
  stale = np.swapaxes(stale, 2, 3)
  tokens, positions = jnp.asarray(TOKENS[:, :1]), length[:, None]

  def said(change):
    keys, values = (
      tuple(map(change, each)) for each in (case.cache.keys, case.cache.values)
    )
    cache = case.cache.replace(keys=keys, values=values, length=length)
    return run(tokens, case.hidden[:, None], cache, positions)

  expected = said(lambda x: x)
  assert np.isfinite(expected[0]).all()
  for ours, theirs in zip(
    said(lambda x: jnp.where(stale, 9 - x, x)), expected, strict=True
  ):
    np.testing.assert_array_equal(ours, theirs)
  # Keys hold what is broken (`specjax.cache.contain`).
  broken = case.cache.keys[3].at[1, 0, 2, 0].set(jnp.nan)
  keys = (*case.cache.keys[:3], broken)
  logits, hidden = run(
    tokens, case.hidden[:, None],
    case.cache.replace(keys=keys, length=length), positions,
  )  # fmt: skip
  for actual, whole in ((logits, expected[0]), (hidden, expected[1])):
    assert np.isnan(actual[1]).all()
    np.testing.assert_array_equal(actual[::2], whole[::2])
