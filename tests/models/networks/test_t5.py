"""T5 beside transformers: logits of every switch, in chains and in trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import t5s
import torch

from models import checkpoints
from models.formats import huggingface, loading
from models.networks import t5_config
from specjax import decode, drafters, tree
from specjax.types import Inputs, Params
from specjax.warp import make_sampling

RNG = np.random.default_rng(0)
LENGTHS = np.array([7, 40, 23])
INPUTS = RNG.integers(2, t5s.VOCAB, (3, 40))
TOKENS = np.pad(RNG.integers(2, t5s.VOCAB, (3, 30)), ((0, 0), (1, 0)))


@pytest.fixture(scope="module", params=list(t5s.MODELS))
def pair(request, tmp_path_factory):
  """A model of ours and its parameters, and transformers' of the same files."""
  settings, untied = t5s.MODELS[request.param]
  folder = tmp_path_factory.mktemp("t5")
  folder, theirs = t5s.save(folder, untied=untied, **settings)
  loaded = checkpoints.load(
    str(folder), dtype=jnp.float32, mesh=None, sharding=None
  )
  return loaded, theirs


def test_whole_chunked_and_tree_logits_match_transformers(pair):
  actual, theirs = pair
  model = actual.model()
  expected = t5s.logits(theirs, INPUTS, LENGTHS, TOKENS)
  # Node n of the tree is the true next token n + 1, but 2 and 4, which are
  # siblings of true ones: nobody else sees them.
  parents = tree.Tree((-1, 0, 0, 1, 1, 3))
  fork = np.array([18, 19, 5, 20, 6, 21])

  @jax.jit
  def run(params, inputs, tokens):
    cache = model.new_cache(params, 3, 48, inputs)
    whole, _ = model.apply(params, tokens, cache)
    first, cache = model.apply(params, tokens[:, :15], cache)
    more, cache = model.apply(params, tokens[:, 15:18], cache)
    nodes, _ = model.apply(
      params, tokens[:, fork], cache,
      positions=cache.length[:, None] + parents.depth,
      mask=parents.ancestors,
      logits_at=jnp.array([[0, 1, 3, 5]] * 3),
    )  # fmt: skip
    one, _ = model.apply(
      params, tokens[:, fork[[0, 2]]], cache,
      logits_at=jnp.array([[1]] * 3),
    )  # fmt: skip
    side, _ = model.apply(
      params, tokens[:, fork], cache,
      positions=cache.length[:, None] + parents.depth,
      mask=parents.ancestors,
      logits_at=jnp.array([[2]] * 3),
    )  # fmt: skip
    return whole, first, more, nodes, one, side

  inputs = Inputs(tokens=jnp.asarray(INPUTS), lengths=jnp.asarray(LENGTHS))
  whole, first, more, nodes, one, side = (
    x.logits for x in run(actual.params, inputs, TOKENS)
  )
  for ours, those in (
    (whole, expected),
    (first, expected[:, :15]),
    (more, expected[:, 15:18]),
    (nodes, expected[:, [18, 19, 20, 21]]),
    (one, side),
  ):
    assert t5s.relative_error(ours, np.asarray(those)) < 1e-4


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
  """A T5 of ours, and transformers' of the same files."""
  folder, theirs = t5s.save(
    tmp_path_factory.mktemp("t5"), seed=1, d_kv=8,
    feed_forward_proj="gated-gelu",
  )  # fmt: skip
  target = checkpoints.load(
    str(folder), dtype=jnp.float32, mesh=None, sharding=None
  )
  return target, theirs


def greedy(theirs, inputs, prompt, length):
  """Completion of one row by transformers' generate."""
  made = theirs.generate(
    input_ids=torch.tensor(inputs[None]),
    attention_mask=torch.ones(1, len(inputs), dtype=torch.long),
    decoder_input_ids=torch.tensor(prompt[None]),
    max_new_tokens=length, do_sample=False, num_beams=1,
  )  # fmt: skip
  return made[0, len(prompt) :].numpy()


def test_ragged_and_refilled_greedy_rows_match_generate(decoded):
  target, theirs = decoded
  model = target.model()
  shape = tree.Tree((-1, 0, 0, 1, 1, 2))
  decoder = decode.make_decoder(
    model,
    drafter=drafters.model(
      model, tree=shape, siblings="without_replacement", vocab_size=t5s.VOCAB
    ),
    rule="recursive",
    vocab_size=t5s.VOCAB,
  )
  draft = references.near(target.params, seed=2)
  params = Params(target=target.params, draft=draft)
  prompts = TOKENS[:, :5]
  lengths = np.array([1, 5, 3], np.int32)
  budgets = np.array([4, 12, 12], np.int32)
  widths = np.array([5, 40, 9])
  greedily = lambda n: make_sampling(n, temperature=0.0)

  @jax.jit
  def run(params):
    state = decoder.init(
      params, prompts, lengths, jax.random.key(0), buffer_length=20,
      max_new_tokens=budgets, stop_tokens=(1,), sampling=greedily(3),
      inputs=Inputs(tokens=jnp.asarray(INPUTS), lengths=jnp.asarray(widths)),
    )  # fmt: skip
    state = decoder.steps(params, state, 100, num_idle=1)
    row = jnp.argmax(state.done)
    before = state
    state = decoder.admit(
      params, state, row, prompts[2], 4, jax.random.key(1), max_new_tokens=9,
      sampling=greedily(1),
      inputs=Inputs(
        tokens=jnp.asarray(INPUTS[::-1][:1]), lengths=jnp.array([23])
      ),
    )  # fmt: skip
    return before, row, decoder.generate(params, state)

  before, row, state = run(params)
  text = lambda state, r: np.asarray(
    state.tokens[r, state.prompt_length[r] : state.length[r]]
  )
  assert int(state.counters.num_accepted.sum()) > 0  # something was drafted
  for r in range(3):
    expected = greedy(
      theirs, INPUTS[r][: widths[r]], prompts[r][: lengths[r]], budgets[r]
    )
    at = before if r == int(row) else state
    np.testing.assert_array_equal(text(at, r), expected)
  expected = greedy(theirs, INPUTS[2][:23], prompts[2][:4], 9)
  np.testing.assert_array_equal(text(state, int(row)), expected)


