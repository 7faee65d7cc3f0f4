"""The search for layers to skip: what it scores, and that it finds."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from files import write_jsonl
from flax import nnx

from launch import decode, layer_search
from launch.assembly import layers, pair
from launch.layer_search import Costs, Scorer
from models.networks.layers import TransformerConfig
from models.networks.transformer import (
  SkippedLayers,
  Transformer,
  as_language_model,
)
from specjax import warp
from specjax.runtime import timing
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


@pytest.fixture(scope="module")
def scorer(module):
  rng = np.random.default_rng(0)
  judged = np.zeros((2, 10), bool)
  judged[0, 3:9], judged[1, 5:7] = True, True
  tokens = rng.integers(0, VOCAB, (2, 10)).astype(np.int32)
  return Scorer(module, tokens, judged, SAMPLING, vocab_size=VOCAB)


def as_drafted(scorer, skipped) -> float:
  """The same by drafting one token on the target's cache, place by place."""
  whole, params = as_language_model(scorer.module)
  thin, _ = as_language_model(scorer.module, skipped=skipped)
  sampling = make_sampling(1, **SAMPLING)

  @jax.jit
  def both(params, tokens, place):
    cache = whole.init_cache(1, 12)
    output, cache = whole.apply(params, tokens, cache)
    one = tokens[:, place][:, None]
    cache = cache.replace(length=place[None])
    drafted, _ = thin.apply(params, one, cache)
    law = lambda x: jnp.exp(warp.warp(x[..., :VOCAB], sampling))
    pair = law(output.logits[:, place]), law(drafted.logits[:, 0])
    return jnp.minimum(*pair).sum()

  actual = [
    float(both(params, scorer.tokens[row : row + 1], jnp.int32(place)))
    for row, place in np.argwhere(scorer.judged)
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
  scorer, skipped
):
  expected = as_drafted(scorer, skipped)
  assert scorer.acceptance(skipped) == pytest.approx(expected, abs=1e-5)
  assert expected < 0.999


def test_nothing_skipped_is_accepted_always_and_no_set_is_a_program(scorer):
  assert scorer.acceptance(SkippedLayers()) == pytest.approx(1, abs=1e-5)
  for block in range(2 * LAYERS):
    assert 0 < scorer.acceptance(layer_search.of_blocks([block])) < 1
  assert scorer._acceptance._cache_size() == 1
  with pytest.raises(ValueError, match="do not exist"):
    scorer.acceptance(SkippedLayers(mlp=(LAYERS,)))


def played(method, score, count):
  """The sets that a method proposes to whom pays `score`, and the scores."""
  actual, told = [], None
  for _ in range(count):
    skipped = next(method) if told is None else method.send(told)
    told = score(skipped)
    actual.append((skipped, told))
  return actual


def worth(skipped):
  """Some sub-layers are good to skip, others are not, and a pair is bad."""
  blocks = {2 * i for i in skipped.attention} | {2 * i + 1 for i in skipped.mlp}
  good = sum(1 if b % 3 else -1.5 for b in blocks)
  return good - 1.2 * ({1, 2} <= blocks)


def test_the_search_told_the_same_proposes_the_same_and_beats_chance():
  actual = [
    played(layer_search.bayesian(8, seed=seed), worth, 60)
    for seed in (0, 0, 1, 2)
  ]
  assert actual[0] == actual[1] != actual[2]
  rng = np.random.default_rng(0)
  sets = rng.permuted(np.tile(np.arange(16), (60, 1)), axis=1)
  sizes = rng.integers(1, 16, 60)
  chance = max(
    worth(layer_search.of_blocks(blocks[:size]))
    for blocks, size in zip(sets, sizes, strict=True)
  )
  best = [max(score for _, score in one) for one in actual[1:]]
  assert min(best) >= chance
  assert np.mean(best) > chance + 0.5


