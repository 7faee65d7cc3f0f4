r"""Lossy rules against the Pareto front of Yin et al., along a pair's contexts.

  python -m launch.studies.rules.front --config=configs/embedded.py \
    --output=docs/measurements/rules/front.json

A lossless decoder completes held-out prompts at temperature 1, or answers short
questions, if the target chats. At every step each rule, with each of its
parameters, says what becomes of the next token: accepted with which
probability, and drawn from what law. Both are exact: the rule's own code is
asked about every token that may be drafted. Rejections and distance add up to
TV(p, q) on the front and to more above it. The score is that of
`launch.studies.quality`, the log-probability that the target gives to what
comes out; its mean with the sign turned is the cross-entropy, in nats, and that
of lossless decoding is the target's entropy. Tokens per target call are those
of the step's draft, of six tokens.
"""

import functools
import math

import jax
import jax.numpy as jnp

from launch import cli, provenance, results
from launch.studies.rules import on_pair
from specjax import intervals, rules
from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.decode import make_decoder
from specjax.types import Draft, Rule

cli.reads(cli.CONFIG, cli.OUTPUT, on_pair.NUM_PROMPTS, on_pair.NUM_CONTEXTS)

_EPSILONS = (0.001, 0.003, 0.01, 0.1)
# A family's name, and its rules from the strictest on.
FAMILIES = {
  "token": ("token",),
  "ensemble": [f"ensemble(weight={w})" for w in (0.9, 0.6, 0.3, 0.1)],
  "lenient": [f"lenient(lenience={x})" for x in (0.8, 0.5, 0.25, 0.1)],
  "decoding_opt": [f"decoding_opt(epsilon={e})" for e in _EPSILONS],
  "decoding_uno": [f"decoding_uno(epsilon={e})" for e in _EPSILONS],
  "fuzzy": [f"fuzzy(threshold={t})" for t in (0.02, 0.05, 0.1, 0.3)],
  "cascade_chow": [f"cascade_chow(alpha={a})" for a in (0.1, 0.5, 0.7, 0.9)],
  "cascade_diff": [f"cascade_diff(alpha={a})" for a in (-0.1, 0.0, 0.1, 0.3)],
  "cascade_opt": [f"cascade_opt(alpha={a})" for a in (-0.3, -0.1, 0.1, 0.5)],
  "cascade_token": [f"cascade_token(alpha={a})" for a in (0.3, 0.6, 0.9, 0.99)],
  "cactus": [f"cactus(delta={d})" for d in (0.0003, 0.001, 0.01, 0.1)],
  "contrastive": [f"contrastive(beta={b})" for b in (0.1, 0.25, 0.5, 1.0)],
  "typical": [f"typical(epsilon={e}, delta=1)" for e in (0.3, 0.1, 0.03, 0.01)],
  "blockwise": [f"blockwise(top_k={k})" for k in (1, 3, 10, 30)],
}  # fmt: skip
_TOKENS = 6
# What is measured, and between what it lies.
_QUANTITIES = {
  "acceptance": (0, 1),
  "total_variation": (0, 1),
  "above_front": None,
  "cross_entropy": (0, math.inf),
  "block_efficiency": (1, 1 + _TOKENS),
}
_FAR = 1e-4  # more than rounding in float32


def next_token(rule: Rule, log_p: jax.Array, log_q: jax.Array):
  """Outcome of one token drafted from p, over all that may be drafted.

  The rule's law after a rejection must not depend on the rejected token.

  Args:
    rule: a rule of a single path.
    log_p, log_q: `f32[V]`, the draft's law and the target's.

  Returns:
    The probability that it is accepted, the law of the token that comes out,
    `f32[V]`, and the distance that the rule reports, or 0.
  """
  one = tree_lib.chain(1)
  twice = lambda law: jnp.stack([law, law])[None]

  def verify(token):
    draft = Draft(
      tree=one,
      siblings=siblings_lib.IID,
      tokens=jnp.stack([jnp.zeros_like(token), token])[None],
      log_probs=twice(log_p),
    )
    return rule.verify(draft, twice(log_q))

  every = jnp.arange(len(log_p), dtype=jnp.int32)
  accept = jax.vmap(lambda token: verify(token).node_probs[0, 1])(every)
  first = verify(every[0])
  after = first.next_log_probs(jnp.zeros((1,), jnp.int32))[0]
  kept = accept * jnp.exp(log_p)
  accepted = jnp.sum(kept)
  distance = first.total_variation
  return (
    accepted,
    kept + jnp.maximum(1 - accepted, 0) * jnp.exp(after),
    0.0 if distance is None else distance[0, 0],
  )


