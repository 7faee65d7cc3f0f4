r"""Searches for the sub-layers that a target skips to draft for itself.

  python -m launch.layer_search --config=configs/embedded.py \
    --evaluations=100 --output=skip.json
  python -m launch.decode --config=configs/embedded.py \
    --config.drafter='layer_skip("skip.json")'

Of the 2L attentions and MLPs some set is skipped in every draft pass (Draft and
Verify, Zhang et al., ACL 2024). Sets are proposed by tree-structured Parzen
estimators (pip install 'specjax[search]'). --objective is predicted, the
speed-up of a throughput formula (a pass over texts that the target emitted
gives the acceptance of a set, no program is compiled for it, and a draft pass
costs the weights that it reads), or measured by decoding the same prompts: the
truth, and minutes a set.

Prompts are as of launch.decode, the acceptance that of the config's temperature
and truncations over max_new_tokens of each. OUT.json is what layer_skip reads,
with every evaluation. A run that was stopped goes on from OUT.json.journal.
"""

import dataclasses
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags
from jax import Array

from launch import cli, prompts, provenance, results
from launch.assembly import layers, pair
from launch.assembly.registry import DRAFTERS
from models import checkpoints
from models.networks.description import (
  TransformerConfig,
  attention_weights,
  mlp_weights,
)
from models.networks.params import split
from models.networks.transformer import (
  Fed,
  SkippedLayers,
  Transformer,
  as_language_model,
)
from specjax import intervals, warp
from specjax.runtime import engine
from specjax.runtime.requests import make_batches
from specjax.theory import throughput
from specjax.types import ModelOutput

cli.reads(cli.CONFIG, cli.PROMPTS, cli.OUTPUT, cli.SEED)
_OBJECTIVE = flags.DEFINE_enum(
  "objective", "predicted", ["predicted", "measured"], "What is maximised."
)
_EVALUATIONS = flags.DEFINE_integer(
  "evaluations", 100, "Sets that are scored.", lower_bound=1
)
_TOKENS = flags.DEFINE_integer(
  "draft_tokens", 8, "Drafted tokens, at most.", lower_bound=1
)


def draft_cost(config: TransformerConfig, skipped: SkippedLayers) -> float:
  """Weights that a pass without some sub-layers reads, over those of all."""
  c, every = config, range(config.num_layers)
  kept = lambda weights, left_out: sum(
    weights(c.layer(i), c.embed_dim) for i in every if i not in left_out
  )
  read = lambda attention, mlp: (
    c.vocab_size * c.embed_dim  # the output projection
    + kept(attention_weights, attention)
    + kept(mlp_weights, mlp)
  )
  return read(skipped.attention, skipped.mlp) / read((), ())


def evaluation(
  skipped: SkippedLayers, acceptance: float, cost: float, most: int
) -> dict:
  """The record of a set: its best predicted speed-up, and from how many tokens.

  Args:
    skipped: the set.
    acceptance: of each drafted token, all depths alike.
    cost: of a draft pass, in target passes.
    most: tokens that may be drafted.
  """
  counts = np.arange(1, most + 1)
  rates = throughput.throughput(counts, acceptance, cost, 1.0)
  return {
    **layers.as_json(skipped),
    "acceptance": acceptance,
    "draft_cost": cost,
    "num_speculative_tokens": int(counts[np.argmax(rates)]),
    "speedup": float(rates.max()),
  }


def gated(module: Transformer, gates: Array, fed: Fed) -> ModelOutput:
  """The output of the sub-layers whose gates are open.

  One compiled program for every set: all sub-layers are computed, and what a
  gate is closed to is not added.

  Args:
    module: the network.
    gates: `bool[L, 2]`, of attention and MLP of each layer.
    fed: from `Transformer.enter`, with a cache.

  Raises:
    ValueError: if layers are recurrent, or attend to keys and values of others.
  """
  if len(module.config.cached) < len(module.layers):
    raise ValueError(
      "layers that are recurrent, or attend to keys and values of others, "
      "cannot be switched off"
    )
  assert fed.cache is not None
  x = fed.x
  for index, layer in enumerate(module.layers):
    buffers = fed.cache.keys[index], fed.cache.values[index]
    out, _ = layer.attended(x, *fed.of(layer.spec), buffers, fed.start)
    after = jnp.where(gates[index, 0], x + out, x)
    # An MLP beside its attention reads what the layer was given.
    out = layer.fed_forward(x if layer.spec.parallel else after)
    x = jnp.where(gates[index, 1], after + out, after)
    x = layer.finished(x, fed.per_layer_of(index))
  return module.leave(x)