def test_the_knapsack_keeps_the_ends_and_starts_with_the_likeliest(scorer):
  price = Costs(attention=0.1, mlp=0.1, rest=0.2, verify={1: 1, 2: 1})
  actual = layer_search.knapsack(scorer, price)
  size = lambda s: len(s.attention) + len(s.mlp)
  assert [size(s) for s in actual] == list(range(1, len(actual) + 1))
  for skipped in actual:
    assert not {0, LAYERS - 1} & {*skipped.attention, *skipped.mlp}

  def cosine(skipped):  # of the residual stream at the end, by the model itself
    def last(**options):
      output, _ = scorer.module(scorer.tokens, features=(LAYERS,), **options)
      return np.asarray(output.features)[scorer.judged]

    a, b = last(skipped=skipped), last()
    size = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return ((a * b).sum(axis=1) / size).mean()

  # A set of one, of which keys and values of earlier places know as well here.
  ranked = sorted(
    (layer_search.of_blocks([b]) for b in range(2, 2 * LAYERS - 2)), key=cosine
  )
  assert actual[0] in ranked[-2:]


def test_savings_of_the_knapsack_are_whole_numbers():
  price = lambda a, m: layer_search.weights(
    Costs(attention=a, mlp=m, rest=0.1, verify={1: 1.0})
  )
  assert price(0.1, 0.21) == (1, 2)
  assert price(0.3, 0.1) == (3, 1)
  assert price(0.01, 0.5) == (1, 5)
  assert price(0.1, 0.1) == (1, 1)


def test_costs_by_bytes_are_those_of_the_weights(module):
  actual = layer_search.costs_by_bytes(module.config, 4)
  size = lambda part: sum(
    x.size for x in jax.tree.leaves(part) if getattr(x, "ndim", 0) == 2
  )
  _, params = as_language_model(module)
  layer = params["layers"][1]
  attention, mlp = size(layer["attention"]), size(layer["mlp"])
  assert actual.mlp / actual.attention == pytest.approx(mlp / attention)
  nothing = SkippedLayers()
  assert actual.draft(nothing, LAYERS) == pytest.approx(1)
  some = SkippedLayers(attention=(1,), mlp=(0, 2))
  expected = 1 - actual.attention - 2 * actual.mlp
  assert actual.draft(some, LAYERS) == pytest.approx(expected)


def test_a_prediction_is_the_formulas_best_and_the_bound_is_above():
  price = Costs(
    attention=0.05, mlp=0.1, rest=0.1, verify={1: 1.0, 2: 1.1, 5: 1.5}
  )
  skipped = SkippedLayers(attention=(0, 1), mlp=(2, 3))
  a, c = 0.85, 0.1 + 2 * 0.05 + 2 * 0.1
  by_hand = [
    (1 - a ** (n + 1)) / (1 - a) / (n * c + v)
    for n, v in ((1, 1.1), (2, 1.1 + 0.4 / 3), (3, 1.1 + 0.8 / 3), (4, 1.5))
  ]
  actual = layer_search.evaluation(skipped, a, price, num_layers=4)
  assert actual["speedup"] == pytest.approx(max(by_hand))
  assert actual["num_speculative_tokens"] == 1 + int(np.argmax(by_hand))
  assert actual["bound"] > actual["speedup"]


def test_break_even_is_of_the_pass_that_is_verified():
  """Half a pass to draft a token, 1.4 to verify two, 1.6 to verify five."""
  given = Costs(
    attention=0.1, mlp=0.1, rest=0.1, verify={1: 1.0, 2: 1.4, 5: 1.6}
  )
  skipped = SkippedLayers(attention=(1, 2), mlp=(1, 2))
  actual = layer_search.evaluation(skipped, 0.3, given, num_layers=4)
  assert actual["draft_cost"] == pytest.approx(0.5)
  assert actual["num_speculative_tokens"] == 1
  assert actual["break_even"] == pytest.approx(0.5 + 1.4 - 1)  # and not "never"


