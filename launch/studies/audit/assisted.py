"""Assisted sampling of transformers, OpenVINO and others: single paths.

And SGLang's tree, whose one coin a node leaves nothing to the draft's law.
"""

import math
from collections.abc import Iterator

import numpy as np

from launch.studies.audit.shape import (
  Entry,
  Law,
  Method,
  in_turn,
  normal,
  of_rule,
  paths,
  point,
  ratio,
  tempered,
)
from specjax import rules
from specjax.siblings import TOP_K
from specjax.tree import chain

_HALF = tempered(0.5)
_GENERATOR = "transformers {}, generation/candidate_generator.py"


def _told_raw(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """Drawn at temperature 0.5, said to be drawn at 1."""
  for weight, tokens in paths(_HALF(draft), depth):
    yield from in_turn(weight, tokens, draft, _HALF(target))


def most_likely(draft: Law, depth: int) -> tuple[int, ...]:
  """The greedy path; of equals the first token."""
  tokens: tuple[int, ...] = ()
  for _ in range(depth):
    tokens = (*tokens, int(np.argmax(draft(tokens))))
  return tokens


def _greedy_told_sampled(
  draft: Law, target: Law, depth: int
) -> Iterator[Entry]:
  """The likeliest tokens, said to be drawn from the draft's law."""
  yield from in_turn(1.0, most_likely(draft, depth), draft, target)


def _openvino(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """A drafted token stays if `r <= p(x) / q(y)`, y drawn from the target.

  So it is from the second round on; in the first, tokens are matched.
  r is one of 0, 0.01, .., 1. After a rejection the token is drawn at the next
  position, as if the rejected one stood, and put in its place.
  """
  for path_weight, tokens in paths(draft, depth):
    weight = path_weight
    for i, x in enumerate(tokens):
      p, q = draft(tokens[:i])[x], target(tokens[:i])
      accept = sum(
        q_y * min(1.0, (math.floor(100 * p / q_y + 1e-9) + 1) / 101)
        for q_y in q[q > 0]
      )
      yield weight * (1 - accept), tokens[:i], target(tokens[: i + 1])
      weight *= accept
    yield weight, tokens, target(tokens)


def _one_subtracted(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """After a rejection the drafted token alone has its draft mass taken off."""
  for path_weight, tokens in paths(draft, depth):
    weight = path_weight
    for i, x in enumerate(tokens):
      q, p = target(tokens[:i]), draft(tokens[:i])
      accept = ratio(q[x], p[x])
      yield weight * (1 - accept), tokens[:i], normal(q - p * point(x, len(p)))
      weight *= accept
    yield weight, tokens, target(tokens)


def _single_coin(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """One coin a node against the running sum of its children's target mass."""
  del depth  # a node, its two children
  first, second = np.argsort(-draft(()), kind="stable")[:2].tolist()
  q = target(())
  for x in (first, second):
    yield q[x], (x,), target((x,))
  rest = q * (1 - point(first, len(q)) - point(second, len(q)))
  if total := rest.sum():
    yield total, (), rest / total


def _model(draw) -> dict:
  """A model as assistant at temperature 0.5."""
  rule = of_rule(rules.get("token"), chain, draw=draw, warp=_HALF)
  return dict(claim="lossless", depth=2, rounds=rule, warp=_HALF)


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
    claim="lossless",
    finding="certain drafts, matched with the target's draws",
    depth=2,
    rounds=of_rule(rules.get("match"), chain, TOP_K),
  ),
  Method(
    name="transformers, DFlash and MTP before PR 48007, T = 0.5",
    source=_GENERATOR.format("5.16.0.dev0")
    + ", modeling_layers.py at d112311; issue 47932",
    claim="lossless",
    finding="drawn from the warped law, reported before the warp",
    depth=2,
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
    claim="lossless",
    finding="the likeliest token, reported as drawn from the softmax",
    depth=2,
    rounds=_greedy_told_sampled,
  ),
  Method(
    name="Self-speculative sampling, defaults",
    source="github.com/dilab-zju/self-speculative-decoding, decoding.py "
    "(self_speculative_sample) at f69f2a7; arXiv 2309.08168",
    claim="lossless",
    finding="the likeliest token, divided by its softmax",
    depth=2,
    rounds=_greedy_told_sampled,
  ),
  Method(
    name="OpenVINO GenAI, draft model",
    source="github.com/openvinotoolkit/openvino.genai, "
    "src/cpp/src/sampling/sampler.cpp at 02400d9; issue 4190",
    claim="lossless",
    finding="the ratio is of two tokens; the replacement is drawn one "
    "position late",
    depth=2,
    rounds=_openvino,
  ),
  Method(
    name="xLLM before PR 2175",
    source="github.com/xLLM-AI/xllm, pull request 2175 (its description)",
    claim="lossless",
    finding="the residual takes off the drafted token's mass alone",
    depth=2,
    rounds=_one_subtracted,
  ),
  Method(
    name="SGLang, target-only tree, thresholds 1",
    source="github.com/sgl-project/sglang, "
    "sgl-kernel/csrc/speculative/speculative_sampling.cuh at 120affb",
    claim="lossless",
    finding="one coin a node draws among children and the rest",
    depth=1,
    rounds=_single_coin,
  ),
)