def test_relative_position_buckets_match_transformers():
  from transformers.models.t5.modeling_t5 import T5Attention

  distances = torch.arange(-500, 501)
  for both in (False, True):
    theirs = T5Attention._relative_position_bucket(
      distances, bidirectional=both, num_buckets=32, max_distance=128
    ).numpy()
    table = t5_config.bucket_table(bidirectional=both)
    d = distances.numpy()
    away = np.abs(d) if both else np.maximum(-d, 0)
    ours = table[np.minimum(away, 128)] + both * (d > 0) * 16
    np.testing.assert_array_equal(ours, theirs)


def test_encoder_padding_and_nan_rows_do_not_leak(decoded):
  target, _ = decoded
  model, params = target.model(), target.params
  # The embedding of token 3 is broken: rows that do not read it never see it.
  params = jax.tree.map(lambda x: x, params)
  broken = params["embed"]["embedding"][...].at[3].set(jnp.nan)
  params["embed"]["embedding"] = params["embed"]["embedding"].replace(broken)
  widths, width = np.array([5, 12, 9]), 16
  inputs = np.where(INPUTS == 3, 4, INPUTS)[:, :width]
  tokens = np.where(TOKENS == 3, 4, TOKENS)[:, :6]

  @jax.jit
  def run(inputs, tokens):
    inputs = Inputs(tokens=inputs, lengths=jnp.asarray(widths))
    cache = model.new_cache(params, 3, 8, inputs)
    return model.apply(params, tokens, cache)[0].logits

  logits_of_rest = lambda x: np.asarray(x)[..., 4:]  # that of token 3 is NaN
  plain = logits_of_rest(run(inputs, tokens))
  assert np.isfinite(plain).all()
  padded = np.where(np.arange(width) < widths[:, None], inputs, 3)
  np.testing.assert_array_equal(logits_of_rest(run(padded, tokens)), plain)
  inputs[1, 2] = 3
  actual = logits_of_rest(run(inputs, tokens))
  assert np.isnan(actual[1]).all()
  np.testing.assert_array_equal(actual[[0, 2]], plain[[0, 2]])


def test_float16_residual_stream_does_not_overflow(tmp_path):
  folder, _ = t5s.save(tmp_path, feed_forward_proj="gated-gelu")
  references.edit_tensors(
    folder,
    lambda tensors: tensors.update(
      {k: 1e5 * x for k, x in tensors.items() if "DenseReluDense.wo" in k}
    ),
  )
  theirs = t5s.read(folder)
  loaded = checkpoints.load(
    str(folder), dtype=jnp.float16, mesh=None, sharding=None
  )
  model = loaded.model()
  inputs = Inputs(tokens=jnp.asarray(INPUTS), lengths=jnp.asarray(LENGTHS))

  @jax.jit
  def run(params):
    return model.apply(params, TOKENS, model.new_cache(params, 3, 40, inputs))[
      0
    ].logits

  expected = t5s.logits(theirs, INPUTS, LENGTHS, TOKENS)
  assert t5s.relative_error(run(loaded.params), expected) < 0.05


def test_missing_tensors_and_unsupported_settings_are_named(tmp_path):
  folder, _ = t5s.save(tmp_path)
  references.edit_config(folder, num_decoder_layers=5)
  with pytest.raises(ValueError, match=r"missing: decoder\.block\.2\."):
    loading.load(huggingface.source(str(folder)))
  references.edit_config(folder, num_decoder_layers=2)
  for changes, message in (
    (dict(feed_forward_proj="gated-sine"), "feed_forward_proj must be"),
    (dict(relative_attention_num_buckets=2), "num_buckets must be 32"),
  ):
    references.edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
      huggingface.read_config(str(folder))
    references.edit_config(
      folder, feed_forward_proj="relu", relative_attention_num_buckets=32
    )


STACKS = ("encoder", "decoder")


@pytest.mark.parametrize("names", [STACKS, STACKS[:1], STACKS[1:]])
def test_embedding_loads_under_any_of_its_names(names, tmp_path):
  """As MADLAD-400's, whose files hold it as a stack's alone."""
  folder, before = t5s.save(tmp_path, untied=True)

  def edit(tensors):
    table = tensors.pop("shared.weight")
    for stack in names:
      tensors[f"{stack}.embed_tokens.weight"] = table.copy()

  references.edit_tensors(folder, edit)
  theirs = t5s.read(folder)
  ours = loading.load(huggingface.source(str(folder))).embed.embedding[...]
  for table in (before.shared, theirs.shared, theirs.encoder.embed_tokens):
    np.testing.assert_array_equal(ours, table.weight.detach().numpy())
