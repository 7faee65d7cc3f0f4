"""Systems decode the same prompts in turn: their rates, and the table of them.

Only ratios inside one run mean anything, since machines drift: so all systems
that are compared take turns on every batch, in random order.
"""

import dataclasses
import pathlib
import shlex

import numpy as np

from launch import tables
from specjax import engine, metrics, timing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
  """What systems decoded in turn.

  Attributes:
    tokens, seconds: by system, `[rounds, batches]`.
    last: by system and number of the batch, completions of the last round.
  """

  tokens: dict[str, np.ndarray]
  seconds: dict[str, np.ndarray]
  last: dict[tuple[str, int], list]

  def rate(self, name: str) -> float | None:
    """Tokens per second of a system over all rounds; None if it is not here."""
    if name not in self.tokens:
      return None
    return float(self.tokens[name].sum() / self.seconds[name].sum())

  def units(self, name: str = "speculative") -> list[metrics.Unit]:
    """A system beside plain decoding, a measured unit a batch.

    A round repeats the same prompts: it is no new sample, and means count.
    """
    of = lambda who, number: (
      self.last[who, number],
      float(self.seconds[who][:, number].mean()),
    )
    return [
      engine.unit_of(*of(name, number), of("autoregressive", number))
      for number in range(self.seconds[name].shape[1])
    ]


def measure_rates(
  batches, engines, reference, *, rounds: int, pieces=None
) -> Turns:
  """Decodes every batch with every system, in turn.

  Args:
    batches: what to decode.
    engines: {name: engine}, compiled, one of them "autoregressive".
    reference: a `hf_reference.Reference` or None.
    rounds: passes over the batches, after one that warms up.
    pieces: a `timing.Pieces` of the engines "speculative" and "autoregressive"
      that takes its turns too, or None.

  Returns:
    The `Turns`.
  """
  systems = {
    name: lambda batch, one=one: one.run(batch) for name, one in engines.items()
  }
  if reference is not None:
    systems["hf_autoregressive"] = lambda batch: reference.run(
      batch, assisted=False
    )
    if reference.can_assist and all(b.rows == 1 for b in batches):
      systems["hf_assisted"] = lambda batch: reference.run(batch, assisted=True)
  blank = lambda: {name: np.zeros((rounds, len(batches))) for name in systems}
  turns = Turns(tokens=blank(), seconds=blank(), last={})
  rng = np.random.default_rng(0)
  for index in range(rounds + 1):
    for number, batch in enumerate(batches):
      order = rng.permutation([*systems, *([None] if pieces else [])]).tolist()
      if not index:  # in pieces last: it is asked how many rounds there are
        order.sort(key=lambda name: name is None)
      for name in order:
        if name is None:
          calls = {
            who: max(one.num_target_calls for one in turns.last[who, number])
            for who in ("speculative", "autoregressive")
          }
          pieces.add(batch, calls, index=index, number=number)
          continue
        out, seconds = systems[name](batch)
        turns.last[name, number] = out
        if index:
          ids = [x if isinstance(x, list) else x.token_ids for x in out]
          turns.tokens[name][index - 1, number] = sum(map(len, ids))
          turns.seconds[name][index - 1, number] = seconds
  return turns


def prediction(turns: Turns, pieces: timing.Pieces) -> dict:
  """The speed-up that runs in pieces predict, beside the one measured.

  Every run in pieces stands beside a whole run of the same prompts in the same
  round, so that the interval of the error has one unit for each.
  """
  names = ("speculative", "autoregressive")
  whole = {name: turns.seconds[name].ravel() for name in names}
  should = {name: pieces.predicted(name).ravel() for name in names}
  rate = lambda seconds, name: turns.tokens[name].sum() / seconds[name].sum()
  speedup = lambda seconds: rate(seconds, names[0]) / rate(seconds, names[1])
  interval = metrics.interval(
    [whole["speculative"], should["autoregressive"]],
    [should["speculative"], whole["autoregressive"]],
  )
  return {
    "predicted_speedup": speedup(should),
    "prediction_error": speedup(should) / speedup(whole) - 1,
    "prediction_error_ci": interval and [end - 1 for end in interval],
  }


def table(results: dict[str, dict]) -> str:
  """Results of `launch.benchmark` by file, as Markdown, a row each.

  Under the table are the commands that made the rows, where files tell them.
  """
  # Older files have no share of the memory's bandwidth, meshes neither.
  with_memory = any(map(_share, results.values()))
  names = [
    "run", "autoregressive tok/s", "speculative tok/s", "speed-up (95%)",
    "predicted, off by (95%)", "block efficiency", "loop overhead",
    *(["memory bandwidth"] if with_memory else []),
    "transformers tok/s", "assisted tok/s",
  ]  # fmt: skip
  rows = []
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
    cells = [
      pathlib.Path(name).stem,
      number("autoregressive_tokens_per_second", 0),
    ]
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
        f"{result['predicted_speedup']:.2f}",
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
  """What a speed-up costs; older files do not tell."""
  if "lossless" not in result:
    return ""
  loss = (result["lossless"], result["total_variation"])
  return f", {tables.loss_in_words(*loss)}"


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