def test_passes_are_timed_as_shares_of_a_whole_one(module, monkeypatch):
  """Of a whole pass, one without attention, one without MLPs, of two and four.

  The first run of each compiles.
  """
  ticks = (
    tick
    for least in (10.0, 7.0, 4.0, 12.0, 16.0)
    for run in range(layer_search._TIMED_RUNS)
    for tick in (0.0, least + (50 if run == 0 else run - 1))
  )
  monkeypatch.setattr(
    timing, "time", types.SimpleNamespace(perf_counter=ticks.__next__)
  )
  actual = layer_search.costs_by_clock(module, 3)
  assert actual.attention == pytest.approx(0.3 / LAYERS)
  assert actual.mlp == pytest.approx(0.6 / LAYERS)
  assert actual.rest == pytest.approx(0.1)
  assert actual.verify == pytest.approx({1: 1.0, 2: 1.2, 4: 1.6})


# ----------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
  lines = [{"id": i, "prompt": t} for i, t in enumerate(["def f(", "import"])]
  return write_jsonl(tmp_path_factory.mktemp("p") / "in.jsonl", lines)


FLAGS = (
  "--config.max_new_tokens=8", "--config.drafter=plain",
  "--config.temperature=1.0",
)  # fmt: skip


def run(cli, prompts, out, *more):
  return cli(
    layer_search.run, *FLAGS, "--draft_tokens=3", f"--prompts={prompts}",
    f"--output={out}", *more,
  )  # fmt: skip


def test_a_search_is_resumed_made_longer_and_read_by_decode(
  cli, prompts, tmp_path, monkeypatch, capsys
):
  whole = tmp_path / "whole.json"
  assert run(cli, prompts, whole, "--evaluations=4") == 0
  out, scored = tmp_path / "out.json", []
  real = Scorer.acceptance

  def dies(self, skipped):
    if len(scored) == 3:
      raise KeyboardInterrupt
    scored.append(skipped)
    return real(self, skipped)

  with monkeypatch.context() as patched:
    patched.setattr(Scorer, "acceptance", dies)
    with pytest.raises(KeyboardInterrupt):
      run(cli, prompts, out, "--evaluations=4")
    assert run(cli, prompts, out, "--evaluations=4", "--draft_tokens=5") == 2
    shown = capsys.readouterr().err
    assert "draft_tokens was 3, is 5" in shown
    patched.undo()
    patched.setattr(Scorer, "acceptance", dies)
    scored.clear()
    assert run(cli, prompts, out, "--evaluations=4") == 0
    assert len(scored) == 1
  of = lambda path: json.loads(path.read_text())
  without = lambda actual: [
    {k: v for k, v in e.items() if k != "seconds"} for e in actual
  ]
  assert without(of(out)["evaluations"]) == without(of(whole)["evaluations"])
  best = of(out)["best"]
  scores = [e["score"] for e in of(out)["evaluations"]]
  assert best["score"] == max(scores)
  assert best["bound"] >= best["speedup"]
  capsys.readouterr()
  assert cli(
    decode.run, *FLAGS, f"--prompts={prompts}", "--nobaseline",
    f"--config.drafter=layer_skip('{out}', tokens=3)",
    f"--summary={tmp_path / 's.json'}",
  ) == 0  # fmt: skip


@pytest.mark.heavy
def test_a_measured_set_drafts_as_many_tokens_as_the_result_says(
  cli, prompts, tmp_path, monkeypatch
):
  out, drafted = tmp_path / "out.json", []
  engine_of = pair.engine_of

  def watched(config, models, *, baseline=False):
    if not baseline:
      drafted.append(models.drafting.tree.max_depth)
    return engine_of(config, models, baseline=baseline)

  monkeypatch.setattr(pair, "engine_of", watched)
  flags = ("--objective=measured", "--evaluations=2")
  assert run(cli, prompts, out, *flags) == 0
  record = json.loads(out.read_text())
  for one in record["evaluations"]:
    assert one["score"] == one["measured"] > 0
  said = [e["num_speculative_tokens"] for e in record["evaluations"]]
  assert drafted[-len(said) :] == said


def test_a_method_that_has_no_set_says_so(cli, prompts, tmp_path, capsys):
  """The first and the last layer always run, and here are no others."""
  assert run(cli, prompts, tmp_path / "out.json", "--method=knapsack") == 2
  error = capsys.readouterr().err.splitlines()[-1]
  assert "'knapsack' has no set to propose for a target of 2 layers" in error


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
