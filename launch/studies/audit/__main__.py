r"""What is published as lossless, enumerated as its text or code has it.

  python -m launch.studies.audit --output=docs/measurements/audit/audit.json

Every method on four pairs of laws, the smallest pair on which it is lossy, and
the power of tests that sample. Takes half a minute.

  A  p = (2/3, 1/3), q = (1/3, 2/3) after any text
  B  p = (1/2, 1/2); q = (1/2, 1/2) for the first token, then (1, 0)
  C  p = (.5, .3, .2), q = (.2, .3, .5) after any text
  R  random laws of three tokens, other ones after every text
"""

import time

from launch import cli, provenance, results
from launch.studies.audit import assisted, hsd, power, shape, spectr_gbv, trees

cli.reads(cli.OUTPUT)
METHODS = (
  *hsd.METHODS,
  *spectr_gbv.METHODS,
  *assisted.METHODS,
  *trees.METHODS,
)
EXACT = 1e-9  # what floats may be off by


def row(method: shape.Method) -> dict:
  """A method's outcomes."""
  found = {i.name: shape.outcome(method, i) for i in shape.INSTANCES}
  exact = max(one.distance for one in found.values()) < EXACT
  return {
    "name": method.name,
    "source": method.source,
    "claim": method.claim,
    "finding": method.finding,
    "depth": method.depth,
    "exact": exact,
    "distance": {name: one.distance for name, one in found.items()},
    "block_efficiency": {n: one.tokens for n, one in found.items()},
    "smallest": None if exact else shape.smallest(method),
  }


def run(_) -> int:
  """The command."""
  results.check({"--output": cli.OUTPUT.value}, stdout=True)
  start = time.perf_counter()
  result = {
    "methods": [row(method) for method in METHODS],
    "power": power.measure(),
  }
  seconds = time.perf_counter() - start
  result |= {"seconds": seconds, **provenance.record()}
  results.show_json(cli.OUTPUT.value, result)
  return 0


if __name__ == "__main__":
  cli.run(run, required=())
