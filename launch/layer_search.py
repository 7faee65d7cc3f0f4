r"""Searches for the sub-layers that a target skips to draft for itself.

  python -m launch.layer_search --config=configs/embedded.py \
    --method=bayesian --evaluations=100 --output=skip.json
  python -m launch.decode --config=configs/embedded.py \
    --config.drafter='layer_skip("skip.json")'

Of the 2L attentions and MLPs some set is skipped in every draft pass (Draft and
Verify, Zhang et al., ACL 2024). --method is bayesian (tree-structured Parzen
estimators; pip install 'specjax[search]') or knapsack, the dynamic programme of
KnapSpec (ICML 2026), which proposes one set for every saving. --objective is
predicted, the speed-up of a throughput formula (a pass over texts that the
target emitted scores a set, and no program is compiled for it), or measured by
decoding the same prompts: the truth, and minutes a set. --costs of passes are
bytes, of the weights that they read (an accelerator at batch size 1), or
measured, timed here.

Prompts are as of launch.decode, the acceptance that of the config's temperature
and truncations over max_new_tokens of each. OUT.json is what layer_skip reads,
with every evaluation, and the bound: the speed-up of a set of that acceptance
whose layers are free. A run that was stopped goes on where it was, a finished
one with more --evaluations.
"""

import dataclasses
import functools
import sys
from collections.abc import Generator

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm
from absl import flags

from launch import cli, prompts, provenance, report, results
from launch.assembly import layers, pair
from launch.assembly.registry import DRAFTERS
from launch.results import Journal
from models import checkpoints
from models.networks import gated
from models.networks.description import (
  TransformerConfig,
  attention_weights,
  mlp_weights,
)
from models.networks.params import split
from models.networks.transformer import (
  SkippedLayers,
  Transformer,
  as_language_model,
)
from specjax import intervals, warp
from specjax.runtime import engine, timing
from specjax.runtime.requests import make_batches
from specjax.theory import throughput

cli.reads(cli.CONFIG, cli.PROMPTS, cli.OUTPUT, cli.SEED)
_METHOD = flags.DEFINE_enum(
  "method", "bayesian", ["bayesian", "knapsack"], "How sets are proposed."
)
_OBJECTIVE = flags.DEFINE_enum(
  "objective", "predicted", ["predicted", "measured"], "What is maximised."
)
_EVALUATIONS = flags.DEFINE_integer(
  "evaluations", 100, "Sets that are scored.", lower_bound=1
)
_TOKENS = flags.DEFINE_integer(
  "draft_tokens", 8, "Drafted tokens, at most.", lower_bound=1
)
_COSTS = flags.DEFINE_enum(
  "costs", "bytes", ["bytes", "measured"], "What passes cost."
)

_TIMED_SLOTS, _TIMED_RUNS = 256, 15  # of passes by the clock
# KnapSpec's: the largest weight of an item, the least cosine of a way.
_LARGEST, _LEAST_COSINE = 5, 0.5

# Yields a set, and is sent its score: larger is better. Proposals follow from
# the scores alone, so a stopped search is replayed without scoring again.
Method = Generator[SkippedLayers, float, None]