def ask(rule: Rule, draft: Draft, target_log_probs: jax.Array) -> jax.Array:
  """The quantities of every row's next token, and how far off is the report.

  Args:
    rule: a rule of a single path.
    draft: of a step.
    target_log_probs: `f32[B, N + 1, V]`.

  Returns:
    `f32[6, B]`: `_QUANTITIES`, then the absolute difference between the
    distance and the one that the rule reports.
  """
  log_p, log_q = draft.log_probs[:, 1], target_log_probs[:, 0]
  accepted, law, said = jax.vmap(functools.partial(next_token, rule))(
    log_p, log_q
  )
  apart = lambda one, other: jnp.sum(jnp.abs(one - other), axis=-1) / 2
  away = apart(law, jnp.exp(log_q))
  emitted = 1 + on_pair.expected_accepted(
    draft.tree, rule.verify(draft, target_log_probs)
  )
  return jnp.stack(
    [
      accepted,
      away,
      1 - accepted + away - apart(jnp.exp(log_p), jnp.exp(log_q)),
      -jnp.sum(jnp.where(law > 0, law * log_q, 0), axis=-1),
      emitted,
      jnp.abs(away - said),
    ]
  )


def measure(names, models, config, batches, *, max_contexts: int) -> dict:
  """The quantities of every rule: means over contexts.

  Args:
    names: rules.
    models: from `on_pair.build_pair`.
    config: the config.
    batches: the prompts.
    max_contexts: decoding steps a prompt, at most.

  Returns:
    By rule the `_QUANTITIES` and `cross_entropy_ratio`, over that of the first
    rule, paired by prompt, with 95% intervals over prompts; and the number of
    contexts.

  Raises:
    ValueError: if a rule's distance is not what it reports.
  """
  tree = tree_lib.chain(_TOKENS)
  decoder = make_decoder(
    models.target,
    drafter=on_pair.drafter(models, tree, siblings_lib.IID),
    rule="token",
    vocab_size=models.tokenizer.vocab_size,
  )
  asked = [jax.jit(functools.partial(ask, rules.get(name))) for name in names]
  contexts, table = on_pair.sums_by_prompt(
    decoder,
    models,
    config,
    batches,
    lambda info: [f(info.draft, info.target_log_probs) for f in asked],
    max_contexts=max_contexts,
  )  # [prompts], [prompts, rules, 6]
  off = table[..., -1].sum(axis=0) / contexts.sum()
  if off.max() > _FAR:
    raise ValueError(f"{names[int(off.argmax())]} does not report its distance")
  report = {}
  for number, name in enumerate(names):
    report[name] = {"rule": rules.get(name).name}
    for column, (quantity, limits) in enumerate(_QUANTITIES.items()):
      total = table[:, number, column]
      report[name][quantity] = float(total.sum() / contexts.sum())
      if limits is not None and total.all():
        report[name][f"{quantity}_ci"] = intervals.interval(
          [total], [contexts], limits=limits
        )
    column = list(_QUANTITIES).index("cross_entropy")
    ours, lossless = table[:, number, column], table[:, 0, column]
    report[name] |= intervals.ratio("cross_entropy_ratio", [ours], [lossless])
  return {"rules": report, "num_contexts": int(contexts.sum())}


def run(_) -> int:
  """The command."""
  config = cli.CONFIG.value
  results.check({"--output": cli.OUTPUT.value}, stdout=True)
  config.temperature = 1.0
  models = on_pair.build_pair(config)
  texts, batches = on_pair.held_out(models)
  names = [name for family in FAMILIES.values() for name in family]
  measured = measure(
    names, models, config, batches, max_contexts=on_pair.NUM_CONTEXTS.value
  )
  result = {
    "families": {
      family: [measured["rules"][name] for name in members]
      for family, members in FAMILIES.items()
    },
    "num_contexts": measured["num_contexts"],
    "num_prompts": len(texts),
    "num_speculative_tokens": _TOKENS,
    **provenance.of_config(config, texts=texts),
  }
  results.show_json(cli.OUTPUT.value, result)
  return 0


if __name__ == "__main__":
  cli.run(run)
