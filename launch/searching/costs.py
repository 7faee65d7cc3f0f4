"""What a pass costs without some sub-layers, and what speed that predicts.

Costs are shares of a pass of the whole target over one token. "bytes" takes a
pass to cost the weights that it reads, however many tokens it is fed: what a
batch of one on an accelerator comes close to. "measured" times passes here: of
the target, of the target without its attentions and without its MLPs, and over
several tokens.
"""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from launch.searching.scorer import new_cache
from models.networks.description import TransformerConfig, mlp_weights
from models.networks.transformer import (
  SkippedLayers,
  Transformer,
  as_language_model,
)
from specjax.theory import throughput

MODELS = ("bytes", "measured")
_SLOTS = 256  # of the cache that passes are timed with
_REPEATS = 15


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
    """Of a pass without some sub-layers."""
    kept_attention = num_layers - len(set(skipped.attention))
    kept_mlp = num_layers - len(set(skipped.mlp))
    return self.rest + kept_attention * self.attention + kept_mlp * self.mlp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted:
  """What a drafter's acceptance and cost come to.

  Attributes:
    speedup: tokens per second over those of plain decoding.
    num_speculative_tokens: that give it, 1 or more.
  """

  speedup: float
  num_speculative_tokens: int


def predict(
  acceptance: float, draft: float, verify: dict[int, float]
) -> Predicted:
  """The largest predicted speed-up over numbers of drafted tokens.

  Args:
    acceptance: of each drafted token, all depths alike.
    draft: the cost of a draft pass.
    verify: see `Costs`; as many tokens are drafted as it has room for.
  """
  curve = throughput.verify_curve(verify)
  counts = np.arange(1, max(verify))
  rates = throughput.throughput(counts, acceptance, draft, curve(counts + 1))
  best = int(np.argmax(rates))
  return Predicted(
    speedup=float(rates[best]), num_speculative_tokens=int(counts[best])
  )


def bound(acceptance: float, costs: Costs) -> Predicted:
  """What no set of that acceptance can be above: all its layers are free."""
  return predict(acceptance, costs.rest, costs.verify)


def of_bytes(config: TransformerConfig, most: int) -> Costs:
  """Costs by weights; `most` is of drafted tokens."""
  c = config
  heads = c.num_heads + c.num_kv_heads
  attention = 2 * c.embed_dim * heads * c.head_dim
  mlp = mlp_weights(c.layer(0), c.embed_dim)
  rest = c.vocab_size * c.embed_dim  # the output projection
  whole = rest + c.num_layers * (attention + mlp)
  return Costs(
    attention=attention / whole,
    mlp=mlp / whole,
    rest=rest / whole,
    verify=dict.fromkeys(range(1, most + 2), 1.0),
  )


def measured(module: Transformer, most: int) -> Costs:
  """Costs by the clock of this machine, the least of some passes each."""
  every = tuple(range(module.config.num_layers))
  seconds = lambda fed, **skipped: _seconds(
    module, fed, SkippedLayers(**skipped)
  )
  whole = seconds(1)
  without_attention = seconds(1, attention=every)
  without_mlp = seconds(1, mlp=every)
  count = len(every)
  attention = max(whole - without_attention, 0) / whole / count
  mlp = max(whole - without_mlp, 0) / whole / count
  widths = sorted({1, 2, 4, most + 1})
  times = {fed: whole if fed == 1 else seconds(fed) for fed in widths}
  return Costs(
    attention=attention,
    mlp=mlp,
    rest=max(1 - count * (attention + mlp), 0.0),
    verify={fed: max(t / whole, 1.0) for fed, t in times.items()},
  )


def _seconds(module: Transformer, fed: int, skipped: SkippedLayers) -> float:
  model, params = as_language_model(module, skipped=skipped)
  cache = new_cache(module.config, 1, _SLOTS, module.dtype)
  cache = cache.replace(length=jnp.full((1,), _SLOTS // 2, jnp.int32))
  tokens = jnp.zeros((1, fed), jnp.int32)
  run: Callable = jax.jit(
    lambda params, cache: model.apply(params, tokens, cache)[0].logits
  )
  jax.block_until_ready(run(params, cache))
  times = []
  for _ in range(_REPEATS):
    start = time.perf_counter()
    jax.block_until_ready(run(params, cache))
    times.append(time.perf_counter() - start)
  return min(times)
