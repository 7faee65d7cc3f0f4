"""The search for layers to skip: what it scores, and that it finds."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from files import write_jsonl
from flax import nnx

from launch import decode, layer_search
from launch.assembly import files
from models.networks.description import llama_config
from models.networks.transformer import (
  SkippedLayers,
  Transformer,
  as_language_model,
)
from specjax import warp
from specjax.warp import make_sampling

LAYERS, VOCAB = 4, 64
SAMPLING = dict(temperature=0.5, top_k=20)


@pytest.fixture(scope="module")
def module():
  """A target whose layers matter: large random weights."""
  config = llama_config(
    vocab_size=VOCAB, embed_dim=32, num_layers=LAYERS, num_heads=2,
    num_kv_heads=1, head_dim=16, mlp_dim=48, max_positions=64,
  )  # fmt: skip
  module = Transformer(config, rngs=nnx.Rngs(0))
  nnx.update(module, jax.tree.map(lambda x: 4 * x, nnx.state(module)))
  return module


RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, VOCAB, (2, 10)).astype(np.int32)
JUDGED = np.zeros((2, 10), bool)
JUDGED[0, 3:9], JUDGED[1, 5:7] = True, True


@pytest.fixture(scope="module")
def acceptance_of(module):
  return layer_search.make_scorer(
    module, TOKENS, JUDGED, SAMPLING, vocab_size=VOCAB
  )


def as_drafted(module, skipped) -> float:
  """The same by drafting one token on the target's cache, place by place."""
  whole, params = as_language_model(module)
  thin, _ = as_language_model(module, skipped=skipped)
  sampling = make_sampling(1, **SAMPLING)

  @jax.jit
  def both(params, tokens, place):
    cache = whole.init_cache(1, 12)
    output, cache = whole.apply(params, tokens, cache)
    one = tokens[:, place][:, None]
    cache = cache.replace(length=place[None])
    drafted, _ = thin.apply(params, one, cache)
    probs = lambda x: jnp.exp(warp.warp(x[..., :VOCAB], sampling))
    pair = probs(output.logits[:, place]), probs(drafted.logits[:, 0])
    return jnp.minimum(*pair).sum()

  actual = [
    float(both(params, TOKENS[row : row + 1], jnp.int32(place)))
    for row, place in np.argwhere(JUDGED)
  ]
  return float(np.mean(actual))


@pytest.mark.parametrize(
  "skipped",
  [
    SkippedLayers(attention=(1, 2), mlp=(2,)),
    SkippedLayers(attention=(0, 1, 2, 3), mlp=(0, 1, 2, 3)),
  ],
)
def test_one_pass_gives_the_acceptance_of_tokens_drafted_everywhere(
  module, acceptance_of, skipped
):
  expected = as_drafted(module, skipped)
  assert acceptance_of(skipped) == pytest.approx(expected, abs=1e-5)
  assert expected < 0.999


def test_nothing_skipped_is_accepted_always(acceptance_of):
  assert acceptance_of(SkippedLayers()) == pytest.approx(1, abs=1e-5)
  with pytest.raises(ValueError, match="do not exist"):
    acceptance_of(SkippedLayers(mlp=(LAYERS,)))


def worth(skipped):
  """Some sub-layers are good to skip, others are not, and a pair is bad."""
  blocks = {2 * i for i in skipped.attention} | {2 * i + 1 for i in skipped.mlp}
  good = sum(1 if b % 3 else -1.5 for b in blocks)
  return {"speedup": good - 1.2 * ({1, 2} <= blocks)}


def test_a_search_beats_chance():
  sets = RNG.permuted(np.tile(np.arange(16), (60, 1)), axis=1)
  chance = max(
    sum(1 if b % 3 else -1.5 for b in blocks[:size])
    for blocks, size in zip(sets, RNG.integers(1, 16, 60), strict=True)
  )
  for seed in (0, 1, 2):
    records = layer_search.search(8, worth, count=60, seed=seed)
    assert max(one["speedup"] for one in records) >= chance


def test_a_draft_pass_costs_the_weights_that_it_reads(module):
  _, params = as_language_model(module)
  size = lambda part: sum(
    x.size for x in jax.tree.leaves(part) if getattr(x, "ndim", 0) == 2
  )
  layer = params["layers"][1]
  attention, mlp = size(layer["attention"]), size(layer["mlp"])
  whole = LAYERS * (attention + mlp) + VOCAB * 32
  cost = lambda **skipped: layer_search.draft_cost(
    module.config, SkippedLayers(**skipped)
  )
  assert cost() == 1
  assert cost(attention=(1,), mlp=(0, 2)) == pytest.approx(
    1 - (attention + 2 * mlp) / whole
  )


def test_a_prediction_is_the_formulas_best():
  a, c = 0.85, 0.4
  by_hand = [(1 - a ** (n + 1)) / (1 - a) / (n * c + 1) for n in range(1, 5)]
  actual = layer_search.evaluation(SkippedLayers(mlp=(2,)), a, c, most=4)
  assert actual["speedup"] == pytest.approx(max(by_hand))
  assert actual["num_speculative_tokens"] == 1 + int(np.argmax(by_hand))


def test_a_set_is_found_and_read_by_decode(cli, tmp_path, capsys):
  lines = [{"id": i, "prompt": t} for i, t in enumerate(["def f(", "import"])]
  out = tmp_path / "out.json"
  arguments = (
    "--config.max_new_tokens=8", "--config.temperature=1.0",
    f"--prompts={write_jsonl(tmp_path / 'in.jsonl', lines)}",
  )  # fmt: skip
  flags = ("--draft_tokens=3", f"--output={out}", "--evaluations=4")
  assert cli(layer_search.run, *arguments, *flags) == 0
  assert "acceptance" in capsys.readouterr().out
  found = json.loads(out.read_text())
  best = max(one["speedup"] for one in found["evaluations"])
  assert found["speedup"] == best
  drafter = f"--config.drafter=layer_skip('{out}', tokens=3)"
  assert cli(decode.run, *arguments, "--nobaseline", drafter) == 0


def test_a_set_is_read_as_it_was_written(tmp_path):
  path = tmp_path / "skip.json"
  one = SkippedLayers(attention=(3, 1), mlp=())
  path.write_text(json.dumps(files.skipped_json(one) | {"best": 1}))
  assert files.read_skipped(str(path)) == SkippedLayers(attention=(1, 3))
  path.write_text('{"skip_mlp": [1]}')
  with pytest.raises(ValueError, match="must be JSON like"):
    files.read_skipped(str(path))
