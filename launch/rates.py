"""Systems decode the same prompts in turn: their rates, and what they predict.

Only ratios inside one run mean anything, since machines drift: so all systems
that are compared take turns on every batch, in random order.
"""

import dataclasses

import numpy as np

from specjax import intervals
from specjax.runtime import engine, requests, timing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
  """What systems decoded in turn.

  Attributes:
    tokens, seconds: by system, `[rounds, batches]`.
    last: by system and number of the batch, completions of the last round.
    groups: of each batch, the number of its group: those share a prompt.
  """

  tokens: dict[str, np.ndarray]
  seconds: dict[str, np.ndarray]
  last: dict[tuple[str, int], list]
  groups: list[int]

  def rate(self, name: str) -> float | None:
    """Tokens per second of a system over all rounds; None if it is not here."""
    if name not in self.tokens:
      return None
    return float(self.tokens[name].sum() / self.seconds[name].sum())

  def units(self, name: str = "speculative") -> list[intervals.Unit]:
    """A system beside plain decoding, a measured unit a group of batches.

    A round repeats the same prompts: it is no new sample, and means count.
    """
    of = lambda who, number: (
      self.last[who, number],
      float(self.seconds[who][:, number].mean()),
    )
    units = [
      engine.unit_of(*of(name, number), of("autoregressive", number))
      for number in range(self.seconds[name].shape[1])
    ]
    return intervals.merged(units, self.groups)

  def over(self, name: str, other: str) -> float:
    """Median of a system's rate over another's, in the turns of a batch."""
    rate = lambda who: self.tokens[who] / self.seconds[who]
    return float(np.median(rate(name) / rate(other)))

  def alike(self, name: str) -> float:
    """Share of prompts of which a system wrote what plain decoding did."""
    same = [
      ours.token_ids == theirs
      for (who, number), batch in self.last.items()
      if who == name
      for ours, theirs in zip(
        self.last["autoregressive", number], batch, strict=True
      )
    ]
    return sum(same) / len(same)

  def rate_interval(self, name: str) -> tuple[float, float] | None:
    """Of `rate`, over groups of batches."""
    return intervals.ratio_interval(
      *(
        intervals.grouped(of[name].mean(0), self.groups)
        for of in (self.tokens, self.seconds)
      )
    )


def measure_rates(
  batches, engines, reference, *, rounds: int, pieces=None
) -> Turns:
  """Decodes every batch with every system, in turn.

  Args:
    batches: what to decode.
    engines: {name: engine}, compiled, one of them "autoregressive"; or what
      runs batches as one does, and gives a list of tokens for each prompt.
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
  prompts = [[requests.content_of(p) for p in b.prompts] for b in batches]
  turns = Turns(
    tokens=blank(),
    seconds=blank(),
    last={},
    groups=intervals.groups_of(prompts),
  )
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
  round, so that the interval of the error has one unit for each. Where the
  pieces disagree (`doubts`) nothing is predicted.
  """
  doubts = pieces.costs().doubts
  if doubts:
    return {
      "predicted_speedup": None, "prediction_error": None,
      "prediction_error_ci": None, "doubts": doubts,
    }  # fmt: skip
  names = ("speculative", "autoregressive")
  whole = {name: turns.seconds[name].ravel() for name in names}
  should = {name: pieces.predicted(name).ravel() for name in names}
  rate = lambda seconds, name: turns.tokens[name].sum() / seconds[name].sum()
  speedup = lambda seconds: rate(seconds, names[0]) / rate(seconds, names[1])
  interval = intervals.interval(
    [whole["speculative"], should["autoregressive"]],
    [should["speculative"], whole["autoregressive"]],
  )
  return {
    "predicted_speedup": speedup(should),
    "prediction_error": speedup(should) / speedup(whole) - 1,
    "prediction_error_ci": interval and [end - 1 for end in interval],
    "doubts": [],
  }
