"""Frozen dataclasses that are pytrees."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

_C = TypeVar("_C", bound=type)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def struct(cls: _C) -> _C:
  """A frozen dataclass that is a pytree."""
  made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
  return jax.tree_util.register_dataclass(made)


def static(**options: Any) -> Any:
  """A field that is not a pytree leaf; takes options of `dataclasses.field`."""
  return dataclasses.field(metadata={"static": True}, **options)
