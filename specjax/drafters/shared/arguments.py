"""Arguments that drafters share: defaults and checks."""

import dataclasses

from specjax import shapes
from specjax import siblings as siblings_lib
from specjax.adaptive import chains
from specjax.adaptive.policies import Policy
from specjax.shapes import Shape
from specjax.siblings import GIVEN, IID, Siblings
from specjax.tree import Form, Tree, chain
from specjax.types import LanguageModel

TOKENS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
  """How a drafter fills a tree with tokens.

  Attributes:
    tree: the tree of every draft.
    siblings: how the children of a node are drawn.
    vocab_size: V, the number of real tokens.
    policy: ends a chain early; None for whole chains.
    families: whether a dynamic tree has all children of a node or none.
  """

  tree: Tree
  siblings: Siblings
  vocab_size: int
  policy: Policy | None = None
  families: bool = False


def drawing(
  tokens: int | None,
  tree: Tree | Shape | None,
  siblings: Siblings | str,
  vocab_size: int,
  policy: Policy | None = None,
  *,
  default: int = TOKENS,
  dynamic: bool = False,
  deterministic: bool = False,
) -> Drawing:
  """The `Drawing` that a drafter's arguments ask for.

  Args:
    tokens: how many on each path; None for the tree's own depth, or `default`.
    tree: None for one path.
    siblings, vocab_size, policy: as in `Drawing`; siblings also by name.
    default: depth of a tree that has none.
    dynamic: whether the drafter can choose the nodes (EAGLE-2).
    deterministic: whether drafts may be deterministic (`siblings.GIVEN`).

  Raises:
    ValueError: if they are incompatible.
    TypeError: if the tree or the policy is of the wrong type.
  """
  siblings = siblings_lib.get(siblings)
  if tokens is not None and tokens < 1:
    raise ValueError(
      f"tokens must be >= 1, got {tokens} (drafter 'plain' drafts nothing)"
    )
  if not isinstance(tree, Tree | Shape | None):
    raise TypeError(
      "tree must be a specjax.tree.Tree, as chain(6), paths(4, 2) or "
      f"Tree((-1, 0, 0)), or a specjax.shapes.Shape, got {tree!r}"
    )
  if isinstance(tree, Shape) and tree.dynamic and not dynamic:
    raise ValueError("a dynamic tree needs a head on the target's features")
  families = isinstance(tree, Shape) and tree.families
  if families and not deterministic:
    raise ValueError(
      "families=True is for heads whose distributions are the same at all "
      "nodes of a depth (medusa, dflash, p_eagle)"
    )
  shape = shapes.fixed(tree) if isinstance(tree, Tree) else tree
  if shape is None:
    form = chain(tokens or default)
  elif shape.depth is not None and tokens is not None:
    raise ValueError(
      f"this tree has depth {shape.depth}: leave out tokens={tokens}"
    )
  else:
    form = shape.make(tokens or default)
  if dynamic and form.form is Form.FREE:
    named = siblings is GIVEN and isinstance(tree, Tree)
    if siblings is not IID and not named:
      raise ValueError("a dynamic tree is deterministic: leave out siblings")
    siblings = GIVEN
  else:
    _check_tree(form, siblings, vocab_size, deterministic=deterministic)
  if policy is not None:
    chains.check(form, siblings, policy)
  return Drawing(
    tree=form, siblings=siblings, vocab_size=vocab_size, policy=policy,
    families=families,
  )  # fmt: skip


def _check_tree(
  tree: Tree, siblings: Siblings, vocab_size: int, *, deterministic: bool
) -> None:
  """Raises ValueError if a static tree cannot be filled with these siblings."""
  if not tree.num_drafted:
    raise ValueError(
      "a drafter's tree needs at least one drafted node; to draft nothing, use "
      "specjax.drafters.plain()"
    )
  if siblings is GIVEN and not deterministic:
    raise ValueError(
      "siblings 'given' are for deterministic drafts, but this drafter draws"
    )
  if tree.form is not Form.FIXED or tree.lanes:
    raise ValueError(
      "a drafter's tree must be of fixed form and without lanes, got "
      f"{tree.form.value}, lanes {tree.lanes}"
    )
  most = siblings.max_children or tree.max_children
  if not siblings.independent:
    most = min(most, vocab_size)
  if tree.max_children > most:
    raise ValueError(
      f"siblings {siblings.name!r} of {vocab_size} tokens are at most {most} "
      f"per node, got a tree with {tree.max_children}"
    )
  if siblings.with_noise and not tree.is_paths:
    raise ValueError(
      f"siblings {siblings.name!r} need separate paths of equal length, got "
      f"parents {tree.parents}"
    )


def check_depth(name: str, num_depths: int, tree: Tree) -> None:
  """Raises ValueError if a head of K depths cannot fill a tree."""
  if tree.max_depth > num_depths:
    raise ValueError(
      f"{name} predicts {num_depths} tokens ahead, got a tree of depth "
      f"{tree.max_depth}: tokens={num_depths} is the most"
    )


def check_functions(who: str, model: LanguageModel) -> None:
  """Raises TypeError unless given a `LanguageModel` and not, say, a module."""
  if not isinstance(model, LanguageModel):
    raise TypeError(
      f"the {who} must be a specjax.LanguageModel, got a "
      f"{type(model).__name__}: load one with models.checkpoints.load(DIR)"
      ".model(), or wrap a module (models.networks.transformer."
      "as_language_model)"
    )


def check_model(who: str, model: LanguageModel, vocab_size: int | None) -> int:
  """V, by default the model's; raises if the model has fewer tokens."""
  check_functions(who, model)
  if model.vocab_size < (vocab_size or 0):
    raise ValueError(
      f"the {who}'s vocabulary must hold {vocab_size} tokens, got "
      f"{model.vocab_size}"
    )
  return vocab_size or model.vocab_size


def check_rolls_back(who: str, model: LanguageModel) -> None:
  """Raises ValueError for recurrent models, which cannot undo draft passes."""
  if model.has_states:
    raise ValueError(
      f"the {who} rolls back several passes, and recurrent states roll back "
      "only one: draft with a model without them, a head, or look-ups"
    )
