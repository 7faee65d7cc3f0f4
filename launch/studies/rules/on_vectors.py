"""Verification rules on two laws that every context has.

Where all drafts can be enumerated the numbers are exact: each draft's outcome
through the shipped rule, summed in float64. Else drafts are sampled.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from launch.studies.rules import cases, on_pair
from launch.studies.rules.cases import Case
from specjax import exact, random
from specjax import rules as rules_lib
from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.drafters.shared import levels
from specjax.theory.optimum import iid_optimum
from specjax.types import Context, LanguageModel, ModelOutput
from specjax.warp import make_sampling

# What enumeration may hold: drafts x nodes x tokens, where a rule's own tables
# count as those of 64 tokens. About 3 GiB for the hungriest rule.
_MAX_ENUMERATED = 4_000_000
# What sampling may hold at a time, and should go through, in the same unit; and
# the least and most drafts sampled.
_SAMPLED_AT_ONCE, _SAMPLED = 1 << 22, 1 << 24
_MIN_SAMPLES, _MAX_SAMPLES = 1024, 8192
_LONGEST_LAW = 64  # a longer one is not worth sampling


def compare(
  draft: np.ndarray,
  target: np.ndarray,
  asked: str,
  *,
  count: int,
  length: int,
  seed: int,
) -> dict:
  """The report of `launch.studies.rules` on two laws.

  Args:
    draft, target: `f64[V]`.
    asked: "all", or one rule as in `launch.studies.rules.cases.cases`.
    count: K.
    length: G.
    seed: of sampled drafts.
  """
  rows, left_out = cases.cases(
    asked,
    num_drafts=count,
    num_speculative_tokens=length,
    vocab_size=len(target),
  )
  measured = functools.lru_cache(
    lambda row: evaluate(row, draft, target, seed=seed)
  )
  error = None
  if length == 1:
    optimum = iid_optimum(draft, target, count)
    optimum_is = f"optimal transport of {count} i.i.d. drafts"
  else:
    best = Case(
      name="transport",
      rule=rules_lib.get("transport"),
      tree=tree_lib.paths(length, count),
      siblings=siblings_lib.IID,
    )
    optimum, error = (
      measured(best)[key] for key in ("acceptance", "standard_error")
    )
    optimum_is = (
      f"expected accepted tokens of rule transport on {count} i.i.d. paths of "
      f"{length} tokens: the optimum node by node"
    )
  rows_of = {}
  for row in rows:
    values = measured(row)
    share = values["acceptance"] / optimum if optimum > 0 else None
    share_error = None
    if share is not None and values["standard_error"] is not None:
      # The optimum, where it is sampled too, has an error from other drafts.
      share_error = math.hypot(values["standard_error"], share * (error or 0))
      share_error /= optimum
    rows_of[row.name] = {
      **values,
      "share_of_optimum": share,
      "share_standard_error": share_error,
    }
  return {
    "optimum": optimum,
    "optimum_is": optimum_is,
    "optimum_standard_error": error,
    "num_drafts": count,
    "num_speculative_tokens": length,
    "rules": rows_of,
    "left_out": left_out,
  }


def evaluate(
  row: Case, draft: np.ndarray, target: np.ndarray, *, seed: int
) -> dict:
  """Acceptance, output law and distance of one rule.

  Args:
    row: the rule and what it is given.
    draft, target: `f64[V]`.
    seed: of sampled drafts.

  Returns:
    The row's entry in the report, without its share of the optimum.
  """
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
    law = block.output.sum(axis=tuple(range(1, block.output.ndim)))
    acceptance, error = block.expected_accepted, None
    distance = block.total_variation
  else:
    acceptance, error, law, distance = sample(row, draft, target, seed=seed)
  return {
    "acceptance": acceptance,
    "output_law": None if law is None else law.tolist(),
    "total_variation": distance,
    "method": "exact" if enumerable else "sampled",
    "standard_error": error,
    **row.describe(),
  }


def sample(row: Case, draft: np.ndarray, target: np.ndarray, *, seed: int):
  """As `evaluate`, on sampled drafts, in float32.

  Returns:
    Expected accepted tokens and its standard error; the next token's law, or
    None if it is long; and its distance from the target, as a lossy rule
    reports it, or None.
  """
  vocab, tree = len(target), row.tree
  size = tree.num_nodes * max(vocab, 64) * (1 + row.siblings.with_noise)
  rows = min(max(_SAMPLED_AT_ONCE // size, 1), 512)
  total = min(max(_SAMPLED // size, _MIN_SAMPLES), _MAX_SAMPLES)
  with np.errstate(divide="ignore"):
    log_laws = [np.log(law).astype(np.float32) for law in (draft, target)]
  everywhere = lambda law, width: jnp.broadcast_to(law, (1, width, vocab))
  # A draft model whose parameters are its law, and which keeps nothing in mind.
  model = LanguageModel(
    vocab_size=vocab,
    init_cache=lambda batch, slots: None,
    apply=lambda params, tokens, cache, **_: (
      ModelOutput(logits=everywhere(params, tokens.shape[1])),
      cache,
    ),
  )
  first = tree.paths[1:, 1]  # by node: the first drafted one on its path

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
    drafted, _ = levels.draft_tree(
      model, log_draft, None, log_draft[None], context, tree=tree,
      siblings=row.siblings, vocab_size=vocab,
    )  # fmt: skip
    verification = row.rule.verify(
      drafted, everywhere(log_target, tree.num_nodes)
    )
    # The next token is drafted, unless the walk ends at the root.
    law = None
    if vocab <= _LONGEST_LAW:
      stay, onward = (
        verification.node_probs[0, 0],
        verification.node_probs[0, 1:],
      )
      rest = jnp.exp(verification.next_log_probs(jnp.zeros((1,), jnp.int32))[0])
      law = (stay * rest).at[drafted.tokens[0, first]].add(onward)
    distance = verification.total_variation
    return (
      on_pair.expected_accepted(tree, verification)[0],
      law,
      None if distance is None else distance[0, 0],
    )

  # Over keys alone: what depends on the laws only is computed once a batch.
  batch = jax.jit(jax.vmap(one, (0, None, None)))
  keys = jax.random.split(jax.random.key(seed), -(-total // rows) * rows)
  parts = [
    jax.device_get(batch(some, *log_laws)) for some in keys.reshape(-1, rows)
  ]
  accepted, laws, distances = (
    None if column[0] is None else np.concatenate(column).astype(np.float64)
    for column in zip(*parts, strict=True)
  )
  error = accepted.std(ddof=1) / np.sqrt(len(accepted))
  return (
    float(accepted.mean()),
    float(error),
    None if laws is None else laws.mean(axis=0) / laws.mean(axis=0).sum(),
    None if distances is None else float(distances.mean()),
  )
