"""Prints the README's table from the committed benchmark results.

  python -m launch.measuring.tables docs/measurements

Every *.json there is the --output of one `launch.benchmark` run. Under the
table are the commands that made the rows, where files tell them.
"""

import json
import pathlib
import shlex
import sys

from launch import markdown


def table(folder: str) -> str:
  """The results of a folder as a Markdown table, one row a file."""
  results = {
    path.stem: json.loads(path.read_text("utf-8"))
    for path in sorted(pathlib.Path(folder).glob("*.json"))
  }
  # Older files have no share of the memory's bandwidth, meshes neither.
  with_memory = any(map(_share, results.values()))
  names = [
    "run", "autoregressive tok/s", "speculative tok/s", "speed-up (95%)",
    "predicted, off by (95%)", "block efficiency", "loop overhead",
    *(["memory bandwidth"] if with_memory else []),
    "transformers tok/s", "assisted tok/s",
  ]  # fmt: skip
  lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
  for name, result in results.items():
    speculates = result["draft_forwards_seconds"] or result["acceptance_rate"]

    def number(key, digits=2, result=result):
      value = result[key]
      return "–" if value is None else f"{value:.{digits}f}"

    interval = result["speedup_ci"]
    speedup = number("speedup")
    if interval:
      speedup += f" ({interval[0]:.2f}–{interval[1]:.2f})"
    if speculates:
      speedup += _loss(result)
    cells = [name, number("autoregressive_tokens_per_second", 0)]
    if speculates:
      cells += [
        number("speculative_tokens_per_second", 0),
        speedup,
        number("predicted_speedup") + _error(result),
        number("block_efficiency"),
        number("loop_overhead"),
      ]
    else:
      cells += ["–"] * 4 + [number("autoregressive_loop_overhead")]
    if with_memory:
      cells.append(_share(result) or "–")
    cells += [
      number("hf_autoregressive_tokens_per_second", 0) + _alike(result),
      number("hf_assisted_tokens_per_second", 0),
    ]
    lines.append("| " + " | ".join(cells) + " |")
  commands = {name: _command(result) for name, result in results.items()}
  if any(commands.values()):
    lines.append("")
  lines += [f"- {name}: `{text}`" for name, text in commands.items() if text]
  return "\n".join(lines)


def _loss(result: dict) -> str:
  """What a speed-up costs; older files do not tell."""
  if "lossless" not in result:
    return ""
  loss = (result["lossless"], result["total_variation"])
  return f", {markdown.loss_in_words(*loss)}"


def _error(result: dict) -> str:
  """How far a prediction was off; older files do not tell."""
  if "prediction_error" not in result:
    return ""
  text = f", {result['prediction_error']:+.1%}"
  if result["prediction_error_ci"]:
    text += " ({:+.1%} to {:+.1%})".format(*result["prediction_error_ci"])
  return text


def _alike(result: dict) -> str:
  """A warning where transformers did not write the same greedy texts."""
  same = result["hf_identical_completions"]
  if same is None or same == 1:
    return ""
  return f" (**other texts**: {same:.0%} alike)"


def _command(result: dict) -> str | None:
  """The command that made a result, but for where it wrote; older: None."""
  if "provenance" not in result:
    return None
  parts = shlex.split(result["provenance"]["command"])
  left_out = ("--output=", "--overwrite")
  return shlex.join(x for x in parts if not x.startswith(left_out))


def _share(result: dict) -> str | None:
  """The share of the memory's bandwidth that plain decoding reached, if any."""
  memory = result.get("memory_bandwidth")
  return (
    memory and f"{memory['share']:.0%} ({memory['device_bandwidth_source']})"
  )


def main(argv: list[str]) -> int:
  """`tables FOLDER`; returns the exit code."""
  if len(argv) != 2 or not any(pathlib.Path(argv[1]).glob("*.json")):
    print(
      "usage: python -m launch.measuring.tables FOLDER (with *.json of "
      "launch.benchmark)",
      file=sys.stderr,
    )
    return 2
  print(table(argv[1]))
  return 0


if __name__ == "__main__":
  markdown.run(main)
