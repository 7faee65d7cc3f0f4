"""Ways to draft, as configs name them, and one's own.

`config.drafter` is a name in `FAMILIES`, or `package.module:NAME`, which is a
`Family` or its `make` alone: a function

  make(config, draft, *, tree, siblings, vocab_size) -> specjax.Drafter

where `draft` is the model of `config.draft` (a `LanguageModel`, whose
parameters are `params.draft`), or None if the config names none.
"""

import dataclasses
import functools
import pkgutil
from collections.abc import Callable
from typing import Any

import ml_collections

from launch import depths, looking_up, skipped_layers
from models.formats import head_checkpoints
from models.formats.head_checkpoints import Head
from models.head_shapes import KINDS, HeadShape
from models.networks import specdec
from models.networks.specdec import Block
from models.networks.transformer import FINAL, Features, SkippedLayers
from specjax import drafters, suggestions
from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.adaptive import policies as depth_lib
from specjax.adaptive.policies import Policy
from specjax.adaptive.rungs import Rungs, make_rungs
from specjax.siblings import Siblings
from specjax.tree import Form, Tree
from specjax.types import Drafter, LanguageModel, Rule


def _of_draft(config, models) -> tuple[LanguageModel | None, Any]:
  """The model that `config.draft` names, and its parameters."""
  if models.draft is None:
    return None, None
  functions = models.draft.functions(SkippedLayers(), _features(config))
  return functions, models.draft.params


def _of_head(config, models) -> tuple[Head, Any]:
  """The head that `config.draft` names, and its parameters."""
  head, wanted = models.draft, config.drafter
  if not isinstance(head, Head):
    raise ValueError(
      f"drafter {wanted!r} is a head on the target's features, and "
      f"{config.draft} is a model of its own"
    )
  if wanted not in ("model", head.kind):
    raise ValueError(
      f"config.drafter is {wanted!r}, and the head in {config.draft} is "
      f"{head.kind!r}"
    )
  return head, head.functions()[1]


def _of_block(config, models) -> tuple[Block, Any]:
  """The block drafter that `config.draft` names, and its parameters."""
  if not isinstance(models.draft, Block):
    raise ValueError(
      f"drafter 'block' says a block at once, and {config.draft} is a model of "
      "another kind"
    )
  return models.draft, models.draft.params


def _of_target(config, models) -> tuple[LanguageModel, None]:
  """The target without the layers that the config skips: no parameters."""
  skipped = skipped_layers.of(config)
  return models.target.functions(skipped, _features(config)), None


def _features(config) -> Features:
  """What a depth policy reads of the model that drafts."""
  policy = depths.of(config)
  return (FINAL,) if policy is not None and policy.width else ()


def _nothing(config, models) -> tuple[None, None]:
  del config, models
  return None, None


def _needs_draft(config, tree: Tree, siblings: Siblings) -> None:
  del tree, siblings
  if config.num_speculative_tokens and not config.draft:
    raise ValueError(
      f"drafter {config.drafter!r} needs a draft checkpoint: give "
      "config.draft, or config.drafter=ngram or layer_skip"
    )


def _skips_something(config, tree: Tree, siblings: Siblings) -> None:
  del siblings
  if tree.num_drafted and skipped_layers.of(config) == SkippedLayers():
    raise ValueError(
      "layer_skip with nothing skipped drafts with the whole target: give "
      "skip_attention and skip_mlp, or skip_layers (launch.layer_search finds "
      "what to skip)"
    )


