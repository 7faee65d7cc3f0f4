"""Things with parameters, by what is written on a command line.

`"typical(epsilon=0.1)"` is `typical(epsilon=0.1)` of a table of functions whose
parameters are numbers or names, with defaults.
"""

import ast
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")

# What Python's parser says of many brackets, and arithmetic of many digits.
_TOO_MUCH = (RecursionError, MemoryError, OverflowError)


def make(
  kind: str, text: str, factories: Mapping[str, Callable[..., _T]]
) -> _T:
  """What `NAME(parameter=value, ...)` names.

  Args:
    kind: what it is, for messages.
    text: as it is written.
    factories: functions by name; all of their parameters have defaults.

  Raises:
    ValueError: if it is written otherwise, has no such parameters, or the
      function refuses them. The name is the caller's to check.
  """
  try:
    bare = text.partition("(")[0]
    parameters = _parameters(kind, ast.parse(text, mode="eval").body)
    known = inspect.signature(factories[bare]).parameters
    if unknown := parameters.keys() - known.keys():
      raise ValueError(f"no parameter {min(unknown)!r}, only {list(known)}")
    return factories[bare](
      **{k: _as_kind(known[k], value) for k, value in parameters.items()}
    )
  except (SyntaxError, TypeError, ValueError, *_TOO_MUCH) as error:
    raise ValueError(f"{kind} {text!r:.80}: {error}") from error


def _parameters(kind: str, call: ast.expr) -> dict[str, Any]:
  """The keywords of `NAME(name=value, ...)`, and of nothing else."""
  if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
    raise ValueError(f"expected {kind}(name=value, ...)")
  names = [keyword.arg for keyword in call.keywords]
  if call.args or None in names:
    raise ValueError("parameters are written name=value")
  if len(set(names)) < len(names):
    raise ValueError(f"a parameter is given twice, got {names}")
  return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}


def _as_kind(parameter: inspect.Parameter, value) -> int | float | str:
  """The value as what the parameter's default is, without losing any of it."""
  kind = type(parameter.default)
  if kind is str:
    fits = type(value) is str
  else:
    fits = type(value) in (int, float) and math.isfinite(value)
  if not fits or kind(value) != value:
    raise ValueError(f"{parameter.name} must be {kind.__name__}, got {value!r}")
  return kind(value)