def of_blocks(blocks) -> SkippedLayers:
  """The set of some sub-layers, 2 i for attention i and 2 i + 1 for MLP i."""
  blocks = sorted(int(b) for b in blocks)
  return SkippedLayers(
    attention=tuple(b // 2 for b in blocks if b % 2 == 0),
    mlp=tuple(b // 2 for b in blocks if b % 2),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Shares of a target pass over one token.

  Attributes:
    attention: of each attention.
    mlp: of each MLP.
    rest: of all that is never skipped.
    verify: of a target pass, by the tokens that it is fed.
  """

  attention: float
  mlp: float
  rest: float
  verify: dict[int, float]

  def draft(self, skipped: SkippedLayers, num_layers: int) -> float:
    """The share of a pass without some sub-layers."""
    kept_attention = num_layers - len(set(skipped.attention))
    kept_mlp = num_layers - len(set(skipped.mlp))
    return self.rest + kept_attention * self.attention + kept_mlp * self.mlp


def costs_by_bytes(config: TransformerConfig, most: int) -> Costs:
  """Costs by weights, for at most `most` drafted tokens; all passes alike."""
  c = config
  layers = [c.layer(i) for i in range(c.num_layers)]
  mean = lambda weights: (
    sum(weights(x, c.embed_dim) for x in layers) / len(layers)
  )
  attention, mlp = mean(attention_weights), mean(mlp_weights)
  rest = c.vocab_size * c.embed_dim  # the output projection
  whole = rest + c.num_layers * (attention + mlp)
  return Costs(
    attention=attention / whole, mlp=mlp / whole, rest=rest / whole,
    verify=dict.fromkeys(range(1, most + 2), 1.0),
  )  # fmt: skip


def costs_by_clock(module: Transformer, most: int) -> Costs:
  """Costs by the clock of this machine, the least of some passes each."""

  def seconds(fed: int, **skipped) -> float:
    model, params = as_language_model(module, skipped=SkippedLayers(**skipped))
    cache = model.init_cache(1, _TIMED_SLOTS)
    cache = cache.replace(length=cache.length + _TIMED_SLOTS // 2)
    tokens = jnp.zeros((1, fed), jnp.int32)
    run = jax.jit(lambda p, cache: model.apply(p, tokens, cache)[0].logits)
    # The first run compiles.
    return min(timing.timed(run, params, cache)[0] for _ in range(_TIMED_RUNS))

  count, whole = module.config.num_layers, seconds(1)
  attention, mlp = (
    max(1 - seconds(1, **{kind: range(count)}) / whole, 0) / count
    for kind in ("attention", "mlp")
  )
  verify = {n: max(seconds(n) / whole, 1.0) for n in {2, 4, most + 1}}
  rest = max(1 - count * (attention + mlp), 0.0)
  return Costs(attention=attention, mlp=mlp, rest=rest, verify={1: 1} | verify)


def evaluation(
  skipped: SkippedLayers, acceptance: float, costs: Costs, num_layers: int
) -> dict:
  """The record of a set: its best predicted speed-up, and from how many tokens.

  `acceptance` is that of each drafted token, all depths alike; 1 or more are
  drafted, as many as `costs.verify` has room for.
  """
  verify = throughput.verify_curve(costs.verify)
  counts = np.arange(1, max(costs.verify))
  rates = lambda draft: throughput.throughput(
    counts, acceptance, draft, verify(counts + 1)
  )
  draft = costs.draft(skipped, num_layers)
  count = int(counts[np.argmax(rates(draft))])
  needed = throughput.break_even(count, draft, float(verify(count + 1)), 1.0)
  return {
    **layers.as_json(skipped),
    "acceptance": acceptance,
    "draft_cost": draft,
    "num_speculative_tokens": count,
    "speedup": float(rates(draft).max()),
    "break_even": needed if needed <= 1 else None,
    "bound": float(rates(costs.rest).max()),
  }


class Scorer:
  """The acceptance of any set of skipped sub-layers on some texts, in one pass.

  The whole target reads a text once; the thinned one reads it again with each
  token at its own place, seeing the slots that the target filled before it and
  its own, as a draft's first token does. sum min(p, q) of the warped laws of a
  place is the probability that a token drafted there is accepted. Deeper tokens
  see thinned slots too: to take all depths for equal is optimistic.
  """

  def __init__(
    self,
    module: Transformer,
    tokens: np.ndarray,
    judged: np.ndarray,
    sampling: dict,
    *,
    vocab_size: int,
  ):
    """Reads the texts with the whole target.

    Args:
      module: the target.
      tokens: `i32[B, T]`, texts that it emitted, right-padded.
      judged: `bool[B, T]`, the places after which an emitted token stands.
      sampling: settings of `make_sampling`, for both laws.
      vocab_size: V, the number of real tokens.
    """
    self.module, self.tokens, self.judged = module, tokens, judged
    self._merge, self.params = split(module)
    rows, width = tokens.shape
    settings = warp.make_sampling(rows, **sampling)

    def law_of(logits):
      return warp.warp(logits[..., :vocab_size], settings)

    def read(params, tokens):
      cache = as_language_model(module)[0].init_cache(rows, 2 * width)
      output, cache = self._merge(params)(tokens, cache)
      return law_of(output.logits), cache

    def acceptance(params, gates, tokens, law, cache):
      model, fed = self.reread(params, tokens, cache)
      thin = law_of(gated.forward(model, gates, fed).logits)
      each = jnp.sum(jnp.minimum(jnp.exp(thin), jnp.exp(law)), axis=-1)
      # What is no law is accepted never.
      each = jnp.where(judged & ~jnp.isnan(each), each, 0)
      return jnp.sum(each) / jnp.sum(judged)

    self._law, self.cache = jax.jit(read)(self.params, tokens)
    self._acceptance = jax.jit(acceptance)

  def reread(self, params, tokens, cache):
    """The model, and the texts that it read fed once more behind themselves."""
    model, width = self._merge(params), tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    full = cache.replace(length=jnp.full((len(tokens),), width, jnp.int32))
    seen = np.hstack([np.tri(width, k=-1), np.eye(width)]).astype(bool)
    return model, model.enter(tokens, full, positions=positions, mask=seen)

  def acceptance(self, skipped: SkippedLayers) -> float:
    """The mean probability that a drafted token is accepted."""
    num_layers = self.module.config.num_layers
    skipped.check(num_layers)
    gates = gated.gates_of(num_layers, skipped.attention, skipped.mlp)
    args = self.params, gates, self.tokens, self._law, self.cache
    return float(self._acceptance(*args))


def bayesian(num_layers: int, *, seed: int) -> Method:
  """Tree-structured Parzen estimators over 2L switches (optuna).

  Raises:
    ValueError: if optuna is not installed.
  """
  try:
    import optuna
  except ImportError:
    raise ValueError(
      "the method 'bayesian' needs optuna: pip install -e '.[search]'"
    ) from None
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  study = optuna.create_study(
    direction="maximize",
    sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=10),
  )
  names = [f"{k} {i}" for i in range(num_layers) for k in ("attention", "mlp")]
  # The first is a guess: every other layer, but neither the first nor the last.
  middle = set(range(1, num_layers - 1, 2))
  study.enqueue_trial({name: b // 2 in middle for b, name in enumerate(names)})
  while True:
    trial = study.ask()
    switches = [trial.suggest_categorical(n, [False, True]) for n in names]
    # The whole target would be no draft: no set that skips nothing.
    score = (yield of_blocks(np.flatnonzero(switches))) if any(switches) else 0
    study.tell(trial, score)


def weights(costs: Costs) -> tuple[int, int]:
  """Units that skipping an attention and an MLP saves: one for the cheaper."""
  small, large = sorted((costs.attention, costs.mlp))
  ratio = _LARGEST if not small else min(max(round(large / small), 1), _LARGEST)
  return (1, ratio) if costs.mlp >= costs.attention else (ratio, 1)


def knapsack(scorer: Scorer, costs: Costs) -> list[SkippedLayers]:
  """KnapSpec: the best set of every saving up to half of all, smallest first.

  A state is a sub-layer and the units saved before it; of all ways to come
  there the one is kept whose residual stream is most like the whole target's,
  by the cosine at the judged places. First and last layer always run; ways
  whose mean cosine falls below a half are given up. The best hidden state is
  kept, not the best path: an approximation, as the paper's is.

  Raises:
    ValueError: for a target whose attention and MLP read the same, or whose
      layers do more than both.
  """
  config, tokens = scorer.module.config, scorer.tokens
  if config.layer(0).parallel or config.layer(0).scaled:
    raise ValueError(
      "the method 'knapsack' is for targets whose MLP reads what the attention "
      "before it has added, and whose layers add no more than both"
    )
  units, last = weights(costs), 2 * config.num_layers
  places = np.flatnonzero(scorer.judged)

  @functools.partial(jax.jit, static_argnums=0)
  def run(block, params, tokens, cache, states):
    model, fed = scorer.reread(params, tokens, cache)
    one = lambda x: x + gated.sub_layer(model, block, x, fed, x)
    return jax.lax.map(one, states)

  @jax.jit
  def cosine(states, truth):  # [S, B, T, D], [B, T, D] -> [S]
    flat = lambda x: x.reshape(*x.shape[:-3], -1, x.shape[-1])[..., places, :]
    a, b = flat(states).astype(jnp.float32), flat(truth).astype(jnp.float32)
    dot = jnp.sum(a * b, axis=-1)
    size = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.mean(dot / size, axis=-1)

  read = scorer.params, tokens, scorer.cache
  entered = jax.jit(lambda *args: scorer.reread(*args)[1].x)(*read)
  # By units saved: the residual stream, and the sub-layers skipped.
  states: dict[int, tuple[jax.Array, tuple[int, ...]]] = {0: (entered, ())}
  for block in range(last):
    after = run(block, *read, jnp.stack([x for x, _ in states.values()]))
    ways = [
      (j, x, skipped)
      for x, (j, (_, skipped)) in zip(after, states.items(), strict=True)
    ]
    truth = after[list(states).index(0)]
    if 2 <= block < last - 2:
      ways += [
        (j + units[block % 2], x, (*skipped, block))
        for j, (x, skipped) in states.items()
        if j + units[block % 2] <= sum(units) * config.num_layers // 2
      ]
    likeness = np.asarray(cosine(jnp.stack([x for _, x, _ in ways]), truth))
    states = {}
    for i in np.argsort(-likeness, kind="stable"):  # the likeliest first
      j, x, skipped = ways[i]
      if not j or likeness[i] >= _LEAST_COSINE:
        states.setdefault(j, (x, skipped))
  return [of_blocks(states[j][1]) for j in sorted(states) if j]


def measured_speedup(
  config, loaded, skipped: SkippedLayers, batches, *, count: int
) -> float:
  """Tokens per second with `count` drafted, over those of plain decoding."""
  drafting = dataclasses.replace(
    DRAFTERS.entry("layer_skip")(tokens=count), skipped=skipped
  )
  models = pair.assemble(config, loaded, drafting=drafting)
  fast, plain = (
    pair.engine_of(config, models, baseline=x) for x in (False, True)
  )
  units = [
    engine.unit_of(*fast.run(batch), plain.run(batch)) for batch in batches
  ]
  return intervals.speedup(units)["speedup"]


def search(propose: Method, score, journal: Journal, count: int) -> list[dict]:
  """The journal's records once it has `count` sets, or all of the method.

  Its records are told to the method, in their order; `score` makes the others,
  `SkippedLayers -> record`, with what is maximised under "score".

  Raises:
    ValueError: if the journal has other sets than the method proposes.
  """
  told: float | None = None
  for number in tqdm.trange(count, disable=not sys.stderr.isatty()):
    try:
      skipped = next(propose) if told is None else propose.send(told)
    except StopIteration:
      break
    if number not in journal.batches:
      seconds, record = timing.timed(score, skipped)
      journal.add({"batch": number, **record, "seconds": seconds})
    record = journal.batches[number]
    if record | layers.as_json(skipped) != record:
      raise ValueError(
        f"set {number} of the journal is not the one that is proposed (by "
        "another version of the method?): --overwrite begins anew"
      )
    told = record["score"]
  numbers = sorted(n for n in journal.batches if isinstance(n, int))
  return [
    {k: v for k, v in journal.batches[n].items() if k != "batch"}
    for n in numbers
  ]


def completed(config, models: pair.Pair, batches):
  """Tokens and judged places (see `Scorer`) of prompts that are completed."""
  plain = pair.engine_of(config, models, baseline=True)
  texts = [
    (prompt.token_ids, completion.token_ids)
    for batch in batches
    for prompt, completion in zip(
      batch.prompts, plain.run(batch)[0], strict=True
    )
  ]
  shape = len(texts), max(len(p) + len(c) for p, c in texts)
  tokens, judged = np.zeros(shape, np.int32), np.zeros(shape, bool)
  for row, (prompt, completion) in enumerate(texts):
    count = len(prompt) + len(completion)
    tokens[row, :count] = [*prompt, *completion]
    judged[row, len(prompt) - 1 : count - 1] = True
  return tokens, judged


def run(_) -> int:
  """The command."""
  output = cli.OUTPUT.value
  if not output:
    raise cli.UserError("--output is required; see --help for an example")
  config = ml_collections.ConfigDict(cli.CONFIG.value.to_dict())
  config.drafter, config.rule = "plain", "token"  # the target drafts for itself
  if config.mesh:
    raise ValueError(f"layers are looked for on one device: {config.mesh!r}")
  results.check(output)
  loaded = pair.load(config)
  models = pair.assemble(config, loaded)
  module = checkpoints.load_module(config.target)
  num_layers = module.config.num_layers
  width = models.room(config.max_new_tokens)
  items = prompts.all_of(cli.PROMPTS.value, models.tokenizer, max_tokens=width)
  batches = list(
    make_batches(items, batch_size=config.batch_size, max_width=width)
  )
  search_of = {
    "method": _METHOD.value, "objective": _OBJECTIVE.value,
    "costs": _COSTS.value, "draft_tokens": _TOKENS.value,
    "seed": cli.SEED.value or 0,
  }  # fmt: skip
  asked = [str(item.token_ids) for item in items]
  settings = provenance.settings(config, prompts=asked, **search_of)
  journal = Journal(output, settings)
  if "costs" not in journal.batches:  # what was timed is not timed again
    new = (
      costs_by_bytes(module.config, _TOKENS.value)
      if _COSTS.value == "bytes"
      else costs_by_clock(module, _TOKENS.value)
    )
    journal.add({"batch": "costs", **vars(new)})
  known = {k: v for k, v in journal.batches["costs"].items() if k != "batch"}
  verify = {int(n): cost for n, cost in known["verify"].items()}
  costs = Costs(**known | {"verify": verify})
  tokens, judged = completed(config, models, batches)
  names = ("temperature", "top_k", "top_p", "min_p")
  scorer = Scorer(
    module, tokens, judged, {name: config[name] for name in names},
    vocab_size=models.tokenizer.vocab_size,
  )  # fmt: skip

  def score(skipped: SkippedLayers) -> dict:
    acceptance = scorer.acceptance(skipped)
    record = evaluation(skipped, acceptance, costs, num_layers)
    if _OBJECTIVE.value == "measured":
      count = record["num_speculative_tokens"]
      record["measured"] = measured_speedup(
        config, loaded, skipped, batches, count=count
      )
    return {**record, "score": record.get("measured", record["speedup"])}

  propose = (
    bayesian(num_layers, seed=search_of["seed"])
    if _METHOD.value == "bayesian"
    else (one for one in knapsack(scorer, costs))
  )
  evaluations = search(propose, score, journal, _EVALUATIONS.value)
  if not evaluations:
    raise ValueError(
      f"the method {_METHOD.value!r} has no set to propose for a target of "
      f"{num_layers} layers"
    )
  first = int(np.argmax([one["score"] for one in evaluations]))
  best = {"evaluations": first + 1, **evaluations[first]}
  kept = ("skip_attention", "skip_mlp", "num_speculative_tokens")
  result = {
    **{name: best[name] for name in kept},
    "best": best,
    "num_layers": num_layers,
    "costs": vars(costs),
    "search": search_of,
    "num_judged": int(judged.sum()),
    "evaluations": evaluations,
    **provenance.record(config),
  }
  results.write_json(output, result)
  journal.finish()
  print(table({output: result}))
  return 0


def table(results: dict[str, dict]) -> str:
  """Markdown: a row a search, of the best set, and the bound."""
  head = [
    "method", "costs", "sets", "best after", "attention + MLP skipped",
    "acceptance", "to break even", "draft pass", "predicted speed-up",
    "bound of that acceptance", "measured",
  ]  # fmt: skip
  rows = []
  for result in results.values():
    best, asked = result["best"], result["search"]
    skipped = [len(best[kind]) for kind in ("skip_attention", "skip_mlp")]
    numbers = [
      "none" if best.get(name) is None else f"{best[name]:.3f}"
      for name in ("acceptance", "break_even", "draft_cost", "speedup",
                   "bound", "measured")
    ]  # fmt: skip
    rows.append(
      [
        asked["method"], asked["costs"], str(len(result["evaluations"])),
        str(best["evaluations"]),
        f"{skipped[0]} + {skipped[1]} of {2 * result['num_layers']}", *numbers,
      ]
    )  # fmt: skip
  return report.table(head, rows)


if __name__ == "__main__":
  cli.run(run)
