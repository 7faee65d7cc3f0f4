"""Which settings of a draft go together; each check says why where they do not.

What a family of drafters can do stands in `launch.drafting`; here is what ends
its drafts (`config.depth`), lets them give way to what a text repeats
(`config.repeats`), or changes their length between rounds (`config.ladder`),
and what else may be set beside it.
"""

import dataclasses

import ml_collections

from launch import depths
from launch.drafting import FAMILIES, has_head, make_siblings, make_tree, of
from specjax import drafters
from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.adaptive import chains
from specjax.adaptive.rungs import check
from specjax.tree import Form
from specjax.types import Rule


def check_depth(config: ml_collections.ConfigDict, rule: Rule) -> None:
  """Raises ValueError unless `config.depth` fits drafter, tree and rule."""
  policy = depths.of(config)
  if policy is None or not config.num_speculative_tokens:
    return
  if not of(config).has_depth or config.num_nodes:
    able = [name for name, family in FAMILIES.items() if family.has_depth]
    raise ValueError(
      f"config.depth={config.depth} ends chains that a model draws, drafter "
      f"one of {able}, got {_told(config)}"
      + (" with a dynamic tree" if config.num_nodes else "")
    )
  tree, siblings = make_tree(config), make_siblings(config)
  chains.check(tree, siblings, policy)
  if depths.head_of(config) and config.online:
    raise ValueError(
      "a draft that learns online changes what config.depth="
      f"{config.depth} was trained on: give one of them"
    )
  rule.check(dataclasses.replace(tree, form=Form.MASKED), siblings)


def check_repeats(config: ml_collections.ConfigDict, rule: Rule) -> None:
  """Raises ValueError unless drafts can give way to what the text repeats."""
  least, elsewhere = config.get("repeats", 0), config.get("elsewhere", 0)
  if not least or not config.num_speculative_tokens or of(config).looks_up:
    return
  if not 1 <= least <= config.max_ngram:
    raise ValueError(
      f"config.repeats must be in 1..max_ngram ({config.max_ngram}), or 0 for "
      f"never, got {least}"
    )
  if not of(config).reads_on or config.num_nodes:
    able = [name for name, family in FAMILIES.items() if family.reads_on]
    raise ValueError(
      f"config.repeats is of drafters whose state is made of what stands, "
      f"{able}, and of their chains, got {_told(config)}"
      + (" with a dynamic tree" if config.num_nodes else "")
    )
  if config.online:
    raise ValueError(
      "a draft that learns online is judged by its own tokens alone: give "
      "config.online or config.repeats"
    )
  policy = depths.of(config)
  if policy is not None and policy.learn is not None:
    raise ValueError(
      f"config.depth={config.depth} learns from rounds of the draft's own, and "
      "with config.repeats some are not: give one of them"
    )
  tree, siblings = make_tree(config), make_siblings(config)
  drafters.repeats.check(tree, siblings)
  if not elsewhere:
    return
  if config.depth or not 1 <= elsewhere <= tree.max_depth:
    raise ValueError(
      f"config.elsewhere must be in 1..{tree.max_depth}, and config.depth none "
      f"(or 0), got {elsewhere} and {config.depth!r}"
    )
  if not of(config).has_depth:
    raise ValueError(
      f"config.elsewhere is of what drafts token by token, got {_told(config)}"
    )
  rule.check(dataclasses.replace(tree, form=Form.MASKED), siblings)


_NOT_CLIMBED = (
  "depth", "widths", "tree", "num_nodes", "online", "share_encoder", "repeats",
)  # fmt: skip


def check_ladder(config: ml_collections.ConfigDict, rule: Rule) -> None:
  """Raises ValueError unless the host can change among `config.ladder`."""
  if not config.ladder or not config.num_speculative_tokens:
    return
  check(config.ladder)
  rung = of(config).rung
  if rung is None:
    able = [name for name, family in FAMILIES.items() if family.rung]
    raise ValueError(
      "config.ladder is of drafters whose state is the same for all lengths, "
      f"{able}, got {_told(config)}"
    )
  beside = [
    name for name in _NOT_CLIMBED
    if config.get(name) and not (name == "repeats" and of(config).looks_up)
  ]  # fmt: skip
  beside += ["num_drafts"] * (config.num_drafts != 1)
  beside += ["siblings"] * (config.siblings != siblings_lib.IID.name)
  if beside:
    raise ValueError(
      "config.ladder is of chains that are drafted whole: not with "
      + ", ".join(beside)
    )
  tree = tree_lib.chain(config.ladder[-1])
  rule.check(dataclasses.replace(tree, form=rung.form), siblings_lib.IID)


def _told(config: ml_collections.ConfigDict) -> str:
  """The drafter of a config, for a message that it does not fit."""
  if config.drafter == "model" and has_head(config):
    return "'model' for a head: name its kind, as config.drafter=eagle3"
  return repr(config.drafter)
