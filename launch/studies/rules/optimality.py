r"""Share of the optimum of transport that each rule for i.i.d. drafts reaches.

  python -m launch.studies.rules.optimality \
    --output=docs/measurements/rules/optimality.json

At one position, on random laws of large vocabularies, through the solvers that
the rules ship: nothing is sampled but the laws. Draft laws are Dirichlet, the
target's are `q ~ p^u exp(noise)`, u in [0.5, 1.2].
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from launch import cli, provenance, results
from launch.studies.rules import cases
from specjax import laws
from specjax.rules import kseq, transport
from specjax.theory.optimum import iid_optimum

cli.reads(cli.OUTPUT, cases.INSTANCES)

_VOCAB_SIZES = (200, 2_000, 32_768, 131_072)
_NUM_DRAFTS = (2, 3, 4, 6, 8)


@functools.partial(jax.jit, static_argnames="count")
def accepted(log_q: jax.Array, log_p: jax.Array, *, count: int) -> dict:
  """Acceptance of each rule at one position.

  Args:
    log_q, log_p: `f32[V]`, the target's law and the draft's.
    count: K.

  Returns:
    Rule name to acceptance probability.
  """
  q, p = jnp.exp(log_q), jnp.exp(log_p)
  drafts = jnp.int32(count)
  scale, reject = jnp.float32(0), jnp.float32(1)
  for _ in range(count):
    scale = scale + reject
    reject = laws.rejection(q, p, scale)
  one = jnp.sum(jnp.minimum(p, q / kseq.solve(q, p, drafts, most=count)))
  classes = transport.classes_of(log_q, log_p, count)
  _, slopes = transport.selection(
    classes.draft, classes.target, drafts, most=count
  )
  return {
    "match": jnp.sum(q * (1 - (1 - p) ** count)),
    "recursive": 1 - reject,
    "kseq": 1 - (1 - one) ** count,
    "transport": jnp.sum(jnp.minimum(p * slopes[classes.ids], q)),
  }


def random_pair(rng: np.random.Generator, vocab_size: int):
  """Draft and target laws, `f64[V]` each."""
  p = rng.dirichlet(np.full(vocab_size, rng.choice([0.05, 0.3, 1.0])))
  q = p ** rng.uniform(0.5, 1.2)
  q *= np.exp(rng.uniform(0.2, 1.2) * rng.normal(size=vocab_size))
  return p, q / q.sum()


def run(_) -> int:
  """The command."""
  results.check({"--output": cli.OUTPUT.value}, stdout=True)
  rows = []
  for vocab_size in _VOCAB_SIZES:
    rng = np.random.default_rng(vocab_size)
    for count in _NUM_DRAFTS:
      shares = []
      for _ in range(cases.INSTANCES.value):
        p, q = random_pair(rng, vocab_size)
        with np.errstate(divide="ignore"):
          log_q, log_p = (jnp.log(jnp.asarray(x, jnp.float32)) for x in (q, p))
        optimum = iid_optimum(p, q, count)
        by_rule = jax.device_get(accepted(log_q, log_p, count=count))
        shares.append({n: float(v) / optimum for n, v in by_rule.items()})
      rows.append(
        {
          "vocab_size": vocab_size,
          "num_drafts": count,
          "share_of_optimum": {
            name: cases.mean_and_minimum([s[name] for s in shares])
            for name in shares[0]
          },
        }
      )
  result = {
    "instances": cases.INSTANCES.value,
    "rows": rows,
    **provenance.record(),
  }
  results.show_json(cli.OUTPUT.value, result)
  return 0


if __name__ == "__main__":
  cli.run(run, required=())
