"""Verification rules: each maps the drafted laws and the target's to a law.

A rule is one short file; `get` finds it by name, and the common tests run it
over every tree and sibling law that its `check` allows. Rules that decide at
one node at a time are a single function without a batch (`nodewise`).
"""

import ast
import difflib
import inspect
import math
import pkgutil
from collections.abc import Callable
from typing import Any

from specjax.rules import (
  block,
  blockwise,
  greedy_draft,
  gumbel_list,
  hub,
  kseq,
  match,
  multipath_block,
  recursive,
  relaxed,
  token,
  transport,
  traversal,
  typical,
)
from specjax.types import Rule

# Rules with parameters: `(**parameters) -> Rule`, all with defaults.
FACTORIES: dict[str, Callable[..., Rule]] = {
  "typical": typical.rule,
  "lenient": relaxed.lenient,
  "top_beta": relaxed.top_beta,
  "decoding_opt": relaxed.decoding_opt,
  "decoding_uno": relaxed.decoding_uno,
  "blockwise": blockwise.rule,
}

RULES: dict[str, Rule] = {
  "token": token.RULE,
  "match": match.RULE,
  "block": block.RULE,
  "batch": recursive.BATCH,
  "recursive": recursive.RULE,
  "kseq": kseq.RULE,
  "transport": transport.RULE,
  "greedy_draft": greedy_draft.RULE,
  "hub": hub.RULE,
  "traversal": traversal.RULE,
  "multipath_block": multipath_block.RULE,
  "gumbel_list": gumbel_list.RULE,
} | {name: factory() for name, factory in FACTORIES.items()}

# One object for each name, however its parameters were spelled.
_MADE = {rule.name: rule for rule in RULES.values()}


def get(name: str) -> Rule:
  """The rule of that name.

  Args:
    name: one of `RULES`; for those of `FACTORIES` parameters may follow, as in
      `"typical(epsilon=0.1)"`. A rule's own `name` gives that rule. One's own
      is `"package.module:RULE"`.

  Raises:
    ValueError: if there is no such rule, listing those there are; if it has no
      such parameters, or they are out of range; if a module is not there or
      holds no such rule.
  """
  bare, bracket, _ = name.partition("(")
  if ":" in bare:
    return _imported(name)
  if bare not in RULES:
    near = difflib.get_close_matches(bare, RULES, n=1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(
      f"unknown rule {bare!r}, {guess}expected one of {sorted(RULES)}"
    )
  if not bracket:
    return RULES[bare]
  if bare not in FACTORIES:
    raise ValueError(f"rule {bare!r} has no parameters, got {name!r}")
  try:
    parameters = _parameters(ast.parse(name, mode="eval").body)
    known = inspect.signature(FACTORIES[bare]).parameters
    if unknown := parameters.keys() - known.keys():
      raise ValueError(f"no parameter {min(unknown)!r}, only {list(known)}")
    rule = FACTORIES[bare](
      **{k: _as_kind(known[k], value) for k, value in parameters.items()}
    )
  except (SyntaxError, TypeError, ValueError, *_TOO_MUCH) as error:
    raise ValueError(f"rule {name!r:.80}: {error}") from error
  return _MADE.setdefault(rule.name, rule)


def _imported(name: str) -> Rule:
  """The rule that `package.module:RULE` names."""
  try:
    found = pkgutil.resolve_name(name)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(f"no rule {name!r}: {error}") from error
  if not isinstance(found, Rule):
    raise ValueError(
      f"{name!r} must be a specjax.Rule, is {type(found).__name__}"
    )
  return found


# What Python's parser says of many brackets, and arithmetic of many digits.
_TOO_MUCH = (RecursionError, MemoryError, OverflowError)


def _parameters(call: ast.expr) -> dict[str, Any]:
  """The keywords of `rule(name=value, ...)`, and of nothing else."""
  if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
    raise ValueError("expected rule(name=value, ...)")
  names = [keyword.arg for keyword in call.keywords]
  if call.args or None in names:
    raise ValueError("parameters are written name=value")
  if len(set(names)) < len(names):
    raise ValueError(f"a parameter is given twice, got {names}")
  return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}


def _as_kind(parameter: inspect.Parameter, value) -> int | float:
  """The value as what the parameter's default is, without losing any of it."""
  kind = type(parameter.default)
  fits = type(value) in (int, float) and math.isfinite(value)
  if not fits or kind(value) != value:
    raise ValueError(f"{parameter.name} must be {kind.__name__}, got {value!r}")
  return kind(value)
