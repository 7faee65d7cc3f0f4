"""The tables of benchmarks, of what `launch.benchmark --output` wrote."""

import pathlib
import shlex

from launch import tables


def table(results: dict[str, dict]) -> str:
  """Results of `launch.benchmark` by file, as Markdown, a row each.

  Under the table are the commands that made the rows, where files tell them.
  """
  # Older files have no share of the memory's bandwidth, meshes neither, and
  # most no llama.cpp.
  with_memory = any(map(_share, results.values()))
  with_llama_cpp = any(x.get("llama_cpp") for x in results.values())
  names = [
    "run", "autoregressive tok/s", "speculative tok/s", "speed-up (95%)",
    "predicted, off by (95%)", "block efficiency", "loop overhead",
    *(["memory bandwidth"] if with_memory else []),
    "transformers tok/s", "assisted tok/s",
    *(["llama.cpp tok/s"] if with_llama_cpp else []),
  ]  # fmt: skip
  rows = []
  for name, result in results.items():
    speculates = result["draft_forwards_seconds"] or result["acceptance_rate"]

    def number(key, digits=2, result=result):
      value = result.get(key)
      return "–" if value is None else f"{value:.{digits}f}"

    interval = result["speedup_ci"]
    speedup = number("speedup")
    if interval:
      speedup += f" ({interval[0]:.2f}–{interval[1]:.2f})"
    if speculates:
      speedup += _loss(result)
    cells = [
      pathlib.Path(name).stem,
      number("autoregressive_tokens_per_second", 0),
    ]
    if speculates:
      cells += [
        number("speculative_tokens_per_second", 0),
        speedup,
        _predicted(result) + _error(result),
        number("block_efficiency"),
        number("loop_overhead"),
      ]
    else:
      cells += ["–"] * 4 + [number("autoregressive_loop_overhead")]
    if with_memory:
      cells.append(_share(result) or "–")
    cells += [
      number("hf_autoregressive_tokens_per_second", 0)
      + _ratios(result, "hf_autoregressive", speculates)
      + _alike(result, "hf"),
      number("hf_assisted_tokens_per_second", 0),
    ]
    if with_llama_cpp:
      cells.append(
        number("llama_cpp_tokens_per_second", 0)
        + _ratios(result, "llama_cpp", speculates)
        + _alike(result, "llama_cpp")
      )
    rows.append(cells)
  lines = [tables.table(names, rows)]
  commands = {name: _command(result) for name, result in results.items()}
  if any(commands.values()):
    lines.append("")
  lines += [
    f"- {pathlib.Path(name).stem}: `{text}`"
    for name, text in commands.items()
    if text
  ]
  return "\n".join(lines)


def short(results: dict[str, dict]) -> str:
  """The same in a few columns, for pairs that speculate."""
  rows = []
  for name, result in results.items():
    interval = result["speedup_ci"]
    speedup = f"{result['speedup']:.2f}"
    if interval:
      speedup += " ({:.2f}–{:.2f})".format(*interval)
    rows.append(
      [
        pathlib.Path(name).stem,
        f"{result['autoregressive_tokens_per_second']:.0f}",
        f"{result['speculative_tokens_per_second']:.0f}",
        speedup + _loss(result),
        _predicted(result),
        f"{result['block_efficiency']:.2f}",
      ]
    )
  return tables.table(
    [
      "run", "plain tok/s", "speculative tok/s", "speed-up (95%)", "predicted",
      "tokens a target call",
    ],
    rows,
  )  # fmt: skip


def _loss(result: dict) -> str:
  """The rule, and what a speed-up costs; older files do not tell."""
  if "lossless" not in result:
    return ""
  loss = (result["rule"], result["lossless"], result["total_variation"])
  return f", `{result['rule']}`: {tables.loss_in_words(*loss)}"


def _predicted(result: dict) -> str:
  """The predicted speed-up, or what disagrees in the timings."""
  if result.get("doubts"):
    return "none: " + "; ".join(result["doubts"])
  return f"{result['predicted_speedup']:.2f}"


def _error(result: dict) -> str:
  """How far a prediction was off; older files do not tell."""
  if result.get("prediction_error") is None:
    return ""
  text = f", {result['prediction_error']:+.1%}"
  if result["prediction_error_ci"]:
    text += " ({:+.1%} to {:+.1%})".format(*result["prediction_error_ci"])
  return text


def _ratios(result: dict, other: str, speculates) -> str:
  """Our rates over another system's, if it is there; older files: none."""
  ratios = result.get("ratios", {}).get(other)
  if not ratios:
    return ""
  text = f"plain ×{ratios['autoregressive']:.2f}"
  if speculates:
    text += f", speculative ×{ratios['speculative']:.2f}"
  return f" ({text})"


def _alike(result: dict, other: str) -> str:
  """A warning where another system did not write the same greedy texts."""
  same = result.get(f"{other}_identical_completions")
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
