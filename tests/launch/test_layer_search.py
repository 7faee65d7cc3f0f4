"""The search for layers to skip: what it scores, and that it finds."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from files import write_jsonl
from flax import nnx

from configs import shapes
from launch import decode, layer_search
from launch.assembly import layers, pair
from models.formats.huggingface_config import config_from_json
from models.networks.layers import TransformerConfig
from models.networks.transformer import (
  SkippedLayers,
  Transformer,
  as_language_model,
)
from specjax import warp
from specjax.warp import make_sampling

pytestmark = pytest.mark.usefixtures("quick_to_compile")

LAYERS, VOCAB = 4, 64
SAMPLING = dict(temperature=0.5, top_k=20)


@pytest.fixture(scope="module")
def module():
  """A target whose layers matter: large random weights."""
  config = TransformerConfig(
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


def test_layers_that_cannot_be_switched_off_are_refused(acceptance_of):
  config = config_from_json(shapes.SHAPES["qwen3.5-9b"])
  hybrid = types.SimpleNamespace(config=config, layers=[None] * 32)
  with pytest.raises(ValueError, match="cannot be switched off"):
    layer_search.gated(hybrid, None, None)


def worth(skipped):
  """Some sub-layers are good to skip, others are not, and a pair is bad."""
  blocks = {2 * i for i in skipped.attention} | {2 * i + 1 for i in skipped.mlp}
  good = sum(1 if b % 3 else -1.5 for b in blocks)
  return {"blocks": sorted(blocks), "score": good - 1.2 * ({1, 2} <= blocks)}


def test_a_search_beats_chance_and_goes_on_from_its_journal(tmp_path):
  search = lambda count, name, seed=0, score=worth: layer_search.search(
    8, score, count=count, journal=str(tmp_path / name),
    settings={"seed": seed},
  )  # fmt: skip
  sets = RNG.permuted(np.tile(np.arange(16), (60, 1)), axis=1)
  chance = max(
    sum(1 if b % 3 else -1.5 for b in blocks[:size])
    for blocks, size in zip(sets, RNG.integers(1, 16, 60), strict=True)
  )
  best = [
    max(one["score"] for one in search(60, f"{seed}", seed))
    for seed in (0, 1, 2)
  ]
  assert min(best) >= chance
  scored = []

  def dies(skipped):
    if len(scored) == 5:
      raise KeyboardInterrupt
    scored.append(worth(skipped))
    return scored[-1]

  with pytest.raises(KeyboardInterrupt):
    search(60, "killed", score=dies)
  more = search(8, "killed")
  assert more[:5] == scored
  assert len(more) == 8
  with pytest.raises(ValueError, match="other settings: --overwrite begins"):
    search(8, "killed", seed=1)


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


# ----------------------------------------------------------------- the command


def run(cli, tmp_path, *more):
  lines = [{"id": i, "prompt": t} for i, t in enumerate(["def f(", "import"])]
  prompts = write_jsonl(tmp_path / "in.jsonl", lines)
  arguments = (
    "--config.max_new_tokens=8", "--config.temperature=1.0",
    f"--prompts={prompts}",
  )  # fmt: skip
  flags = ("--draft_tokens=3", f"--output={tmp_path / 'out.json'}", *more)
  assert cli(layer_search.run, *arguments, *flags) == 0
  return arguments, json.loads((tmp_path / "out.json").read_text())


def test_a_set_is_found_and_read_by_decode(cli, tmp_path, capsys):
  arguments, found = run(cli, tmp_path, "--evaluations=4")
  assert found["best"]["score"] == max(e["score"] for e in found["evaluations"])
  assert "acceptance" in capsys.readouterr().out
  assert not (tmp_path / "out.json.journal").exists()
  drafter = f"layer_skip('{tmp_path / 'out.json'}', tokens=3)"
  assert (
    cli(decode.run, *arguments, "--nobaseline", f"--config.drafter={drafter}")
    == 0
  )


@pytest.mark.heavy
def test_a_measured_set_drafts_as_many_tokens_as_the_result_says(
  cli, tmp_path, monkeypatch
):
  drafted, engine_of = [], pair.engine_of

  def watched(config, models, *, baseline=False):
    if not baseline:
      drafted.append(models.drafting.tree.max_depth)
    return engine_of(config, models, baseline=baseline)

  monkeypatch.setattr(pair, "engine_of", watched)
  _, found = run(cli, tmp_path, "--objective=measured", "--evaluations=2")
  for one in found["evaluations"]:
    assert one["score"] == one["measured"] > 0
  said = [e["num_speculative_tokens"] for e in found["evaluations"]]
  assert drafted[-len(said) :] == said


@pytest.mark.parametrize(
  "text", ["", "[]", '{"skip_mlp": [1]}',
           '{"skip_attention": [1.5], "skip_mlp": []}']
)  # fmt: skip
def test_a_file_that_holds_no_set_is_refused(tmp_path, text):
  path = tmp_path / "skip.json"
  path.write_text(text)
  with pytest.raises(ValueError, match="must be JSON like"):
    layers.read(str(path))


def test_a_set_is_read_as_it_was_written(tmp_path):
  one = SkippedLayers(attention=(3, 1), mlp=())
  path = tmp_path / "skip.json"
  path.write_text(json.dumps(layers.as_json(one) | {"best": 1}))
  assert layers.read(str(path)) == SkippedLayers(attention=(1, 3))
  with pytest.raises(FileNotFoundError, match="no such file of layers"):
    layers.read(str(tmp_path / "other.json"))