def make_scorer(
  module: Transformer,
  tokens: np.ndarray,
  judged: np.ndarray,
  sampling: dict,
  *,
  vocab_size: int,
) -> Callable[[SkippedLayers], float]:
  """The acceptance of any set of skipped sub-layers on some texts, in one pass.

  The whole target reads a text once; the thinned one reads it again with each
  token at its own place, seeing the slots that the target filled before it and
  its own, as a draft's first token does. sum min(p, q) of the distributions at
  a place is the probability that a token drafted there is accepted. Deeper
  tokens see thinned slots too: to take all depths for equal is optimistic.

  Args:
    module: the target.
    tokens: `i32[B, T]`, texts that it emitted, right-padded.
    judged: `bool[B, T]`, the places after which an emitted token stands.
    sampling: settings of `make_sampling`, for both distributions.
    vocab_size: V, the number of real tokens.
  """
  merge, params = split(module)
  (rows, width), num_layers = tokens.shape, module.config.num_layers
  settings = warp.make_sampling(rows, **sampling)
  probs_of = lambda logits: jnp.exp(
    warp.warp(logits[..., :vocab_size], settings)
  )

  @jax.jit
  def read(params, tokens):
    cache = as_language_model(module)[0].init_cache(rows, 2 * width)
    output, cache = merge(params)(tokens, cache)
    return probs_of(output.logits), cache

  @jax.jit
  def acceptance(params, gates, tokens, whole, cache):
    model = merge(params)
    positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    full = cache.replace(length=jnp.full((rows,), width, jnp.int32))
    seen = np.hstack([np.tri(width, k=-1), np.eye(width)]).astype(bool)
    fed = model.enter(tokens, full, positions=positions, mask=seen)
    thin = probs_of(gated(model, gates, fed).logits)
    each = jnp.sum(jnp.minimum(thin, whole), axis=-1)
    # What is no distribution is accepted never.
    each = jnp.where(judged & ~jnp.isnan(each), each, 0)
    return jnp.sum(each) / jnp.sum(judged)

  whole, cache = read(params, tokens)

  def score(skipped: SkippedLayers) -> float:
    skipped.check(num_layers)
    gates = np.ones((num_layers, 2), bool)
    gates[list(skipped.attention), 0] = False
    gates[list(skipped.mlp), 1] = False
    return float(acceptance(params, gates, tokens, whole, cache))

  return score


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


def search(
  num_layers: int, score, *, count: int, journal: str, settings: dict
) -> list[dict]:
  """Records of sets that Parzen estimators over 2L switches propose.

  Args:
    num_layers: L.
    score: `SkippedLayers -> record`, with what is maximised under "score".
    count: how many are proposed, with those that the journal has.
    journal: path of what optuna goes on from.
    settings: of the search, "seed" among them: those of the journal.

  Raises:
    ValueError: if optuna is not installed, or the journal has other settings.
  """
  try:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
  except ImportError:
    raise ValueError(
      "layers are searched by optuna: pip install -e '.[search]'"
    ) from None
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  study = optuna.create_study(
    study_name="layers",
    direction="maximize",
    storage=JournalStorage(JournalFileBackend(journal)),
    load_if_exists=True,
  )
  if study.user_attrs.setdefault("settings", settings) != settings:
    raise ValueError(
      f"{journal} is of a search with other settings: --overwrite begins anew"
    )
  names = [f"{k} {i}" for i in range(num_layers) for k in ("attention", "mlp")]
  if not study.trials:
    study.set_user_attr("settings", settings)
    # A guess: every other layer, but neither the first nor the last.
    middle = range(1, num_layers - 1, 2)
    study.enqueue_trial({n: b // 2 in middle for b, n in enumerate(names)})
  # What was drawn before a stop is not drawn again.
  study.sampler = optuna.samplers.TPESampler(
    seed=settings["seed"] + len(study.trials), n_startup_trials=10
  )

  def objective(trial) -> float:
    skips = [trial.suggest_categorical(n, [False, True]) for n in names]
    if not any(skips):  # the whole target would be no draft
      return 0.0
    record = score(
      SkippedLayers(
        attention=tuple(i for i in range(num_layers) if skips[2 * i]),
        mlp=tuple(i for i in range(num_layers) if skips[2 * i + 1]),
      )
    )
    trial.set_user_attr("record", record)
    return record["score"]

  done = lambda: study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
  study.optimize(objective, n_trials=max(count - len(done()), 0))
  return [t.user_attrs["record"] for t in done() if "record" in t.user_attrs]


def completed(config, models: pair.Pair, batches):
  """Tokens and judged places of prompts that are completed (`make_scorer`)."""
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
  width = models.room(config.max_new_tokens)
  items = prompts.all_of(cli.PROMPTS.value, models.tokenizer, max_tokens=width)
  batches = list(
    make_batches(items, batch_size=config.batch_size, max_width=width)
  )
  settings = provenance.settings(
    config, prompts=[str(item.token_ids) for item in items],
    objective=_OBJECTIVE.value, draft_tokens=_TOKENS.value,
    seed=cli.SEED.value or 0,
  )  # fmt: skip
  journal = pathlib.Path(f"{output}.journal")
  if cli.OVERWRITE.value:
    journal.unlink(missing_ok=True)
  tokens, judged = completed(config, models, batches)
  names = ("temperature", "top_k", "top_p", "min_p")
  acceptance_of = make_scorer(
    module, tokens, judged, {name: config[name] for name in names},
    vocab_size=models.tokenizer.vocab_size,
  )  # fmt: skip

  def score(skipped: SkippedLayers) -> dict:
    cost = draft_cost(module.config, skipped)
    record = evaluation(skipped, acceptance_of(skipped), cost, _TOKENS.value)
    if _OBJECTIVE.value == "measured":
      count = record["num_speculative_tokens"]
      record["measured"] = measured_speedup(
        config, loaded, skipped, batches, count=count
      )
    return {**record, "score": record.get("measured", record["speedup"])}

  evaluations = search(
    module.config.num_layers, score, count=_EVALUATIONS.value,
    journal=str(journal), settings=settings,
  )  # fmt: skip
  if not evaluations:
    raise ValueError("no set was scored: raise --evaluations")
  best = max(evaluations, key=lambda one: one["score"])
  kept = ("skip_attention", "skip_mlp", "num_speculative_tokens")
  result = {
    **{name: best[name] for name in kept}, "best": best,
    "objective": _OBJECTIVE.value, "num_judged": int(judged.sum()),
    "evaluations": evaluations,
    **provenance.record(config),
  }  # fmt: skip
  results.write_json(output, result)
  journal.unlink()
  print(f"the best of {len(evaluations)} sets, in target passes:")
  for name, value in best.items():
    print(f"  {name:<24}{value}")
  return 0


if __name__ == "__main__":
  cli.run(run)
