"""Methods of paths: HSD, SpecTr-GBV, and what is called assisted sampling.

And SGLang's tree, whose one coin a node leaves nothing to the draft's law.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from launch.studies.audit.shape import (
  Entry,
  Law,
  Method,
  in_turn,
  most_likely,
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

# ------------------------------------------------------------------------- HSD


def backwards(
  draft: Law, target: Law, depth: int, *, capped: bool
) -> Iterator[Entry]:
  """Hierarchical speculative decoding: a path is tested from its end.

  With `r_t` the product of target over draft along the first t tokens, the text
  (`capped`) caps it by its running maximum, `w_t = r_t / max(1, r_1, .., r_t)`,
  the weight of block verification; the release's last test has `r_G`.
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


# ------------------------------------------------------------------ SpecTr-GBV

_TINY = 1e-20  # the decoder's own


class _State(NamedTuple):
  """What the decoder carries from test to test."""

  weight: float
  accepted: tuple[int, ...] = ()
  drafted: float = 1.0  # probability of the accepted tokens, draft
  aimed: float = 1.0  # the same, target
  failed: frozenset = frozenset()
  done: bool = False


def _chance(tokens, p_path, q_path, draft, target, depth, count) -> float:
  """With what probability a test of these first tokens passes."""
  miss = lambda x: (1 - x) ** count
  if len(tokens) == depth:
    cap = min(p_path / (q_path + _TINY), 1)
    chance = q_path * (1 - miss(cap)) / (1 - miss(p_path) + _TINY)
  else:
    p, q = p_path * draft(tokens), q_path * target(tokens)
    caps = np.minimum(p / (q + _TINY), 1)
    wanted = (q * miss(caps)).sum() - q_path * miss(
      min(p_path / (q_path + _TINY), 1)
    )
    offered = 1 - miss(p_path) - (q * (1 - miss(caps))).sum()
    chance = wanted / (offered + _TINY)
  return min(max(chance, 0.0), 1.0)


def _tests(state: _State, tokens, draft, target, count) -> Iterator[_State]:
  """One path's tests: of what is longer than accepted so far, to the end."""
  states = [state]
  p_path = q_path = 1.0
  for length in range(1, len(tokens) + 1):
    p_path *= draft(tokens[: length - 1])[tokens[length - 1]]
    q_path *= target(tokens[: length - 1])[tokens[length - 1]]
    prefix, last = tokens[:length], length == len(tokens)
    # Tests start behind what an earlier path had accepted, whatever it was.
    if not last and length <= len(state.accepted):
      continue
    chance = _chance(prefix, p_path, q_path, draft, target, len(tokens), count)
    after = []
    for one in states:
      if not last and prefix in one.failed:
        after.append(one)
        continue
      after.append(
        one._replace(
          weight=one.weight * chance,
          accepted=prefix,
          drafted=p_path,
          aimed=q_path,
          done=last,
        )
      )
      failed = one.failed if last else one.failed | {prefix}
      after.append(
        one._replace(weight=one.weight * (1 - chance), failed=failed)
      )
    states = [one for one in after if one.weight > 0]
  yield from states


def _rounds(
  draft: Law, target: Law, depth: int, *, count: int
) -> Iterator[Entry]:
  """SpecTr-GBV of the authors' repository: K paths, tested as blocks.

  The paper lets later rounds have a modified target; the released decoder
  starts every round from the target itself. Where its residual has no mass it
  stops with an error; here the target's law is drawn from. Of the paper the
  abstract and its reviews were read.
  """
  for drafts in itertools.product(paths(draft, depth), repeat=count):
    states = [_State(float(np.prod([weight for weight, _ in drafts])))]
    for _, tokens in drafts:
      states = [
        after
        for one in states
        for after in (
          [one] if one.done else _tests(one, tokens, draft, target, count)
        )
      ]
    for one in states:
      law = target(one.accepted)
      if not one.done:
        aimed = one.aimed * law
        cap = one.drafted * draft(one.accepted) / (aimed + _TINY)
        left = aimed * (1 - np.minimum(cap, 1) ** count)
        law = normal(left) if left.sum() > 1e-15 else law
      yield one.weight, one.accepted, law


# ----------------------------------------------------------- assisted sampling

_HALF = tempered(0.5)
_GENERATOR = "transformers {}, generation/candidate_generator.py"


def _told_raw(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """Drawn at temperature 0.5, said to be drawn at 1."""
  for weight, tokens in paths(_HALF(draft), depth):
    yield from in_turn(weight, tokens, draft, _HALF(target))


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
  return dict(rounds=rule, warp=_HALF)


_REPOSITORY = "github.com/ZhouYuxuanYX/Hierarchical-Speculative-Decoding"
METHODS = (
  Method(
    name="HSD, text",
    source="arXiv 2601.05724v1, Algorithm 2",
    finding="is block verification",
    rounds=functools.partial(backwards, capped=True),
  ),
  Method(
    name="HSD, release",
    source=f"{_REPOSITORY}, transformers/generation/utils.py at 747d259",
    finding="the whole draft passes with the ratio that is not capped",
    rounds=functools.partial(backwards, capped=False),
  ),
  *(
    Method(
      name=f"SpecTr-GBV, release, K = {count}",
      source="github.com/junemily/SpecTr-GBV, src/engine.py at e399f44; "
      "arXiv 2604.25925 (abstract)",
      finding="greedy block verification without its modified target",
      rounds=functools.partial(_rounds, count=count),
    )
    for count in (1, 2)
  ),
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
    rounds=_greedy_told_sampled,
  ),
  Method(
    name="Self-speculative sampling, defaults",
    source="github.com/dilab-zju/self-speculative-decoding, decoding.py "
    "(self_speculative_sample) at f69f2a7; arXiv 2309.08168",
    finding="the likeliest token, divided by its softmax",
    rounds=_greedy_told_sampled,
  ),
  Method(
    name="OpenVINO GenAI, draft model",
    source="github.com/openvinotoolkit/openvino.genai, "
    "src/cpp/src/sampling/sampler.cpp at 02400d9; issue 4190",
    finding="the ratio is of two tokens; the replacement is drawn one "
    "position late",
    rounds=_openvino,
  ),
  Method(
    name="xLLM before PR 2175",
    source="github.com/xLLM-AI/xllm, pull request 2175 (its description)",
    finding="the residual takes off the drafted token's mass alone",
    rounds=_one_subtracted,
  ),
  Method(
    name="SGLang, target-only tree, thresholds 1",
    source="github.com/sgl-project/sglang, "
    "sgl-kernel/csrc/speculative/speculative_sampling.cuh at 120affb",
    finding="one coin a node draws among children and the rest",
    depth=1,
    rounds=_single_coin,
  ),
)
