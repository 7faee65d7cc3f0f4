"""Verification rules along the contexts that a real pair meets.

A lossless decoder decodes the prompts, and every rule is
asked at every step what it would do with the very draft of that step: rules of
one draft law are compared on the same contexts and the same drafts, and no coin
is flipped (an expectation given the draft: Rao-Blackwell).
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm
from absl import flags

from launch import prompts
from launch.build import drafters
from launch.build import pair as pair_lib
from launch.build.drafting import with_tokens
from launch.build.pair import Pair
from launch.studies.rules.cases import Case
from launch.training import corpus
from specjax import intervals, random
from specjax import siblings as siblings_lib
from specjax.decode import Decoder, make_decoder
from specjax.runtime import requests
from specjax.runtime.engine import Batch, make_batches
from specjax.siblings import Siblings
from specjax.state import StopReason
from specjax.tree import Tree
from specjax.types import Drafter
from specjax.warp import make_sampling

NUM_PROMPTS = flags.DEFINE_integer(
  "num_prompts", 16, "Held-out prompts to complete.", lower_bound=2
)
NUM_CONTEXTS = flags.DEFINE_integer(
  "contexts_per_prompt", 12, "Decoding steps a prompt.", lower_bound=1
)
_PROMPT_TOKENS = 96
_BATCH_SIZE = 8


def held_out(models: Pair) -> tuple[list, list[Batch]]:
  """Held-out prompts, as many as the flag says, and their batches."""
  items = prompts.first_tokens(
    corpus.held_out_prompts(NUM_PROMPTS.value),
    models.tokenizer,
    num_tokens=_PROMPT_TOKENS,
  )
  return items, make_batches(
    items, batch_size=_BATCH_SIZE, max_width=_PROMPT_TOKENS
  )


def build_pair(config: ml_collections.ConfigDict) -> Pair:
  """The models of a config, whatever rule it names.

  Raises:
    ValueError: if no model draws the config's drafts; and as
      `launch.build.pair.build`.
  """
  drafting = drafters.of(config)
  drawn = (
    drafting.reads in ("model", "layers", "weights") and drafting.takes_policy
  )
  if not drawn or drafting.policy or drafting.siblings is not siblings_lib.IID:
    name = drafting.name
    raise ValueError(
      "rules are compared here on what a model draws, model(tokens=N, "
      "tree=paths(K)) or layer_skip, each with a tree and siblings of its own, "
      f"got {config.drafter!r}: compare others as systems, launch.evaluate "
      f"--systems='with_rule({name}, token), with_rule({name}, block)' "
      "--output=E.json, then launch.evaluate --compare E.json "
      f"--over='with_rule({name}, token)'"
    )
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

  Args:
    rows: what to measure; those of equal tree and siblings share contexts.
    models: from `build_pair`.
    config: the config; its rule is not looked at.
    batches: the prompts.
    max_contexts: decoding steps a prompt, at most.

  Returns:
    By row: `expected_accepted` drafted tokens a step, `block_efficiency` (one
    more) with its 95% interval over prompts, `total_variation` of the first
    token's law (the mean over contexts, null for lossless rules),
    `num_contexts`, and `Case.describe()`; but of the first row
    `block_efficiency_ratio` too, over that of the first row, with its interval
    paired by prompt.

  Raises:
    ValueError: if the models give no context without NaN.
  """
  groups: dict[tuple[Tree, Siblings], list[Case]] = {}
  for row in rows:
    groups.setdefault((row.tree, row.siblings), []).append(row)
  report: dict[str, dict] = {}
  columns: dict[str, tuple[np.ndarray, np.ndarray]] = {}
  progress = tqdm.tqdm(
    total=len(groups) * len(batches),
    unit="batch",
    disable=not sys.stderr.isatty(),
  )
  with progress:
    for (tree, siblings), group in groups.items():
      decoder = make_decoder(
        models.target,
        drafter=drafter(config, models, tree, siblings),
        rule="gumbel_list" if siblings.with_noise else "recursive",
        vocab_size=models.tokenizer.vocab_size,
      )
      asked = _Group(group, Walk(decoder, models, config, batches))
      for batch in batches:
        asked.add(batch, max_contexts)
        progress.update()
      report |= asked.report()
      columns |= asked.columns()
  first = columns[rows[0].name]
  for row in rows[1:]:
    report[row.name] |= _over(first, columns[row.name])
  return {row.name: report[row.name] for row in rows}


def _over(first, other) -> dict:
  """Ratio of block efficiencies, paired by prompt.

  Args:
    first, other: emitted tokens and contexts, `f64[prompts]` each.
  """
  top, bottom = [other[0], first[1]], [other[1], first[0]]
  sums = [[column.sum() for column in columns] for columns in (top, bottom)]
  return {
    "block_efficiency_ratio": float(np.prod(sums[0]) / np.prod(sums[1])),
    "block_efficiency_ratio_ci": intervals.interval(top, bottom),
  }


def drafter(config, models: Pair, tree: Tree, siblings: Siblings) -> Drafter:
  """The pair's drafter, for another tree and other siblings."""
  del config
  own = models.drafting.of_form(tree=tree, siblings=siblings)
  return drafters.make(own, models.draft, models.tokenizer.vocab_size)


