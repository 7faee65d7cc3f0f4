"""transformers: a model as assistant, look-ups, and heads before and after.

Drafts are at temperature 0.5, but Gemma 4's.
"""

from collections.abc import Iterator

from launch.studies.audit.shape import (
  Entry,
  Law,
  Method,
  greedy_told_sampled,
  of_rule,
  paths,
  tempered,
  token_by_token,
)
from specjax import rules
from specjax.siblings import TOP_K
from specjax.tree import chain

_HALF = tempered(0.5)
_GENERATOR = "transformers {}, generation/candidate_generator.py"


def _told_raw(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """Drawn at temperature 0.5, said to be drawn at 1."""
  for weight, tokens in paths(_HALF(draft), depth):
    yield from token_by_token(weight, tokens, draft, _HALF(target))


def _model(draw) -> dict:
  """A model as assistant at temperature 0.5."""
  rule = of_rule(rules.get("token"), chain, draw=draw, warp=_HALF)
  return dict(rounds=rule, warp=_HALF)


METHODS = (
  Method(
    name="transformers, assistant model, T = 0.5",
    source=_GENERATOR.format("5.23.0"),
    finding="drafts are warped twice and reported so",
    **_model(lambda law: _HALF(_HALF(law))),
  ),
  Method(
    name="transformers, prompt look-up",
    source=_GENERATOR.format("5.23.0"),
    finding="certain drafts, matched with the target's draws",
    rounds=of_rule(rules.get("match"), chain, TOP_K),
  ),
  Method(
    name="transformers, DFlash and MTP before PR 48007, T = 0.5",
    source=_GENERATOR.format("5.16.0.dev0")
    + ", modeling_layers.py at d112311; issue 47932",
    finding="drawn from the warped law, reported before the warp",
    rounds=_told_raw,
    warp=_HALF,
  ),
  Method(
    name="transformers, DFlash and MTP, T = 0.5",
    source=_GENERATOR.format("5.23.0") + ", modeling_layers.py; PR 48007",
    finding="drawn from the law that is reported",
    **_model(_HALF),
  ),
  Method(
    name="transformers, Gemma 4 assistant",
    source=_GENERATOR.format("5.23.0 and 5.24.0")
    + " (SinglePositionMultiTokenCandidateGenerator); issue 47932",
    finding="the likeliest token, reported as drawn from the softmax",
    rounds=greedy_told_sampled,
  ),
)
