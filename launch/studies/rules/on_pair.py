"""Verification rules along the contexts that a real pair meets.

A row of a report is named after its rule:

  NAME                            as in `specjax.rules.RULES`, or as requested
                                  ("typical(epsilon=0.2)")
  recursive (without_replacement) the same rule, other siblings
  block_transport 8x4             one of several shapes: 8 paths of 4 tokens

A lossless decoder decodes the prompts, and every rule is evaluated on the draft
of every step, by expectations given the draft (Rao-Blackwell); the end of a
text does not cut a path. Rules with i.i.d. siblings, or those drawn without
replacement, are compared on the same contexts and drafts: the decoder drafts as
many paths and tokens as any shape has, and a shape is the first of both.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm

from launch.assembly import pair as pair_lib
from launch.assembly import registry
from launch.assembly.drafting import Drafting, with_tokens
from launch.assembly.pair import Pair
from launch.evaluation import intervals
from specjax import calls, random, rules
from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.decode import make_decoder
from specjax.drafters.shared.arguments import drawing
from specjax.runtime import requests
from specjax.runtime.requests import Batch
from specjax.siblings import Siblings
from specjax.state import StopReason
from specjax.tree import Tree
from specjax.types import Rule
from specjax.warp import make_sampling

# Rules for a single path get one; all others get all K.
SINGLE_PATH = {"token", "block"} | {
  name for name in rules.RULES if not rules.get(name).lossless
}

# The siblings that a rule is compared on; i.i.d. if not listed.
SIBLINGS: dict[str, tuple[Siblings, ...]] = {
  "recursive": (siblings_lib.IID, siblings_lib.WITHOUT_REPLACEMENT),
  "traversal": (siblings_lib.IID, siblings_lib.WITHOUT_REPLACEMENT),
  "score_block": (siblings_lib.WITHOUT_REPLACEMENT,),
  "greedy_draft": (siblings_lib.GREEDY,),
  "hub": (siblings_lib.HUB,),
  "gumbel_list": (siblings_lib.SHARED_NOISE,),
}


# By row: the rule's name and its siblings, without `synthetic`.
ROWS: dict[str, tuple[str, Siblings]] = {
  name if not number else f"{name} ({siblings.name})": (name, siblings)
  for name in rules.RULES
  if name != "synthetic"
  for number, siblings in enumerate(SIBLINGS.get(name, (siblings_lib.IID,)))
}
# Siblings whose first few are drawn as if there were no more.
_NESTED = (siblings_lib.IID, siblings_lib.WITHOUT_REPLACEMENT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A row of a report: a rule, what is drafted, how siblings are drawn."""

  name: str
  rule: Rule
  tree: Tree
  siblings: Siblings

  def describe(self) -> dict:
    """The row's description in a JSON report."""
    return {
      "rule": self.rule.name,
      "lossless": self.rule.lossless,
      "siblings": self.siblings.name,
      "parents": list(self.tree.parents),
      "num_drafted": self.tree.num_drafted,
    }


def cases(
  chosen: str | None, shapes: Sequence[tuple[int, int]], vocab_size: int
) -> tuple[list[Case], dict[str, str]]:
  """The rows of a report, and the reason why each other row is left out.

  `chosen` is a row of `ROWS` or a list of rules; None for all that fit.

  Multi-draft rules get K separate paths of G tokens for each shape (K, G),
  except `hub`, which gets a binary tree because it needs two children at every
  node. Rules for a single path get one path of G tokens.
  """
  rows = ROWS
  if chosen:
    by_call = {name.replace(" ", ""): name for name in ROWS}
    named = [str(call) for call in calls.parse_list(chosen)]
    names = [by_call.get(name, name) for name in named]
    rows = {name: ROWS.get(name) or (name, siblings_lib.IID) for name in names}
  fitting, left_out = {}, {}
  for (row, (rule_name, siblings)), (count, depth) in itertools.product(
    rows.items(), shapes
  ):
    rule = rules.get(rule_name)
    count = 1 if rule_name.partition("(")[0] in SINGLE_PATH else count
    row += f" {count}x{depth}" if len(shapes) > 1 else ""
    try:
      tree = _tree(rule_name, count, depth)
      rule.check(tree, siblings)
      drawing(None, tree, siblings, vocab_size)
    except ValueError as error:
      if chosen and len(shapes) == 1:
        raise
      left_out[row] = str(error)
      continue
    fitting[row] = Case(name=row, rule=rule, tree=tree, siblings=siblings)
  if not fitting:
    raise ValueError(f"no rule fits a shape: {left_out}")
  return [*fitting.values()], left_out


