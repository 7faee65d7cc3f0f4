"""The tables of the audit."""

from launch.tables import table


def methods(results: dict[str, dict]) -> str:
  """Distance of every method on every pair of laws, and where it is smallest.

  The total variation of the joint law of the next G + 1 tokens; 0 is below
  1e-9.
  """
  (result,) = results.values()
  names = list(result["methods"][0]["distance"])
  rows = []
  for method in result["methods"]:
    cells = [_number(method["distance"][name]) for name in names]
    rows.append(
      [
        method["name"],
        method["claim"],
        str(method["depth"]),
        *cells,
        _smallest(method["smallest"]),
        method["finding"],
      ]
    )
  head = ["method", "claimed", "G", *names, "smallest: G, p, q, distance"]
  return table([*head, "finding"], rows)


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
  """How likely a test by sampling finds a bias."""
  (result,) = results.values()
  found = result["power"]
  biases = list(found["chi_squared"][0]["power"])
  rows = [
    [
      f"chi-squared, V = {one['vocab_size']}",
      *(f"{one['power'][bias]:.2f}" for bias in biases),
      f"{one['samples_for_0.9']:,}",
    ]
    for one in found["chi_squared"]
  ]
  vllm = [f"{found['vllm'][bias]:.2f}" for bias in biases]
  rows.append(["vLLM's test, V = 10", *vllm, "–"])
  head = [f"{found['samples']:,} samples", *(f"bias {b}" for b in biases)]
  return table([*head, "samples for 0.9 at 0.001"], rows)


def _number(distance: float) -> str:
  return "0" if distance < 1e-9 else f"{distance:.3f}".removeprefix("0")


def _smallest(found: dict | None) -> str:
  if found is None:
    return "–"
  whole = found["denominator"]
  pair = lambda name: ", ".join(f"{k}/{whole}" for k in found[name])
  return (
    f"{found['depth']}, ({pair('draft')}), ({pair('target')}), "
    f"{_number(found['distance'])}"
  )
