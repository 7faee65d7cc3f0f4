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
from flax import nnx

import specjax
from models import checkpoints
from models.networks import gemma_assistant
from models.networks.description import (
  AttentionSpec,
  DenseSpec,
  LayerSpec,
  TransformerConfig,
)
from models.networks.rope import Rope
from models.networks.transformer import (
  FINAL,
  SkippedLayers,
  Transformer,
  as_language_model,
)
from specjax import drafters, exact
from specjax.tree import Tree

pytestmark = pytest.mark.usefixtures("quick_to_compile")

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
    apply = references.jit(
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
      output, cache = references.jit(
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


def test_every_step_says_what_transformers_says(cases, ordered):
  """Its norms and its softmax are float32 whatever the model is."""
  case, run = ordered
  assert case.error(run) < 1e-5
  assert cases[False].error(cases[False].run()) < 1e-5


def test_the_floor_is_below_all_chosen_tokens_of_the_row(ordered):
  case, _ = ordered
  for row in case.drafted:
    for _, logits, _ in row:
      floor = logits.min()
      rest = np.sort(logits)[np.sum(logits == floor) :]
      assert np.sum(logits == floor) == 96 - 3 * 8
      assert rest[0] == pytest.approx(floor + 1)


@pytest.mark.parametrize(
  "wrong",
  [
    dict(positions=LENGTHS - 2),
    dict(slots=LENGTHS),
    dict(slots=LENGTHS - 2),
  ],
  ids=["a stale position", "a stale slot", "one slot less"],
)
def test_wrong_positions_and_slots_are_caught(ordered, wrong):
  case, run = ordered
  assert case.error(run, **wrong) > 1e-3


def test_the_layer_beside_is_caught(ordered):
  """Of both kinds the target has an earlier one, of the same heads."""
  case, _ = ordered
  assert [a.source for a in _kinds(case.head.module)] == [2, 2, 3]
  module = nnx.merge(*nnx.split(case.head.module))
  config = module.config
  layers = tuple(
    dataclasses.replace(
      layer, attention=dataclasses.replace(layer.attention, source=source)
    )
    for layer, source in zip(config.layers.layers, (0, 0, 1), strict=True)
  )
  module.config = dataclasses.replace(
    config, layers=dataclasses.replace(config.layers, layers=layers)
  )
  assert case.error(case.run(module)) > 1e-3


def _kinds(module):
  return module.config.layers.attentions.values()


def test_what_is_not_seen_changes_nothing_and_nan_is_of_its_row(ordered):
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


def test_an_idle_row_reads_nothing(ordered):
  case, run = ordered
  cache = case.cache.replace(
    length=jnp.asarray(LENGTHS - 1), idle=jnp.array([True, False, False])
  )
  tokens, positions = jnp.asarray(TOKENS[:, :1]), jnp.asarray(LENGTHS)[:, None]
  hidden = case.hidden[:, None]
  logits, _ = run(tokens, hidden, cache, positions)
  whole, _ = run(tokens, hidden, cache.replace(idle=None), positions)
  assert np.isfinite(logits).all()
  np.testing.assert_array_equal(logits[1:], whole[1:])


def test_a_stacked_cache_is_refused(ordered):
  """A stacked target's, whose one array has all layers."""
  case, run = ordered
  stacked = case.cache.replace(keys=(case.cache.keys[0][None],))
  with pytest.raises(ValueError, match="no stacked cache"):
    run(
      jnp.asarray(TOKENS[:, :1]), case.hidden[:, None], stacked,
      jnp.asarray(LENGTHS)[:, None],
    )  # fmt: skip


def of_random(module, seed):
  """Parameters of a network that make it sure of some things."""
  rng = np.random.default_rng(seed)
  state = nnx.state(module, nnx.Param)
  draw = lambda x: jnp.asarray(0.8 * rng.standard_normal(x.shape))
  nnx.update(module, jax.tree.map(draw, state))
  return module


def test_a_round_with_ordered_embeddings_has_the_targets_law():
  """Of a tree, through both networks: half of the tokens are on the floor."""
  layer = LayerSpec(
    attention=AttentionSpec(
      num_heads=2, num_kv_heads=1, head_dim=4, window=2, scale=1.0,
      rope=Rope(theta=50.0, dim=4), qk_norm="head", v_norm=True,
    ),
    feed_forward=DenseSpec(width=8), norms="both", scaled=True,
  )  # fmt: skip
  sizes = dict(vocab_size=4, max_positions=32)
  target, target_params = as_language_model(
    of_random(
      Transformer(
        TransformerConfig(layers=(layer,), **sizes, embed_dim=8),
        dtype=jnp.float64, rngs=nnx.Rngs(0),
      ),
      seed=0,
    ),
    features=(FINAL,),
  )  # fmt: skip
  reading = dataclasses.replace(
    layer, attention=dataclasses.replace(layer.attention, source=0)
  )
  module = of_random(
    gemma_assistant.Assistant(
      gemma_assistant.AssistantConfig(
        layers=gemma_assistant.ReadingLayers(
          layers=(reading,), **sizes, embed_dim=6
        ),
        target_dim=8, embed_scale=8**0.5, num_clusters=2, num_chosen=1,
      ),
      dtype=jnp.float64, rngs=nnx.Rngs(0),
    ),
    seed=1,
  )  # fmt: skip
  module.ordering = nnx.Variable(jnp.array([2, 0, 3, 1], jnp.int32))
  reader, params = gemma_assistant.as_cache_reader(module)
  decoder = specjax.make_decoder(
    target, rule="recursive",
    drafter=drafters.assistant(
      reader, tree=Tree((-1, 0, 0, 1)), vocab_size=4
    ),
  )  # fmt: skip
  both = specjax.Params(target=target_params, draft=params)
  state = jax.jit(decoder.init, static_argnames="buffer_length")(
    both, np.array([[1, 0, 2, 3, 1]]), np.array([5]), jax.random.key(0),
    buffer_length=16, max_new_tokens=np.int32(11),
  )  # fmt: skip
  law, expected = exact.round_law(decoder, both, state)
  assert np.abs(law.output - expected).max() < 1e-10
