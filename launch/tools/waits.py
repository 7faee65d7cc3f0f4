r"""Times inter-token latency beside arriving prompts, and a second turn's TTFT.

  python -m launch.tools.waits --config=configs/smollm2.py \
    --config.drafter=plain --arriving_tokens=1500 --arrivals=4 \
    --turn_tokens=1000 --output=W.json

A row streams, a round an iteration, while prompts arrive, each as soon as the
one before it has been read; then all over again with one row more that decodes.
`gaps` are times between two of its tokens over the median of its own rounds,
alone: the median, the 99th percentile and the longest; `alone` the same of its
rounds alone, which says how the machine itself hesitates; `whole` what a gap
would be if a prompt were read at once. A conversation's second turn is answered
where its first is in a slot, and, in turn, where it must be read: `first_token`
is the ratio.
"""

import dataclasses
import functools
import statistics
import sys
from collections.abc import Sequence

import numpy as np
from absl import flags

from launch import cli, provenance, results
from launch.assembly import pair
from launch.serving import assembly
from launch.serving.control import Asked
from launch.serving.slots import Slots
from specjax.state import StopReason

cli.reads(cli.CONFIG, cli.OUTPUT)
_PROMPT = flags.DEFINE_integer(
  "arriving_tokens", 1500, "Tokens of each prompt that arrives.", lower_bound=2
)
_ARRIVALS = flags.DEFINE_integer(
  "arrivals", 4, "Prompts that arrive, and second turns.", lower_bound=1
)
_FIRST = flags.DEFINE_integer(
  "turn_tokens", 1000, "Tokens of a first turn.", lower_bound=2
)
_ALONE = 400  # rounds of which the median is the row's own
_ANSWER, _QUESTION = 32, 24  # tokens between the first turn and the second


def _asked(length: int, seed: int, budget: int) -> Asked:
  """A prompt of tokens that no other begins with."""
  tokens = np.random.default_rng(seed).integers(3, 1000, length)
  return Asked(
    token_ids=tuple(tokens.tolist()), seed=seed, max_new_tokens=budget,
    temperature=0.0, ignore_stop=True,
  )  # fmt: skip


def _iteration(slots: Slots, *admissions):
  return slots.iterate(
    dataclasses.replace(slots.idle(), rounds=1, admissions=admissions)
  )


def gaps(slots: Slots, *, prompt: int, arrivals: int, streams: int) -> dict:
  """Gaps between tokens of rows that stream while prompts arrive.

  Args:
    slots: all idle, and idle again afterwards.
    prompt: tokens of each.
    arrivals: how many.
    streams: rows that decode.

  Returns:
    Seconds of a round alone, and of others in such rounds.
  """
  others = range(streams)
  _iteration(
    slots,
    *[(row, _asked(8, 100 + row, slots.max_length - 8)) for row in others],
  )
  count = min(_ALONE, slots.max_length // 4)  # the row goes on afterwards
  own = [_iteration(slots).seconds for _ in range(count)]
  alone, waited, reading = statistics.median(own), [], []
  for one in range(arrivals):
    report = _iteration(slots, (streams, _asked(prompt, one, 1)))
    seconds = [report.seconds]
    while report.length[streams] <= prompt:
      report = _iteration(slots)
      assert (report.length[:streams] > report.start[:streams]).all()
      seconds.append(report.seconds)
    waited += seconds
    reading.append(sum(seconds) - alone * len(seconds))
  ended = np.ones(slots.num_slots, bool)
  slots.iterate(dataclasses.replace(slots.idle(), ended=ended))
  return {
    "streams": streams,
    "round_seconds": alone,
    "alone": _spread(own, alone),
    "gaps": _spread(waited, alone),
    "whole": statistics.median(reading) / alone,
  }


def _spread(seconds: Sequence[float], unit: float) -> dict[str, float]:
  """Median, 99th percentile and longest of times, in units of one."""
  median, late, longest = np.quantile(seconds, (0.5, 0.99, 1)) / unit
  return {"median": median, "p99": late, "longest": longest}


def turns(slots: Slots, *, first: int, count: int) -> dict:
  """Time to the first token of second turns, held and read.

  Args:
    slots: all idle, and idle again afterwards.
    first: tokens of a first turn.
    count: conversations.
  """

  def to_first(asked: Asked) -> tuple[float, list[int]]:
    report = _iteration(slots, (0, asked))
    seconds, text = report.seconds, []
    while True:
      text += report.tokens[0, : report.length[0] - report.start[0]].tolist()
      if report.reason[0] != StopReason.RUNNING:
        return seconds, text
      report = _iteration(slots)
      seconds += 0 if text else report.seconds

  held, read = [], []
  for one in range(count):
    begun = _asked(first, 1000 + one, _ANSWER)
    _, answer = to_first(begun)
    new = _asked(_QUESTION, 2000 + one, 1)
    whole = (*begun.token_ids, *answer, *new.token_ids)
    second = dataclasses.replace(new, token_ids=whole)
    held.append(to_first(second)[0])
    slots.forget()
    read.append(to_first(second)[0])
  return {
    "held_seconds": held,
    "read_seconds": read,
    "first_token": statistics.median(held) / statistics.median(read),
  }


def run(_) -> int:
  """The command."""
  results.check({"--output": cli.OUTPUT.value})
  config = cli.CONFIG.value
  most = max(_PROMPT.value, _FIRST.value + _ANSWER + _QUESTION)
  loaded = pair.load(config)
  room = pair.assemble(config, loaded).room(config.max_new_tokens)
  if room < most:
    raise cli.UserError(f"the pair has room for prompts of {room} tokens")
  sizes = assembly.Sizes(slots=3, max_prompt=most)
  say = functools.partial(print, file=sys.stderr, flush=True)
  slots = assembly.make_slots(config, loaded, sizes, say)
  measured = {
    "gaps": [
      gaps(
        slots, prompt=_PROMPT.value, arrivals=_ARRIVALS.value, streams=streams
      )
      for streams in (1, 2)
    ],
    "turns": turns(slots, first=_FIRST.value, count=_ARRIVALS.value),
  }
  about = provenance.record(models=provenance.checkpoints(config))
  results.write_json(cli.OUTPUT.value, {**measured, **about})
  for one in measured["gaps"]:
    gaps_of, own = one["gaps"], one["alone"]
    say(
      f"{one['streams']} streaming: gaps of {gaps_of['median']:.2f} rounds, "
      f"one in a hundred {gaps_of['p99']:.2f}, the longest "
      f"{gaps_of['longest']:.2f} (alone {own['longest']:.2f}; "
      f"{one['whole']:.1f} if a prompt were read at once)"
    )
  ratio = measured["turns"]["first_token"]
  say(f"a second turn's first token: {ratio:.3f} of the time of reading all")
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
