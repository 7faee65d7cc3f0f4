"""Arguments that drafters have in common: their defaults, and their checks."""

import dataclasses
from collections.abc import Callable

from specjax import shapes
from specjax import siblings as siblings_lib
from specjax.adaptive import chains, policies
from specjax.adaptive.policies import Policy
from specjax.shapes import Shape
from specjax.siblings import GIVEN, IID, Siblings
from specjax.tree import Form, Tree, chain
from specjax.types import Drafter, LanguageModel

TOKENS = 5


def drawn(
  tokens: int | None,
  tree: Tree | Shape | None,
  siblings: Siblings | str,
  policy: Policy | None = None,
  *,
  default: int = TOKENS,
  dynamic: bool = False,
) -> tuple[Tree, Siblings]:
  """Tree and siblings of a drafter that fills the tree it is given.

  Args:
    tokens: drafted on each path; None for the tree's own depth, or `default`.
    tree: None for one path.
    siblings: how the children of a node are drawn, or the name of it.
    policy: what ends chains, if anything does.
    default: depth of a tree that has none.
    dynamic: whether the drafter can choose the nodes (EAGLE-2).

  Raises:
    ValueError: if they do not go together.
    TypeError: if the tree is none, or the policy.
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
    raise ValueError("a dynamic tree is of a head on the target's features")
  shape = shapes.fixed(tree) if isinstance(tree, Tree) else tree
  if shape is None:
    made = chain(tokens or default)
  elif shape.depth is not None and tokens is not None:
    raise ValueError(
      f"this tree is {shape.depth} deep by itself: leave out tokens={tokens}"
    )
  else:
    made = shape.make(tokens or default)
  if dynamic and made.form is Form.FREE:
    told = siblings is GIVEN and isinstance(tree, Tree)
    if siblings is not IID and not told:
      raise ValueError("a dynamic tree has no siblings of its own")
    siblings = GIVEN
  if policy is not None:
    chains.check(made, siblings, policy)
  return made, siblings


def with_longer(
  drafter: Drafter, make: Callable[[Tree, Policy], Drafter]
) -> Drafter:
  """The drafter, whose chain becomes longer if asked; a tree does not.

  Args:
    drafter: of a whole tree, without a policy.
    make: makes it with another tree, and a policy.
  """
  if not drafter.tree.is_chain:
    return drafter
  as_before = policies.fixed(drafter.tree.max_depth)
  return dataclasses.replace(
    drafter, longer=lambda tokens: make(chain(tokens), as_before)
  )


def ending(
  tree: Tree, policy: Policy | None, longest: int | None
) -> Policy | None:
  """The policy that ends chains; of a ladder's, the rung's whole length.

  Raises:
    ValueError: if a ladder's chain has a policy of its own.
  """
  if not longest:
    return policy
  if policy is not None:
    raise ValueError("chains of a ladder (longest) have no policy of their own")
  return policies.fixed(tree.max_depth)


def check_functions(who: str, model: LanguageModel) -> None:
  """Raises TypeError for what was not made a language model, as a module."""
  if not isinstance(model, LanguageModel):
    raise TypeError(
      f"the {who} must be a specjax.LanguageModel, got a "
      f"{type(model).__name__}: models.checkpoints.load(DIR).whole() reads "
      "one, models.networks.transformer.as_language_model makes one of a module"
    )


def check_model(who: str, model: LanguageModel, vocab_size: int) -> None:
  """Raises unless it is a model that knows all tokens that are drafted."""
  check_functions(who, model)
  if model.vocab_size < vocab_size:
    raise ValueError(
      f"the {who}'s vocabulary must hold {vocab_size} tokens, got "
      f"{model.vocab_size}"
    )


def check_rolls_back(who: str, model: LanguageModel) -> None:
  """Raises ValueError if a model cannot draft, for want of its old states."""
  if model.has_states:
    raise ValueError(
      f"the {who} drafts in passes that are taken back, and a cache of "
      "recurrent states goes back by one: draft with a model without them, a "
      "head, or look-ups"
    )


def check_tree(
  tree: Tree, siblings: Siblings, vocab_size: int, *, certain: bool = False
) -> None:
  """Raises ValueError if a tree cannot be drafted that way.

  Args:
    tree: the token tree.
    siblings: how the children of a node are drawn.
    vocab_size: V.
    certain: whether they may be not drawn at all (`siblings.GIVEN`).
  """
  if not tree.num_drafted:
    raise ValueError(
      "a drafter's tree needs at least one drafted node; to draft nothing, use "
      "specjax.drafters.plain()"
    )
  if siblings is siblings_lib.GIVEN and not certain:
    raise ValueError(
      "siblings 'given' are tokens that are not drawn, and this drafter draws"
    )
  if tree.form is not Form.FIXED or tree.lanes:
    raise ValueError(
      "a model drafts whole trees, whose form is fixed, without lanes: got "
      f"{tree.form.value}, lanes {tree.lanes}"
    )
  most = siblings.max_children
  if most is not None and tree.max_children > most:
    raise ValueError(
      f"siblings {siblings.name!r} are at most {most} a node, got a tree with "
      f"{tree.max_children}"
    )
  if not siblings.independent and tree.max_children > vocab_size:
    raise ValueError(
      f"siblings {siblings.name!r} are distinct tokens, got a tree with "
      f"{tree.max_children} children of one node for {vocab_size} tokens"
    )
  if siblings.with_noise and not tree.is_paths:
    raise ValueError(
      f"siblings {siblings.name!r} need separate paths of equal length, got "
      f"parents {tree.parents}"
    )