def _one_path(config, tree: Tree, siblings: Siblings) -> None:
  if not tree.is_chain:
    raise ValueError(
      f"the {config.drafter} drafter proposes one path (num_drafts=1), got "
      f"{tree.max_children}"
    )
  if siblings is not siblings_lib.IID:
    raise ValueError(
      f"the {config.drafter} drafter draws no siblings: siblings must be "
      f"'iid', got {siblings.name!r}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
  """How a family makes the chains of `config.ladder`, which share one state.

  Attributes:
    make: as the family's.
    form: of its trees.
  """

  make: Callable[..., Drafter]
  form: Form = Form.FIXED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A way to draft.

  Attributes:
    make: see the module.
    model: `(config, models) -> (LanguageModel or None, parameters or None)`:
      what drafts, and its parameters if it does not have the target's; see
      `launch.pair.Models`.
    reads_draft: whether `config.draft` is loaded.
    check: `(config, tree, siblings)`, raises ValueError for what does not fit.
    is_head: whether `config.draft` is a head on the target's features.
    form: `config -> (Tree, Siblings)` of a family that makes trees of its own;
      None for one that fills the config's.
    has_depth: whether a depth policy may end its drafts (`config.depth`).
    rung: None where chains of several lengths do not share one state.
    reads_on: whether its chains can give way to what the text repeats
      (`config.repeats`).
    looks_up: whether it drafts that itself, and does not read `config.repeats`.
  """

  make: Callable[..., Drafter]
  model: Callable[..., tuple[LanguageModel | None, Any]] = _of_draft
  reads_draft: bool = True
  check: Callable[..., None] = lambda config, tree, siblings: None
  is_head: bool = False
  form: Callable[..., tuple[Tree, Siblings]] | None = None
  has_depth: bool = False
  rung: Rung | None = None
  reads_on: bool = False
  looks_up: bool = False


def _waiting(make: Callable[..., Drafter]) -> Rung:
  """The rung of what catches up where nothing was drafted, as policies do."""

  def with_policy(config, draft, *, tree: Tree, **static):
    own = ml_collections.ConfigDict(config.to_dict())
    own.depth = str(tree.max_depth)
    return make(own, draft, tree=tree, **static)

  return Rung(make=with_policy, form=Form.MASKED)


def _model(config, draft, **static) -> Drafter:
  return drafters.model.drafter(draft, depth=depths.of(config), **static)


def _layer_skip(config, draft, **static) -> Drafter:
  return drafters.layer_skip.drafter(draft, depth=_policy(config), **static)


def _policy(config) -> Policy | None:
  """What ends the drafts of what may give way to what repeats."""
  if _reads_on(config) and config.get("elsewhere"):
    return depth_lib.get(str(config.elsewhere))
  return depths.of(config)


def _ngram(config, draft, *, tree, siblings, vocab_size) -> Drafter:
  del draft, siblings
  return drafters.ngram.drafter(
    num_speculative_tokens=tree.max_depth,
    max_ngram=config.max_ngram,
    vocab_size=vocab_size,
  )


def _head(config, draft: Head, *, tree, siblings, vocab_size) -> Drafter:
  functions, _ = draft.functions()
  return head_drafter(
    draft.shape, functions, tree=tree, siblings=siblings,
    vocab_size=vocab_size, top_k=config.num_children, depth=_policy(config),
    longest=config.ladder[-1] if config.get("ladder") else None,
  )  # fmt: skip


def head_drafter(
  shape: HeadShape,
  functions,
  *,
  tree: Tree,
  siblings: Siblings,
  vocab_size: int,
  top_k: int,
  depth: Policy | None = None,
  longest: int | None = None,
) -> Drafter:
  """The drafter of a head.

  Args:
    shape: what the head is.
    functions: of `models.head_shapes.functions`.
    tree: what every proposal fills; one whose parents are data
      (`specjax.tree.bound`) is EAGLE's dynamic tree, and of heads that say all
      depths at once the best tree of their product law.
    siblings: how children are drawn.
    vocab_size: V.
    top_k: nodes that EAGLE's dynamic tree continues at each depth, and children
      of each.
    depth: when chains of EAGLE's end.
    longest: of the chains of a ladder of EAGLE's.
  """
  static = dict(tree=tree, siblings=siblings, vocab_size=vocab_size)
  if shape.kind == "parallel":
    return drafters.dflash.drafter(functions, **static)
  if shape.num_depths is not None:
    return drafters.medusa.drafter(
      functions,
      num_heads=shape.num_depths,
      num_features=shape.config.embed_dim,
      name=shape.kind,
      **static,
    )
  if tree.form is Form.FREE:
    return drafters.eagle.dynamic(
      functions,
      num_nodes=tree.num_drafted,
      depth=tree.max_depth,
      top_k=top_k,
      vocab_size=vocab_size,
    )
  return drafters.eagle.drafter(
    functions, **static, name=shape.kind, depth=depth, longest=longest
  )


def _block(config, draft: Block, *, tree, siblings, vocab_size) -> Drafter:
  del config
  blocks, encode = draft.functions()
  return drafters.specdec.drafter(
    blocks,
    encode,
    num_masks=draft.config.num_masks,
    tree=tree,
    siblings=siblings,
    vocab_size=vocab_size,
  )


_BLOCK = Family(make=_block, model=_of_block, check=_needs_draft)


def _rasd_model(config, models) -> tuple[LanguageModel | None, Any]:
  """The draft model, and its parameters beside the corpus."""
  draft, params = _of_draft(config, models)
  parts = drafters.rasd.Parts(
    model=params, corpus=looking_up.index(config, models)
  )
  return draft, parts


def _rasd_check(config, tree: Tree, siblings: Siblings) -> None:
  _needs_draft(config, tree, siblings)
  looking_up.check(config, tree, siblings)


_HEAD = Family(
  make=_head, model=_of_head, check=_needs_draft, is_head=True, reads_on=True
)

_LOOKUP = Family(
  make=looking_up.make_suffix,
  model=looking_up.nothing_but_index,
  reads_draft=False,
  check=looking_up.check,
  form=looking_up.form_of_lookup,
  looks_up=True,
)

FAMILIES = {
  "model": Family(
    make=_model, check=_needs_draft, has_depth=True, rung=_waiting(_model)
  ),
  **dict.fromkeys(KINDS, _HEAD),
  **dict.fromkeys(
    ("medusa", "blockwise"), dataclasses.replace(_HEAD, rung=Rung(make=_head))
  ),
  **dict.fromkeys(
    ("eagle", "eagle3"),
    dataclasses.replace(_HEAD, has_depth=True, rung=Rung(make=_head)),
  ),
  "block": _BLOCK,
  "layer_skip": Family(
    make=_layer_skip,
    model=_of_target,
    reads_draft=False,
    check=_skips_something,
    has_depth=True,
    rung=_waiting(_layer_skip),
    reads_on=True,
  ),
  "ngram": Family(
    make=_ngram,
    model=_nothing,
    reads_draft=False,
    check=_one_path,
    rung=Rung(make=_ngram),
    looks_up=True,
  ),
  "lookahead": Family(
    make=looking_up.make_lookahead,
    model=_nothing,
    reads_draft=False,
    check=looking_up.check,
    form=looking_up.form_of_lookahead,
    looks_up=True,
  ),
  "suffix": _LOOKUP,
  "rest": _LOOKUP,
  "rasd": Family(
    make=looking_up.make_rasd,
    model=_rasd_model,
    check=_rasd_check,
    form=looking_up.form_of_rasd,
  ),
}


def get(name: str) -> Family:
  """The family of that name.

  Raises:
    ValueError: if there is none, or its module cannot be imported.
  """
  if ":" in name:
    return _imported(name)
  if name not in FAMILIES:
    raise ValueError(
      f"unknown drafter {name!r}{suggestions.guess(name, FAMILIES)}, "
      f"expected one of {list(FAMILIES)}, or package.module:make"
    )
  return FAMILIES[name]


def of(config: ml_collections.ConfigDict) -> Family:
  """The family of a config: a directory tells by itself what it holds.

  Raises:
    ValueError: as `get`.
  """
  family = get(config.drafter)
  if config.drafter == "model" and has_head(config):
    return _HEAD
  if config.drafter == "model" and has_block(config):
    return _BLOCK
  return family


def has_block(config: ml_collections.ConfigDict) -> bool:
  """Whether `config.draft` is SpecDec's block drafter."""
  return bool(config.draft) and specdec.is_block(config.draft)


def has_head(config: ml_collections.ConfigDict) -> bool:
  """Whether `config.draft` is a head on the target's features."""
  return bool(config.draft) and head_checkpoints.is_head(config.draft)


def _imported(name: str) -> Family:
  """The family, or its `make`, that `package.module:NAME` names."""
  try:
    found = pkgutil.resolve_name(name)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(f"no drafter {name!r}: {error}") from error
  if isinstance(found, Family):
    return found
  if not callable(found):
    raise ValueError(
      f"{name!r} must be a Family or a function that makes a drafter, is "
      f"{type(found).__name__}"
    )
  return Family(make=found)


def reads_corpus(config: ml_collections.ConfigDict) -> bool:
  """Whether the index `config.corpus` is read."""
  return bool(
    config.get("corpus")
    and config.num_speculative_tokens
    and config.drafter in ("suffix", "rest", "rasd")
  )


def reads_draft(config: ml_collections.ConfigDict) -> bool:
  """Whether the checkpoint `config.draft` is read."""
  return bool(
    config.draft
    and config.num_speculative_tokens
    and get(config.drafter).reads_draft
  )


# What decides which tokens are drafted. Who asks for any of it asks for a draft
# of its own, and not for the config's `repeats`.
SHAPING = (
  "num_speculative_tokens", "depth", "ladder", "num_drafts", "tree",
  "num_nodes", "siblings", "online",
)  # fmt: skip


def switch(config: ml_collections.ConfigDict, drafter: str) -> None:
  """Sets another drafter in a config; `repeats` was chosen for its own one."""
  if drafter != config.drafter and of(config).reads_on:
    alone(config)
  config.drafter = drafter


def widths_of(config: ml_collections.ConfigDict) -> tuple[int, ...]:
  """Tokens of the target's narrower passes; `elsewhere` has its own."""
  found = tuple(config.widths)
  if _reads_on(config) and config.get("elsewhere"):
    found += (config.elsewhere + 1,)
  return found


def _reads_on(config) -> bool:
  """Whether a config's drafter gives way to what the text repeats."""
  return bool(config.get("repeats")) and of(config).reads_on


def alone(config: ml_collections.ConfigDict) -> None:
  """Lets the drafter draft everywhere."""
  config.update(dict(repeats=0, elsewhere=0))


def rungs(
  config: ml_collections.ConfigDict,
  target: LanguageModel,
  draft: Any,
  *,
  rule: Rule,
  vocab_size: int,
) -> Rungs:
  """The decoders of `config.ladder`.

  Args:
    config: with a ladder that `draft_checks.check_ladder` has passed.
    target: the target.
    draft: of the family's `model`.
    rule: what verifies.
    vocab_size: V.
  """
  rung = of(config).rung
  assert rung is not None  # as `draft_checks.check_ladder` found
  make = functools.partial(
    rung.make, config, draft, siblings=siblings_lib.IID, vocab_size=vocab_size
  )
  return make_rungs(
    target,
    lambda tree: make(tree=tree),
    rule=rule,
    vocab_size=vocab_size,
    lengths=config.ladder,
  )


def make_siblings(config: ml_collections.ConfigDict) -> Siblings:
  """How the children of a node are drawn; of a dynamic tree they are not."""
  if config.num_nodes or of(config).form:
    return siblings_lib.GIVEN
  return siblings_lib.get(config.siblings)


def make_tree(config: ml_collections.ConfigDict) -> Tree:
  """The token tree of a config.

  Raises:
    ValueError: if it is none, or `tree` and `num_drafts` are both set.
  """
  gamma = config.num_speculative_tokens
  if gamma and (form := of(config).form):
    return form(config)[0]
  if config.num_nodes and gamma:
    return tree_lib.bound(config.num_nodes, gamma, config.num_children)
  if not config.tree:
    return tree_lib.paths(gamma, config.num_drafts)
  if config.num_drafts != 1:
    raise ValueError(
      f"give either tree or num_drafts, got both ({config.num_drafts} drafts)"
    )
  if len(config.tree) == 1 and config.tree[0] in drafters.medusa.TREES:
    return drafters.medusa.TREES[config.tree[0]]
  if any(not isinstance(parent, int) for parent in config.tree):
    raise ValueError(
      "config.tree must be the nodes' parents, integers as in -1,0,0,1,1, "
      f"or one of {sorted(drafters.medusa.TREES)}, got "
      f"{','.join(map(str, config.tree))!r}"
    )
  return Tree(tuple(config.tree))
