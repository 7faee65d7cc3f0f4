r"""Searches for the sub-layers to skip when a target drafts for itself.

  python -m launch.layer_search --config=configs/embedded.py \
    --evaluations=100 --output=skip.json
  python -m launch.decode --config=configs/embedded.py \
    --config.drafter='layer_skip("skip.json")'

Every draft pass skips some of the 2L attentions and MLPs (Draft and Verify,
Zhang et al., ACL 2024). Tree-structured Parzen estimators (pip install
'specjax[search]') propose sets, which are scored by predicted speed-up: one
pass over the target's completions gives a set's acceptance, without compiling
for it, and the cost of a draft pass is the weights that it reads.
`launch.evaluate` measures what the best set is worth.

Prompts are as in launch.decode. Acceptance is measured over max_new_tokens of
each, at the config's temperature and truncation. The output file, which
layer_skip reads, lists every evaluation.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags
from jax import Array

from launch import cli, prompts, provenance, results
from launch.assembly import files, pair
from models import checkpoints
from models.networks.description import TransformerConfig
from models.networks.layers import active_weights
from models.networks.params import split
from models.networks.transformer import (
  Fed,
  SkippedLayers,
  Transformer,
  as_language_model,
)
from specjax import warp
from specjax.runtime.requests import make_batches
from specjax.theory import throughput
from specjax.types import ModelOutput

cli.reads(cli.CONFIG, cli.PROMPTS, cli.OUTPUT, cli.SEED)
_EVALUATIONS = flags.DEFINE_integer(
  "evaluations", 100, "Number of sets to score.", lower_bound=1
)
_TOKENS = flags.DEFINE_integer(
  "draft_tokens", 8, "Maximum draft length.", lower_bound=1
)


def draft_cost(config: TransformerConfig, skipped: SkippedLayers) -> float:
  """The share of the target's weights that a pass with skipped layers reads."""
  blocks = [active_weights(config, i) for i in range(config.num_layers)]
  attention, mlp = zip(*blocks, strict=True)
  output = config.vocab_size * config.embed_dim  # the projection to logits
  left = sum(attention[i] for i in skipped.attention)
  left += sum(mlp[i] for i in skipped.mlp)
  return 1 - left / (output + sum(attention) + sum(mlp))


def evaluation(
  skipped: SkippedLayers, acceptance: float, cost: float, most: int
) -> dict:
  """The record of a set: its best predicted speed-up and draft length.

  `acceptance` is per drafted token, `cost` is that of a draft pass in target
  passes, and `most` the maximum draft length.
  """
  counts = np.arange(1, most + 1)
  rates = throughput.throughput(counts, acceptance, cost, 1.0)
  return {
    **files.skipped_json(skipped), "acceptance": acceptance, "draft_cost": cost,
    "num_speculative_tokens": int(counts[np.argmax(rates)]),
    "speedup": float(rates.max()),
  }  # fmt: skip


def gated(module: Transformer, gates: Array, fed: Fed) -> ModelOutput:
  """Runs a model with sub-layers switched off, in one program for all sets.

  Args:
    module: the network, without recurrent layers or shared keys and values.
    gates: `bool[L, 2]`, whether each layer's attention and MLP are on.
    fed: from `Transformer.enter`, with a cache.
  """
  if len(module.config.cached) < len(module.layers):
    raise ValueError("recurrent or shared layers cannot be switched off")
  assert fed.cache is not None
  x = fed.x
  for index, layer in enumerate(module.layers):
    buffers = fed.cache.keys[index], fed.cache.values[index]
    out, _ = layer.attend(x, *fed.of(layer.spec), buffers, fed.start)
    after = jnp.where(gates[index, 0], x + out, x)
    # An MLP parallel to its attention reads the layer's input.
    out = layer.mlp_output(x if layer.spec.parallel else after)
    x = jnp.where(gates[index, 1], after + out, after)
    x = layer.finish(x, fed.per_layer_of(index))
  return module.leave(x)


