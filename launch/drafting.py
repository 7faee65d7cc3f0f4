"""Ways to draft, as configs name them, and one's own.

`config.drafter` is a name in `FAMILIES`, or `package.module:NAME`, which is a
`Family` or its `make` alone: a function

  make(config, draft, *, tree, siblings, vocab_size) -> specjax.Drafter

where `draft` is the model of `config.draft` (a `LanguageModel`, whose
parameters are `params.draft`), or None if the config names none.
"""

import dataclasses
import difflib
import pkgutil
from collections.abc import Callable
from typing import Any

import ml_collections

from models.transformer import SkippedLayers
from specjax import drafters
from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.siblings import Siblings
from specjax.tree import Tree
from specjax.types import Drafter, LanguageModel


def _of_draft(config, models) -> tuple[LanguageModel | None, Any]:
  """The model that `config.draft` names, and its parameters."""
  del config
  if models.draft is None:
    return None, None
  return models.draft.functions(SkippedLayers()), models.draft.params


def _of_target(config, models) -> tuple[LanguageModel, None]:
  """The target without the layers that the config skips: no parameters."""
  skipped = SkippedLayers(
    attention=tuple(config.skip_attention), mlp=tuple(config.skip_mlp)
  )
  return models.target.functions(skipped), None


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
class Family:
  """A way to draft.

  Attributes:
    make: see the module.
    model: `(config, models) -> (LanguageModel or None, parameters or None)`:
      what drafts, and its parameters if it does not have the target's; see
      `launch.pair.Models`.
    reads_draft: whether `config.draft` is loaded.
    check: `(config, tree, siblings)`, raises ValueError for what does not fit.
  """

  make: Callable[..., Drafter]
  model: Callable[..., tuple[LanguageModel | None, Any]] = _of_draft
  reads_draft: bool = True
  check: Callable[..., None] = lambda config, tree, siblings: None


def _model(config, draft, **static) -> Drafter:
  del config
  return drafters.model.drafter(draft, **static)


def _layer_skip(config, draft, **static) -> Drafter:
  del config
  return drafters.layer_skip.drafter(draft, **static)


def _ngram(config, draft, *, tree, siblings, vocab_size) -> Drafter:
  del draft, siblings
  return drafters.ngram.drafter(
    num_speculative_tokens=tree.max_depth,
    max_ngram=config.max_ngram,
    vocab_size=vocab_size,
  )


FAMILIES = {
  "model": Family(make=_model, check=_needs_draft),
  "layer_skip": Family(make=_layer_skip, model=_of_target, reads_draft=False),
  "ngram": Family(
    make=_ngram, model=_nothing, reads_draft=False, check=_one_path
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
    near = difflib.get_close_matches(name, FAMILIES, n=1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(
      f"unknown drafter {name!r}, {guess}expected one of {list(FAMILIES)}, or "
      "package.module:make"
    )
  return FAMILIES[name]


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


def reads_draft(config: ml_collections.ConfigDict) -> bool:
  """Whether the checkpoint `config.draft` is read."""
  return bool(
    config.draft
    and config.num_speculative_tokens
    and get(config.drafter).reads_draft
  )


def make_tree(config: ml_collections.ConfigDict) -> Tree:
  """The token tree of a config.

  Raises:
    ValueError: if it is none, or `tree` and `num_drafts` are both set.
  """
  if not config.tree:
    return tree_lib.paths(config.num_speculative_tokens, config.num_drafts)
  if config.num_drafts != 1:
    raise ValueError(
      f"give either tree or num_drafts, got both ({config.num_drafts} drafts)"
    )
  if any(not isinstance(parent, int) for parent in config.tree):
    raise ValueError(
      "config.tree must be the nodes' parents, integers as in -1,0,0,1,1, got "
      f"{','.join(map(str, config.tree))!r}"
    )
  return Tree(tuple(config.tree))
