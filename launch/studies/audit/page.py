"""The tables of the audit."""

from launch import report


def methods(results: dict[str, dict]) -> str:
  """Distance of every method on every pair of laws, and where it is smallest.

  The total variation of the joint law of the next G + 1 tokens; 0 is below
  1e-9.
  """
  (result,) = results.values()
  on = lambda pair: lambda method: _number(method["distance"][pair])
  return report.columns(
    result["methods"],
    {
      "method": lambda x: x["name"],
      "claimed": lambda x: x["claim"],
      "G": lambda x: str(x["depth"]),
      **{pair: on(pair) for pair in result["methods"][0]["distance"]},
      "smallest: G, p, q, distance": lambda x: _smallest(x["smallest"]),
      "finding": lambda x: x["finding"],
    },
  )


def sources(results: dict[str, dict]) -> str:
  """A line a source: which methods are read there."""
  (result,) = results.values()
  by_source: dict[str, list[str]] = {}
  for method in result["methods"]:
    by_source.setdefault(method["source"], []).append(method["name"])
  return "\n".join(
    f"- {'; '.join(names)}: {source}." for source, names in by_source.items()
  )


def power(results: dict[str, dict]) -> str:
  """Probability that a test by sampling finds a bias."""
  (result,) = results.values()
  numbers = result["power"]
  biases = list(numbers["chi_squared"][0]["power"])
  rows = [
    (f"chi-squared, V = {x['vocab_size']}", x["power"], x["samples_for_0.9"])
    for x in numbers["chi_squared"]
  ]
  rows.append(("vLLM's test, V = 10", numbers["vllm"], None))
  return report.table(
    [
      f"{numbers['samples']:,} samples", *(f"bias {b}" for b in biases),
      "samples for 0.9 at 0.001",
    ],
    [
      [name, *(f"{at[b]:.2f}" for b in biases), report.number(enough, ",")]
      for name, at, enough in rows
    ],
  )  # fmt: skip


def _number(distance: float) -> str:
  return "0" if distance < 1e-9 else f"{distance:.3f}".removeprefix("0")


def _smallest(case: dict | None) -> str:
  if case is None:
    return "–"
  whole = case["denominator"]
  pair = lambda name: ", ".join(f"{k}/{whole}" for k in case[name])
  return (
    f"{case['depth']}, ({pair('draft')}), ({pair('target')}), "
    f"{_number(case['distance'])}"
  )
