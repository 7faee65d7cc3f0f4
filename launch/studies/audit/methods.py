"""Audited methods: laws, source, claim and finding of each.

`METHODS` grows from section to section, one a source.
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
  children,
  greedy_told_sampled,
  longest,
  most_likely,
  normal,
  of_rule,
  paths,
  point,
  ratio,
  tempered,
  token_by_token,
)
from specjax import rules
from specjax.siblings import TOP_K
from specjax.tree import chain

METHODS: tuple[Method, ...] = ()

# --------------------------- HSD (Zhou et al., 2026): its text, and its release

_REPOSITORY = "github.com/ZhouYuxuanYX/Hierarchical-Speculative-Decoding"


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


METHODS += (
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
)

# --------------------- SpecTr-GBV (Lin et al., 2026) as its authors released it

_TINY = 1e-20  # the decoder's own


class _State(NamedTuple):
  """Carry of the decoder from test to test."""

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


METHODS += tuple(
  Method(
    name=f"SpecTr-GBV, release, K = {count}",
    source="github.com/junemily/SpecTr-GBV, src/engine.py at e399f44; "
    "arXiv 2604.25925 (abstract)",
    finding="greedy block verification without its modified target",
    rounds=functools.partial(_rounds, count=count),
  )
  for count in (1, 2)
)

# ------------------- transformers; drafts are at temperature 0.5, but Gemma 4's

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


METHODS += (
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

# ------------------ self-speculative decoding (Zhang et al., 2024): its release

METHODS += (
  Method(
    name="Self-speculative sampling, defaults",
    source="github.com/dilab-zju/self-speculative-decoding, decoding.py "
    "(self_speculative_sample) at f69f2a7; arXiv 2309.08168",
    finding="the likeliest token, divided by its softmax",
    rounds=greedy_told_sampled,
  ),
)

# -------------------------------------------- OpenVINO GenAI with a draft model


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


METHODS += (
  Method(
    name="OpenVINO GenAI, draft model",
    source="github.com/openvinotoolkit/openvino.genai, "
    "src/cpp/src/sampling/sampler.cpp at 02400d9; issue 4190",
    finding="the ratio is of two tokens; the replacement is drawn one "
    "position late",
    rounds=_openvino,
  ),
)

# ------------------------ xLLM before its pull request 2175, by its description


def _one_subtracted(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """After a rejection the drafted token alone has its draft mass taken off."""
  left = lambda q, p, x: q - p * point(x, len(p))
  for weight, tokens in paths(draft, depth):
    yield from token_by_token(weight, tokens, draft, target, left)


METHODS += (
  Method(
    name="xLLM before PR 2175",
    source="github.com/xLLM-AI/xllm, pull request 2175 (its description)",
    finding="the residual takes off the drafted token's mass alone",
    rounds=_one_subtracted,
  ),
)

# ---------------- SGLang's target-only tree: one coin a node, no law of a draft


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


METHODS += (
  Method(
    name="SGLang, target-only tree, thresholds 1",
    source="github.com/sgl-project/sglang, "
    "sgl-kernel/csrc/speculative/speculative_sampling.cuh at 120affb",
    finding="one coin a node draws among children and the rest",
    depth=1,
    rounds=_single_coin,
  ),
)

# ----------- EAGLE (Li et al., 2024): releases of its first and second sampling

_EAGLE = "github.com/SafeAILab/EAGLE"


def _eagle1(
  draft: Law, target: Law, depth: int, *, temperature: float, stale: bool
) -> Iterator[Entry]:
  """Two children without replacement, tested in turn.

  The release before the mend also skips token 0, and tests a child once for
  every path through it; neither is in here.

  Args:
    draft, target: raw laws.
    depth: 1; a node and its children.
    temperature: of draft and tests. The token after an accepted child comes
      from the target's raw law,
    stale: or, if the elder was rejected, from what was left at the parent.
  """
  warp = tempered(temperature)
  p, q = warp(draft)(()), warp(target)(())
  for x, y in np.ndindex(len(p), len(p)):
    untried = p * (1 - point(x, len(p)))
    if x == y or not untried[y]:
      continue
    untried = normal(untried)
    weight = p[x] * untried[y]
    accept = ratio(q[x], p[x])
    yield weight * accept, (x,), target((x,))
    weight, left = weight * (1 - accept), normal(q - p)
    accept = ratio(left[y], untried[y])
    yield weight * accept, (y,), left if stale else target((y,))
    yield weight * (1 - accept), (), normal(left - untried)


def certain(
  draft: Law,
  target: Law,
  depth: int,
  *,
  temperature: float = 1.0,
  said: bool = False,
) -> Iterator[Entry]:
  """The two likeliest children, tested in turn.

  Args:
    draft, target: raw laws.
    depth: 1; a node and its children.
    temperature: of the tests; the token after an accepted child comes from the
      target's raw law.
    said: whether they are tested as drawn from the draft's law, not as certain.
  """
  p, left = draft(()), tempered(temperature)(target)(())
  weight = 1.0
  for x in np.argsort(-p, kind="stable")[:2].tolist():
    law = p if said else point(x, len(p))
    accept = ratio(left[x], law[x])
    yield weight * accept, (x,), target((x,))
    weight, left = weight * (1 - accept), normal(left - law)
  yield weight, (), left


def _eagle(name, where, finding, rounds, temperature=1.0) -> Method:
  return Method(
    name=f"{name}, T = {temperature:g}",
    source=f"{_EAGLE}, {where}",
    finding=finding,
    depth=1,
    rounds=functools.partial(rounds, temperature=temperature),
    warp=tempered(temperature),
  )


_MENDED = functools.partial(_eagle1, stale=False)
_BONUS = "the token after the last accepted one is drawn before the warp"

METHODS += (
  _eagle(
    "EAGLE-1, before the mend",
    "model/utils.py at 38d5327",
    "the token after a second child comes from the parent's residual",
    functools.partial(_eagle1, stale=True),
  ),
  _eagle(
    "EAGLE-1, mended", "eagle/model/utils.py at 08dc06c", "as RSD", _MENDED
  ),
  _eagle(
    "EAGLE-1, mended", "eagle/model/utils.py at 08dc06c", _BONUS, _MENDED, 0.5
  ),
  _eagle(
    "EAGLE-2",
    "eagle/model/utils.py at 8009b6d",
    "certain children, tested as such",
    certain,
  ),
  _eagle("EAGLE-2", "eagle/model/utils.py at 8009b6d", _BONUS, certain, 0.5),
)

# ----------------- constructions: top-k children tested as drawn, and reranking


def _reranked(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """Two draws, of which the likelier is kept and tested as the only one."""
  p = draft(())
  for x, y in np.ndindex(len(p), len(p)):
    kept = x if p[x] >= p[y] else y
    yield from token_by_token(p[x] * p[y], (kept,), draft, target)


METHODS += (
  Method(
    name="Sampled tests on a top-k tree",
    source="a construction: SpecInfer's test, arXiv 2305.09781, on EAGLE-2's "
    "children, arXiv 2406.16858",
    claim="none",
    finding="certain children tested as drawn from the softmax",
    depth=1,
    rounds=functools.partial(certain, said=True),
  ),
  Method(
    name="A sampled tree, reranked",
    source="a construction: EAGLE-2's reranking, arXiv 2406.16858, of drawn "
    "tokens",
    claim="none",
    finding="the likelier of two draws, tested as if it were one",
    depth=1,
    rounds=_reranked,
  ),
)

# -------------------------- Recurrent drafter (Cheng et al., 2024), its release


def _beams(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """The two paths of a beam search, each tested as drawn from the draft."""
  rows = [()]
  value = lambda row: np.prod([draft(row[:i])[x] for i, x in enumerate(row)])
  for _ in range(depth):
    longer = [child for row in rows for child in children(draft, row)]
    rows = sorted(longer, key=value, reverse=True)[:2]
  test = lambda text, x: ratio(target(text)[x], draft(text)[x])
  for mass, tokens in longest(rows, test):
    left = normal(target(tokens) - draft(tokens))
    yield mass, tokens, target(tokens) if len(tokens) == depth else left


METHODS += (
  Method(
    name="Recurrent drafter",
    source="github.com/apple/ml-recurrent-drafter, "
    "recurrent_drafting/recurrent_drafting.py at d4f4a72; issue 6",
    finding="the paths of a beam search, each tested as drawn, and the longest "
    "kept",
    rounds=_beams,
  ),
)

# --------------- Medusa (Cai et al., 2024): typical acceptance, and its release

_MEDUSA = "github.com/FasterDecoding/Medusa, medusa/model/utils.py at 2b89814"


def nucleus(law: Law, top_p: float = 0.8) -> Law:
  """The likeliest tokens until their mass exceeds top-p."""

  def cut(text) -> np.ndarray:
    q = law(text)
    order = np.argsort(-q, kind="stable")
    before = np.cumsum(q[order]) - q[order]
    kept = np.zeros(len(q))
    kept[order[before <= top_p]] = 1
    return normal(q * kept)

  return cut


def _medusa_nucleus(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """A draw of its own for every path and token; after a miss one anew."""
  q, rows = nucleus(target), [()]
  for _ in range(depth):
    rows = [child for row in rows for child in children(draft, row)]
  for mass, tokens in longest(rows, lambda text, x: q(text)[x]):
    yield mass, tokens, q(tokens)


def _medusa_typical(draft: Law, target: Law, depth: int) -> Iterator[Entry]:
  """The greedy path while it is typical, and then the likeliest token."""
  tokens, kept = most_likely(draft, depth), 0
  for i, x in enumerate(tokens):
    q = target(tokens[:i])
    entropy = -(q * np.log(q + 1e-5)).sum()
    if not q[x] > min(0.09, 0.3 * np.exp(-entropy)):
      break
    kept = i + 1
  after = target(tokens[:kept])
  yield 1.0, tokens[:kept], point(int(np.argmax(after)), len(after))


METHODS += (
  Method(
    name="Medusa, nucleus",
    source=_MEDUSA,
    claim="samples at top-p",
    finding="every path has draws of its own, and after a miss there is "
    "another",
    rounds=_medusa_nucleus,
    warp=nucleus,
  ),
  Method(
    name="Medusa, typical acceptance",
    source="arXiv 2401.10774",
    claim="typical, not lossless",
    finding="a path is kept while it is typical; then the target's law",
    rounds=of_rule(rules.get("typical"), chain, TOP_K),
  ),
  Method(
    name="Medusa, typical acceptance, release",
    source=f"{_MEDUSA} (fast)",
    claim="typical, not lossless",
    finding="the same, and then the likeliest token",
    rounds=_medusa_typical,
  ),
)
