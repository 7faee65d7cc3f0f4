"""Published methods that draft one path, by the law of a round."""

import functools
import math
from collections.abc import Iterator

import numpy as np

from launch.studies.audit.shape import (
  Entry,
  Law,
  Method,
  normal,
  of_rule,
  paths,
  point,
  tempered,
  token_by_token,
)  # fmt: skip
from specjax import rules
from specjax.siblings import TOP_K
from specjax.tree import chain

_HALF = tempered(0.5)
_GENERATOR = "transformers {}, generation/candidate_generator.py"


def hsd(
  draft: Law, target: Law, depth: int, *, capped: bool
) -> Iterator[Entry]:
  """Hierarchical speculative decoding, which tests a path from its end.

  With `r_t` the product of target over draft along the first t tokens, the text
  (`capped`) caps it by its running maximum, `w_t = r_t / max(1, r_1, .., r_t)`,
  the weight of block verification; the released code's last test uses `r_G`.
  """
  for weight, tokens in paths(draft, depth):
    r, most = 1.0, 1.0
    passes, laws = [1.0], [normal(target(()) - draft(()))]
    for t, x in enumerate(tokens, start=1):
      r *= target(tokens[: t - 1])[x] / draft(tokens[: t - 1])[x]
      most = max(most, r)
      w, q = r / most, target(tokens[:t])
      if t == depth:
        passes.append(min(w if capped else r, 1.0))
        laws.append(q)
        continue
      gain = np.maximum(w * q - draft(tokens[:t]), 0)
      loss = gain.sum() + 1 - w
      passes.append(gain.sum() / loss if loss > 0 else 0.0)
      laws.append(normal(gain))
    for t in range(depth, -1, -1):
      yield weight * passes[t], tokens[:t], laws[t]
      weight *= 1 - passes[t]


def _reported_raw(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """Drawn at temperature 0.5, reported as drawn at 1."""
  for weight, tokens in paths(_HALF(draft), depth):
    yield from token_by_token(weight, tokens, draft, _HALF(target))


def _greedy_as_sampled(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """The most likely tokens, reported as drawn from the draft's law."""
  tokens: tuple[int, ...] = ()
  for _ in range(depth):
    tokens = (*tokens, int(np.argmax(draft(tokens))))
  yield from token_by_token(1.0, tokens, draft, target)


def _openvino(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """A drafted token stays if `r <= p(x) / q(y)`, y drawn from the target.

  This holds from the second round on; in the first, tokens are matched. r is
  one of 0, 0.01, .., 1. After a rejection, the token is drawn at the next
  position, as if the rejected one had been kept, and put in its place.
  """
  for weight, tokens in paths(draft, depth):
    left = weight
    for i, x in enumerate(tokens):
      p, q = draft(tokens[:i])[x], target(tokens[:i])
      accept = sum(
        q_y * min(1.0, (math.floor(100 * p / q_y + 1e-9) + 1) / 101)
        for q_y in q[q > 0]
      )
      yield left * (1 - accept), tokens[:i], target(tokens[: i + 1])
      left *= accept
    yield left, tokens, target(tokens)


def _one_subtracted(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """After a rejection, subtracts only the drafted token's draft mass."""
  residual = lambda q, p, x: q - p * point(x, len(p))
  for weight, tokens in paths(draft, depth):
    yield from token_by_token(weight, tokens, draft, target, residual)


def _model(name: str, source: str, finding: str, draw) -> Method:
  """A model of transformers that drafts at temperature 0.5."""
  return Method(
    name=name,
    source=source,
    finding=finding,
    rounds=of_rule(rules.get("token"), chain, draw=draw, warp=_HALF),
    warp=_HALF,
  )


METHODS = (
  Method(
    name="HSD, text",
    source="arXiv 2601.05724v1, Algorithm 2",
    finding="is block verification",
    rounds=functools.partial(hsd, capped=True),
  ),
  Method(
    name="HSD, release",
    source="github.com/ZhouYuxuanYX/Hierarchical-Speculative-Decoding, "
    "transformers/generation/utils.py at 747d259",
    finding="the whole draft is tested with the uncapped ratio",
    rounds=functools.partial(hsd, capped=False),
  ),
  _model(
    "transformers, assistant model, T = 0.5",
    _GENERATOR.format("5.23.0"),
    "drafts are warped twice and reported so",
    lambda law: _HALF(_HALF(law)),
  ),
  Method(
    name="transformers, prompt look-up",
    source=_GENERATOR.format("5.23.0"),
    finding="deterministic drafts, matched with the target's draws",
    rounds=of_rule(rules.get("match"), chain, TOP_K),
  ),
  Method(
    name="transformers, DFlash and MTP before PR 48007, T = 0.5",
    source=_GENERATOR.format("5.16.0.dev0")
    + ", modeling_layers.py at d112311; issue 47932",
    finding="tokens are drawn after the warp, reported with the law before it",
    rounds=_reported_raw,
    warp=_HALF,
  ),
  _model(
    "transformers, DFlash and MTP, T = 0.5",
    _GENERATOR.format("5.23.0") + ", modeling_layers.py; PR 48007",
    "drawn from the law that is reported",
    _HALF,
  ),
  Method(
    name="transformers, Gemma 4 assistant",
    source=_GENERATOR.format("5.23.0 and 5.24.0")
    + " (SinglePositionMultiTokenCandidateGenerator); issue 47932",
    finding="the most likely token is reported as sampled from the softmax",
    rounds=_greedy_as_sampled,
  ),
  Method(
    name="Self-speculative sampling, defaults",
    source="github.com/dilab-zju/self-speculative-decoding, decoding.py "
    "(self_speculative_sample) at f69f2a7; arXiv 2309.08168",
    finding="the most likely token is tested as sampled from the softmax",
    rounds=_greedy_as_sampled,
  ),
  Method(
    name="OpenVINO GenAI, draft model",
    source="github.com/openvinotoolkit/openvino.genai, "
    "src/cpp/src/sampling/sampler.cpp at 02400d9; issue 4190",
    finding="the ratio is of two different tokens; the replacement is drawn "
    "one position late",
    rounds=_openvino,
  ),
  Method(
    name="xLLM before PR 2175",
    source="github.com/xLLM-AI/xllm, pull request 2175 (its description)",
    finding="the residual subtracts only the drafted token's mass",
    rounds=_one_subtracted,
  ),
)