def make_scorer(
  module: Transformer,
  tokens: np.ndarray,
  scored: np.ndarray,
  sampling: dict,
  *,
  vocab_size: int,
) -> Callable[[SkippedLayers], float]:
  """Makes a function from skipped sub-layers to their acceptance on some texts.

  The full target reads each text once. With layers skipped it reads the text
  again in one pass, where each token attends to the full target's cache before
  it and to itself, like the first draft token of a round. sum min(p, q) at a
  position is the acceptance probability there, lower for later draft tokens.

  Args:
    module: the target.
    tokens: `i32[B, T]`, texts that it emitted, right-padded.
    scored: `bool[B, T]`, the positions followed by an emitted token.
    sampling: settings of `make_sampling`, for both distributions.
    vocab_size: V, without padding.
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
  def acceptance(params, gates, tokens, target, cache):
    model = merge(params)
    positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    full = cache.replace(length=jnp.full((rows,), width, jnp.int32))
    seen = np.hstack([np.tri(width, k=-1), np.eye(width)]).astype(bool)
    fed = model.enter(tokens, full, positions=positions, mask=seen)
    draft = probs_of(gated(model, gates, fed).logits)
    each = jnp.sum(jnp.minimum(draft, target), axis=-1)
    # NaN counts as rejected.
    each = jnp.where(scored & ~jnp.isnan(each), each, 0)
    return jnp.sum(each) / jnp.sum(scored)

  target, cache = read(params, tokens)

  def score(skipped: SkippedLayers) -> float:
    skipped.check(num_layers)
    gates = np.ones((num_layers, 2), bool)
    gates[list(skipped.attention), 0] = False
    gates[list(skipped.mlp), 1] = False
    return float(acceptance(params, gates, tokens, target, cache))

  return score


def search(num_layers: int, score, *, count: int, seed: int) -> list[dict]:
  """Scores `count` sets proposed by Parzen estimators over 2L switches.

  `score` maps `SkippedLayers` to a record whose "speedup" is maximized.
  """
  try:
    import optuna
  except ImportError:
    raise cli.UserError(
      "optuna is needed: pip install -e '.[search]'"
    ) from None
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=10)
  study = optuna.create_study(direction="maximize", sampler=sampler)
  names = [f"{k} {i}" for i in range(num_layers) for k in ("attention", "mlp")]
  # A guess: every other layer, but neither the first nor the last.
  middle = range(1, num_layers - 1, 2)
  study.enqueue_trial({n: b // 2 in middle for b, n in enumerate(names)})
  records = []

  def objective(trial) -> float:
    skips = [trial.suggest_categorical(n, [False, True]) for n in names]
    if not any(skips):  # the full target is no draft
      return 0.0
    chosen = (np.flatnonzero(x).tolist() for x in (skips[::2], skips[1::2]))
    records.append(score(SkippedLayers(*map(tuple, chosen))))
    return records[-1]["speedup"]

  study.optimize(objective, n_trials=count)
  return records


def completed(config, models: pair.Pair, batches):
  """Completes prompts; returns `tokens` and `scored` of `make_scorer`."""
  plain = pair.engine_of(config, models, baseline=True)
  pairs = lambda batch: zip(batch.prompts, plain.run(batch)[0], strict=True)
  texts = [
    (prompt.token_ids, completion.token_ids)
    for batch in batches
    for prompt, completion in pairs(batch)
  ]
  shape = len(texts), max(len(p) + len(c) for p, c in texts)
  tokens, scored = np.zeros(shape, np.int32), np.zeros(shape, bool)
  for row, (prompt, completion) in enumerate(texts):
    count = len(prompt) + len(completion)
    tokens[row, :count] = [*prompt, *completion]
    scored[row, len(prompt) - 1 : count - 1] = True
  return tokens, scored


def run(_) -> int:
  """The command."""
  output = cli.OUTPUT.value
  config = ml_collections.ConfigDict(cli.CONFIG.value.to_dict())
  if config.mesh:
    raise cli.UserError("layers are searched on one device, without a mesh")
  config.drafter, config.rule = "plain", "token"  # the target drafts for itself
  results.check(output)
  models = pair.assemble(config, pair.load(config))
  module = checkpoints.load_module(config.target, jnp.dtype(config.dtype))
  width = models.room(config.max_new_tokens)
  items = prompts.all_of(cli.PROMPTS.value, models.tokenizer, max_tokens=width)
  batches = list(
    make_batches(items, batch_size=config.batch_size, max_width=width)
  )
  tokens, scored = completed(config, models, batches)
  names = ("temperature", "top_k", "top_p", "min_p")
  acceptance_of = make_scorer(
    module, tokens, scored, {name: config[name] for name in names},
    vocab_size=models.tokenizer.vocab_size,
  )  # fmt: skip
  score = lambda skipped: evaluation(
    skipped, acceptance_of(skipped), draft_cost(module.config, skipped),
    _TOKENS.value,
  )  # fmt: skip
  evaluations = search(
    module.config.num_layers, score, count=_EVALUATIONS.value,
    seed=cli.SEED.value or 0,
  )  # fmt: skip
  best = max(evaluations, key=lambda one: one["speedup"])
  result = best | {"num_judged": int(scored.sum()), "evaluations": evaluations}
  results.write_json(output, result | provenance.record(config))
  print(f"the best of {len(evaluations)} sets, in target passes:")
  for name, value in best.items():
    print(f"  {name:<24}{value}")
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
