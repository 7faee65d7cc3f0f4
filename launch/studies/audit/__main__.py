"""Audit of methods published as lossless, by exact enumeration.

  python -m launch.studies.audit --output=AUDIT.json

Reports every method on four pairs of distributions, and the smallest pair on
which it is lossy. Takes half a minute. docs/rules.md lists pairs and findings.
"""

from launch import cli, provenance, report, results
from launch.studies.audit import chains, shape, trees

cli.reads(cli.OUTPUT)
METHODS = (*chains.METHODS, *trees.METHODS)
_EXACT = 1e-9  # tolerance for rounding


def row(method: shape.Method) -> dict:
  """A method's distance from the target on every pair of laws.

  Returns:
    Its `name`, `source`, `claim`, `finding` and `depth` G; by pair `distance`
    and `block_efficiency`, the expected tokens of a round; and the `smallest`
    counterexample, None if it is lossless.
  """
  outcomes = {i.name: shape.outcome(method, i) for i in shape.INSTANCES}
  lossless = max(one.distance for one in outcomes.values()) < _EXACT
  return {
    "name": method.name,
    "source": method.source,
    "claim": method.claim,
    "finding": method.finding,
    "depth": method.depth,
    "distance": {name: one.distance for name, one in outcomes.items()},
    "block_efficiency": {n: one.tokens for n, one in outcomes.items()},
    "smallest": None if lossless else shape.smallest(method),
  }


def table(rows: list[dict]) -> str:
  """A Markdown table with a row per method: distances and counterexample."""
  on = lambda pair: lambda x: _number(x["distance"][pair])
  return report.columns(
    rows,
    {
      "method": lambda x: x["name"],
      "claimed": lambda x: x["claim"],
      "G": lambda x: str(x["depth"]),
      **{pair: on(pair) for pair in rows[0]["distance"]},
      "smallest: G, p, q, distance": lambda x: _smallest(x["smallest"]),
      "finding": lambda x: x["finding"],
    },
  )


def _number(distance: float) -> str:
  return "0" if distance < _EXACT else f"{distance:.3f}".removeprefix("0")


def _smallest(case: dict | None) -> str:
  if case is None:
    return "–"
  total = case["denominator"]
  pair = lambda name: ", ".join(f"{k}/{total}" for k in case[name])
  return (
    f"{case['depth']}, ({pair('draft')}), ({pair('target')}), "
    f"{_number(case['distance'])}"
  )


def run(_) -> int:
  """The command."""
  results.check(cli.OUTPUT.value)
  rows = [row(method) for method in METHODS]
  print(table(rows), file=results.messages(cli.OUTPUT.value))
  results.write_json(cli.OUTPUT.value, {"methods": rows, **provenance.record()})
  return 0


if __name__ == "__main__":
  cli.run(run, required=("output",))
