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
def test_single_pass_acceptance_matches_token_by_token_drafting(
  module, skipped
):
  acceptance_of = layer_search.make_scorer(
    module, TOKENS, JUDGED, SAMPLING, vocab_size=VOCAB
  )
  expected = as_drafted(module, skipped)
  assert acceptance_of(skipped) == pytest.approx(expected, abs=1e-5)
  assert expected < 0.999


def test_decode_reads_the_layer_set_found_by_search(cli, tmp_path, capsys):
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


def test_layer_set_round_trips_through_json(tmp_path):
  path = tmp_path / "skip.json"
  one = SkippedLayers(attention=(3, 1), mlp=())
  path.write_text(json.dumps(files.skipped_json(one) | {"best": 1}))
  assert files.read_skipped(str(path)) == SkippedLayers(attention=(1, 3))
  path.write_text('{"skip_mlp": [1]}')
  with pytest.raises(ValueError, match="must be JSON like"):
    files.read_skipped(str(path))