class Walk:
  """Decodes with one draft law, step by step.

  Args:
    decoder: the decoder.
    models: from `build_pair`.
    config: the config.
    batches: all prompts that will be asked for.
  """

  def __init__(
    self,
    decoder: Decoder,
    models: Pair,
    config: ml_collections.ConfigDict,
    batches: Sequence[Batch],
  ):
    self._models, self._config = models, config
    # One buffer for all batches, so that a step is compiled once.
    self._init = jax.jit(
      functools.partial(
        decoder.init,
        buffer_length=max(b.width for b in batches) + config.max_new_tokens,
        stop_tokens=models.stop_tokens,
      )
    )
    self._step = jax.jit(decoder.step, donate_argnums=1)

  def steps(self, batch: Batch, most: int) -> Iterator[tuple[np.ndarray, Any]]:
    """The steps along the completions of a batch.

    Args:
      batch: the prompts.
      most: steps, at most.

    Yields:
      Which prompts' rows count, `bool[prompts]`, and what the decoder says of
      the step: the draft and the target's laws.
    """
    state = self._start(batch)
    for _ in range(most):
      done = np.asarray(state.done)
      if done.all():
        break
      state, info = self._step(self._models.params, state)
      # The laws of a row that NaNs ended are made up.
      broken = np.asarray(state.stop_reason) == StopReason.NAN_LOGITS
      yield ~(done | broken)[: len(batch.prompts)], info

  def _start(self, batch: Batch):
    """The state before the first step; rows that only fill up are done."""
    config = self._config
    tokens, lengths, row_ids = batch.arrays()
    budgets = np.full(batch.rows, config.max_new_tokens, np.int32)
    budgets[len(batch.prompts) :] = 0
    return self._init(
      self._models.params,
      tokens,
      lengths,
      random.row_keys(jax.random.key(config.seed), row_ids),
      max_new_tokens=budgets,
      sampling=make_sampling(
        batch.rows,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
      ),
    )


class _Group:
  """Asks every rule of a group at each step of a walk."""

  def __init__(self, group: Sequence[Case], walk: Walk):
    self._group, self._walk = group, walk
    self._ask = [jax.jit(functools.partial(_ask, row)) for row in group]
    # By prompt: contexts, and for every rule accepted tokens and distances.
    self._sums: dict[tuple, np.ndarray] = {}

  def add(self, batch: Batch, max_contexts: int) -> None:
    """Walks along the completions of a batch."""
    count = len(batch.prompts)
    sums = np.zeros((count, 2 * len(self._group) + 1))
    for counts, info in self._walk.steps(batch, max_contexts):
      found = jax.device_get(
        [ask(info.draft, info.target_log_probs) for ask in self._ask]
      )
      rows = batch.rows
      here = np.concatenate([np.ones((1, rows)), np.reshape(found, (-1, rows))])
      sums += np.where(counts[:, None], here.T[:count], 0)
    for prompt, row in zip(batch.prompts, sums, strict=True):
      name = requests.content_of(prompt)  # rows of one prompt are one unit
      self._sums[name] = self._sums.get(name, 0.0) + row

  def columns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Emitted tokens and contexts of every row, `f64[prompts]` each."""
    sums = self._by_prompt()
    return {
      row.name: (sums[:, 0] + sums[:, 1 + 2 * number], sums[:, 0])
      for number, row in enumerate(self._group)
    }

  def _by_prompt(self) -> np.ndarray:
    return np.array([self._sums[prompt] for prompt in sorted(self._sums)])

  def report(self) -> dict[str, dict]:
    """The numbers of every row of the group."""
    sums = self._by_prompt()
    contexts = sums[:, 0]
    total = contexts.sum()
    if not total:
      raise ValueError("no context to compare rules on: the models gave NaN")
    found = {}
    for number, row in enumerate(self._group):
      accepted, distance = sums[:, 1 + 2 * number], sums[:, 2 + 2 * number]
      mean = float(accepted.sum() / total)
      found[row.name] = {
        "expected_accepted": mean,
        "block_efficiency": 1 + mean,
        "block_efficiency_ci": intervals.ratio_interval(
          contexts + accepted, contexts, limits=(1, row.tree.max_depth + 1)
        ),
        "total_variation": None
        if row.rule.lossless
        else float(distance.sum() / total),
        "num_contexts": int(total),
        **row.describe(),
      }
    return found


def _ask(row: Case, draft, target_log_probs):
  """Expected accepted tokens and the first token's distance, `f32[2, B]`."""
  verification = row.rule.verify(draft, target_log_probs)
  accepted = expected_accepted(row.tree, verification)
  distance = verification.total_variation
  first = jnp.zeros_like(accepted) if distance is None else distance[:, 0]
  return jnp.stack([accepted, first])


def expected_accepted(tree: Tree, verification) -> jax.Array:
  """Expected accepted tokens of each draft, `f32[B]`."""
  return jnp.sum(verification.node_probs * tree.depth, axis=-1)
