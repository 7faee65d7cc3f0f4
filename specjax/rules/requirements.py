"""Shared checks of the trees and siblings that a rule accepts."""

from specjax.siblings import Siblings
from specjax.tree import Form, Tree


def single_path(name: str, tree: Tree) -> None:
  """Raises ValueError unless the tree is a single path."""
  if not tree.is_chain:
    raise ValueError(
      f"rule {name!r} verifies a single path, got a tree of "
      f"{tree.num_drafted} drafted nodes and depth {tree.max_depth}: "
      "'block_transport' verifies i.i.d. paths, 'recursive' any tree"
    )


def form(name: str, tree: Tree, *allowed: Form) -> None:
  """Raises ValueError unless the tree has one of the allowed forms."""
  if tree.form not in allowed:
    raise ValueError(
      f"rule {name!r} verifies trees whose form is "
      f"{' or '.join(f.value for f in allowed)}, got one that is "
      f"{tree.form.value}"
    )


def equal_paths(name: str, tree: Tree) -> None:
  """Raises ValueError unless the tree is whole paths of equal length."""
  form(name, tree, Form.FIXED)
  if not tree.is_paths:
    raise ValueError(
      f"rule {name!r} verifies separate paths of equal length, got parents "
      f"{tree.parents}"
    )


def drawn(
  name: str, tree: Tree, siblings: Siblings, *allowed: Siblings
) -> None:
  """Raises ValueError unless the tree is whole and its siblings `allowed`."""
  form(name, tree, Form.FIXED)
  if tree.num_drafted and siblings not in allowed:
    raise ValueError(
      f"rule {name!r} needs "
      f"{' or '.join(f'siblings={s.name!r}' for s in allowed)}, got "
      f"siblings={siblings.name!r}"
    )


def independent(name: str, tree: Tree, siblings: Siblings) -> None:
  """Raises ValueError unless siblings, if there are any, are independent.

  Nodes may be masked, but trees must not be `FREE`: equal paths are merged.
  """
  form(name, tree, Form.FIXED, Form.MASKED)
  if tree.num_drafted and not siblings.independent:
    raise ValueError(
      f"rule {name!r} needs siblings='iid', got siblings={siblings.name!r}"
    )
