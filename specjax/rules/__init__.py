"""Verification rules: each maps the drafted laws and the target's to a law.

A rule is one short file with a `RULE`; `get` finds it by name, and the common
tests run it over every tree and sibling law that its `check` allows.
"""

from specjax.rules import match, token
from specjax.types import Rule

RULES: dict[str, Rule] = {rule.name: rule for rule in (token.RULE, match.RULE)}


def get(name: str) -> Rule:
  """The rule of that name.

  Raises:
    ValueError: if there is none, listing those there are.
  """
  if name not in RULES:
    raise ValueError(f"unknown rule {name!r}, expected one of {sorted(RULES)}")
  return RULES[name]
