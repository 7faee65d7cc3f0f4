"""Verification rules on two distributions, the same in every context.

If all drafts can be enumerated, numbers are exact: each draft's outcome under
the shipped rule, summed in float64. Otherwise drafts are sampled.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from launch.studies.rules import on_pair
from launch.studies.rules.on_pair import Case
from specjax import exact, random
from specjax.drafters.shared import levels
from specjax.drafters.shared.arguments import Drawing
from specjax.theory.optimum import iid_optimum
from specjax.types import Context, LanguageModel, ModelOutput
from specjax.warp import make_sampling

# Limit of enumeration: drafts x nodes x tokens, where a rule's own tables count
# as 64 tokens. About 3 GiB for the rule with the largest.
_MAX_ENUMERATED = 4_000_000
# Sampling's limit at a time and its total budget, in the same unit; and the
# minimum and maximum number of drafts.
_SAMPLED_AT_ONCE, _SAMPLED = 1 << 22, 1 << 24
_MIN_SAMPLES, _MAX_SAMPLES = 1024, 8192


def compare(
  draft: np.ndarray,
  target: np.ndarray,
  chosen: str | None,
  shape: tuple[int, int],
  *,
  seed: int,
) -> dict:
  """The report on two distributions, `f64[V]`; see `on_pair.cases`."""
  rows, left_out = on_pair.cases(chosen, [shape], len(target))
  count, length = shape
  measured = functools.lru_cache(
    lambda row: evaluate(row, draft, target, seed=seed)
  )
  if length == 1:
    optimum = iid_optimum(draft, target, count)
  else:
    (node_by_node,), _ = on_pair.cases("transport", [shape], len(target))
    optimum = measured(node_by_node)["acceptance"]
  share = lambda row: (
    measured(row)["acceptance"] / optimum if optimum > 0 else None
  )
  return {
    "optimum": optimum,
    "rules": {
      row.name: measured(row) | {"share_of_optimum": share(row)} for row in rows
    },
    "left_out": left_out,
  }


def evaluate(
  row: Case, draft: np.ndarray, target: np.ndarray, *, seed: int
) -> dict:
  """A rule's acceptance, and the distance of its output distribution."""
  vocab, nodes = len(target), row.tree.num_nodes
  numbers = vocab**row.tree.num_drafted * nodes * max(vocab, 64)
  enumerable = not row.siblings.with_noise and numbers <= _MAX_ENUMERATED
  if enumerable:
    with jax.enable_x64(True):
      block = exact.block_law(
        row.rule,
        row.tree,
        lambda context: draft,
        lambda context: target,
        siblings=row.siblings,
      )
    acceptance, error = block.expected_accepted, None
    distance = block.total_variation
  else:
    acceptance, error, distance = sample(row, draft, target, seed=seed)
  return {
    "acceptance": acceptance,
    "total_variation": distance,
    "method": "exact" if enumerable else "sampled",
    "standard_error": error,
    **row.describe(),
  }


def sample(row: Case, draft: np.ndarray, target: np.ndarray, *, seed: int):
  """Like `evaluate`, on sampled drafts, in float32.

  Returns:
    Expected accepted tokens and its standard error; and the distance of the
    next token's distribution, as a lossy rule reports it, or None.
  """
  vocab, tree = len(target), row.tree
  size = tree.num_nodes * max(vocab, 64) * (1 + row.siblings.with_noise)
  rows = min(max(_SAMPLED_AT_ONCE // size, 1), 512)
  total = min(max(_SAMPLED // size, _MIN_SAMPLES), _MAX_SAMPLES)
  with np.errstate(divide="ignore"):
    log_laws = [np.log(law).astype(np.float32) for law in (draft, target)]
  everywhere = lambda law, width: jnp.broadcast_to(law, (1, width, vocab))
  # A draft model whose parameters are its distribution, without a cache.
  model = LanguageModel(
    vocab_size=vocab,
    init_cache=lambda batch, slots: None,
    apply=lambda params, tokens, cache, **_: (
      ModelOutput(logits=everywhere(params, tokens.shape[1])),
      cache,
    ),
  )

  def one(key, log_draft, log_target):
    keys = key[None]
    context = Context(
      tokens=jnp.zeros((1, 1), jnp.int32),
      length=jnp.ones((1,), jnp.int32),
      max_depth=jnp.full((1,), tree.max_depth, jnp.int32),
      numbers=random.drafted_numbers(keys, tree.num_drafted),
      sampling=make_sampling(1),
      keys=keys,
      row_keys=keys,
    )
    drawing = Drawing(tree=tree, siblings=row.siblings, vocab_size=vocab)
    drafted, _ = levels.draft_tree(
      model, log_draft, None, log_draft[None], context, drawing
    )
    verification = row.rule.verify(
      drafted, drafted.topology(), everywhere(log_target, tree.num_nodes)
    )
    distance = verification.total_variation
    return (
      on_pair.expected_accepted(tree, verification)[0],
      None if distance is None else distance[0, 0],
    )

  # Only over keys: what depends on p and q alone is computed once per batch.
  batch = jax.jit(jax.vmap(one, (0, None, None)))
  keys = jax.random.split(jax.random.key(seed), -(-total // rows) * rows)
  parts = [
    jax.device_get(batch(some, *log_laws)) for some in keys.reshape(-1, rows)
  ]
  accepted, distances = (
    None if column[0] is None else np.concatenate(column).astype(np.float64)
    for column in zip(*parts, strict=True)
  )
  return (
    float(accepted.mean()),
    float(accepted.std(ddof=1) / np.sqrt(len(accepted))),
    None if distances is None else float(distances.mean()),
  )