def _tree(rule_name: str, num_drafts: int, depth: int) -> Tree:
  """The tree for a rule."""
  if rule_name == "hub":
    if num_drafts != 2 or depth > 6:  # deeper ones take minutes to compile
      raise ValueError("rule 'hub' is compared on 2x1 to 2x6")
    return tree_lib.k_ary(*[2] * depth)
  return tree_lib.paths(depth, num_drafts)


def drafting_of(config: ml_collections.ConfigDict) -> Drafting:
  """The drafter of a config; raises ValueError if rules cannot be compared."""
  drafting = registry.of(config)
  drawn = drafting.takes_policy and drafting.siblings is siblings_lib.IID
  if not drawn or drafting.policy:
    raise ValueError(
      "rules are compared on drafts drawn token by token, such as "
      f"model(tokens=N, tree=paths(K)), got {config.drafter!r}: compare others "
      "with launch.evaluate --systems='with_rule(..., token), ...'"
    )
  return drafting


def build_pair(config: ml_collections.ConfigDict) -> Pair:
  """The models of a config, whatever rule it names."""
  drafting = drafting_of(config)
  config = ml_collections.ConfigDict(config.to_dict())
  config.rule = "token"
  one = with_tokens(drafting, drafting.tree.max_depth)
  models = pair_lib.load(config, drafting=one)
  return pair_lib.assemble(config, models, drafting=one)


def measure(
  rows: Sequence[Case],
  models: Pair,
  config: ml_collections.ConfigDict,
  batches: Sequence[Batch],
  *,
  max_contexts: int,
) -> dict[str, dict]:
  """Measures every rule along the contexts of its group.

  Returns:
    By row: `expected_accepted` drafted tokens per step, `block_efficiency` (one
    more) with its 95% interval over prompts, `total_variation` of the first
    token's distribution (the mean over contexts, null for lossless rules),
    `num_contexts`, and `Case.describe()`; except for the first row also
    `block_efficiency_ratio` to the first row, with its interval paired by
    prompt.
  """
  groups: dict[tuple[Siblings, Tree | None], list[Case]] = {}
  for row in rows:
    one_walk = row.siblings in _NESTED
    key = row.siblings, None if one_walk else row.tree
    groups.setdefault(key, []).append(row)
  report: dict[str, dict] = {}
  columns: dict[str, tuple[np.ndarray, np.ndarray]] = {}
  for group in groups.values():
    contexts, sums = _walk(
      group, models, config, batches, max_contexts=max_contexts
    )
    total = contexts.sum()
    for number, row in enumerate(group):
      accepted, distance = sums[:, number].T
      columns[row.name] = contexts + accepted, contexts
      report[row.name] = {
        "expected_accepted": float(accepted.sum() / total),
        **intervals.ratio(
          "block_efficiency", [contexts + accepted], [contexts],
          limits=(1, row.tree.max_depth + 1),
        ),
        "total_variation": None
        if row.rule.lossless
        else float(distance.sum() / total),
        "num_contexts": int(total),
        **row.describe(),
      }  # fmt: skip
  emitted, calls = columns[rows[0].name]
  for row in rows[1:]:  # paired by prompt
    top, bottom = columns[row.name]
    report[row.name] |= intervals.ratio(
      "block_efficiency_ratio", [top, calls], [bottom, emitted]
    )
  return {row.name: report[row.name] for row in rows}


def _walk(group, models, config, batches, *, max_contexts):
  """Contexts of each prompt, `f64[prompts]`, and its sums by rule.

  The sums are `f64[prompts, rules, 2]`: expected accepted tokens, and the first
  token's distance. Rows of the same prompt are merged.
  """
  siblings, tree = group[0].siblings, group[0].tree
  if siblings in _NESTED:
    depth = max(row.tree.max_depth for row in group)
    tree = tree_lib.paths(depth, max(row.tree.max_children for row in group))
  drafting = models.drafting.of_form(tree=tree, siblings=siblings)
  vocab = models.tokenizer.vocab_size
  decoder = make_decoder(
    models.target,
    drafter=registry.make(drafting, models.source, vocab),
    rule="gumbel_list" if siblings.with_noise else "recursive",
    vocab_size=vocab,
  )
  rates = [jax.jit(functools.partial(_rate, row)) for row in group]
  # All batches share a buffer size, so that a step compiles once.
  init = jax.jit(
    functools.partial(
      decoder.init,
      buffer_length=max(b.width for b in batches) + config.max_new_tokens,
      stop_tokens=models.stop_tokens,
    )
  )
  step = jax.jit(decoder.step, donate_argnums=1)
  warp = {n: config[n] for n in ("temperature", "top_k", "top_p", "min_p")}
  sums: dict[tuple, np.ndarray] = {}
  contexts: dict[tuple, int] = {}
  for batch in tqdm.tqdm(batches, unit="batch", disable=None):
    units = [requests.content_of(prompt) for prompt in batch.prompts]
    contexts |= {unit: contexts.get(unit, 0) for unit in units}
    tokens, lengths, row_ids = batch.arrays()
    budgets = np.full(batch.rows, config.max_new_tokens, np.int32)
    budgets[len(units) :] = 0  # padding rows are done at once
    state = init(
      models.params, tokens, lengths,
      random.row_keys(jax.random.key(config.seed), row_ids),
      max_new_tokens=budgets, sampling=make_sampling(batch.rows, **warp),
    )  # fmt: skip
    for _ in range(max_contexts):
      done = np.asarray(state.done)
      if done.all():
        break
      state, info = step(models.params, state)
      # A row that ended with NaN has no distributions.
      broken = np.asarray(state.stop_reason) == StopReason.NAN_LOGITS
      seen = np.array(
        [rate(info.draft, info.target_log_probs) for rate in rates], np.float64
      )
      for row in np.flatnonzero(~(done | broken)[: len(units)]):
        sums[units[row]] = sums.get(units[row], 0.0) + seen[..., row]
        contexts[units[row]] += 1
  if not sums:
    raise ValueError("no contexts to compare rules on: the logits are NaN")
  none = np.zeros_like(next(iter(sums.values())))
  names = sorted(contexts)
  return (
    np.array([contexts[name] for name in names], float),
    np.array([sums.get(name, none) for name in names]),
  )


def _rate(row: Case, draft, target_log_probs):
  """Expected accepted tokens and the first token's distance, `f32[2, B]`."""
  if row.tree != draft.tree:
    nodes = [0]  # by the ranks on their paths
    for parent, rank in zip(
      row.tree.parents[1:], row.tree.rank[1:], strict=True
    ):
      nodes.append(draft.tree.children[nodes[parent]][rank])
    at = np.array(nodes)
    target_log_probs = target_log_probs[:, at]
    draft = dataclasses.replace(
      draft, tree=row.tree, tokens=draft.tokens[:, at],
      log_probs=draft.log_probs[:, at],
    )  # fmt: skip
  verification = row.rule.verify(draft, draft.topology(), target_log_probs)
  accepted = expected_accepted(row.tree, verification)
  distance = verification.total_variation
  first = jnp.zeros_like(accepted) if distance is None else distance[:, 0]
  return jnp.stack([accepted, first])


def expected_accepted(tree: Tree, verification) -> jax.Array:
  """Expected accepted tokens of each draft, `f32[B]`."""
  return jnp.sum(verification.node_probs * tree.depth, axis=-1)
