r"""What allocated slots cost: plain rounds and prompts in buffers of any size.

  python -m launch.tools.allocation --config=configs/smollm2.py \
    --batches=1,8 --allocated=128,512,2048,4096 --text_tokens=100 \
    --prompt_tokens=512 --buffers=1024,4096 --output=A.json

A round and a prompt should cost what is there, whatever is allocated: every
ratio is over the first size named. All cases are compiled first and then take
turns, and medians are compared.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from absl import flags

from launch import cli, provenance, results
from launch.build import pair
from specjax import decode
from specjax.types import Params
from specjax.warp import make_sampling

cli.reads(cli.CONFIG, cli.OUTPUT, cli.BATCHES, cli.TEXT_TOKENS, cli.VISITS)
_SLOTS = flags.DEFINE_list(
  "allocated", ["128", "4096"], "Slots that rounds are made in."
)
_PROMPT = flags.DEFINE_integer(
  "prompt_tokens",
  512,
  "Tokens of the prompt whose reading is timed.",
  lower_bound=1,
)
_BUFFERS = flags.DEFINE_list(
  "buffers", ["1024", "4096"], "Slots that the prompt is read into."
)


class _Case:
  """Something that is timed, by its size."""

  def __init__(self, size: int, act: Callable[[], object]):
    self.size, self.act, self.seconds = size, act, []  # type: ignore[var-annotated]
    act()

  def turn(self) -> None:
    start = time.perf_counter()
    jax.block_until_ready(self.act())
    self.seconds.append(time.perf_counter() - start)


def _beginning(decoder, params: Params, rows: int, length: int, slots: int):
  """A jitted `init` of rows of one text, and its arguments."""
  text = np.arange(length) % min(decoder.vocab_size, 1000)
  prompts = np.tile(text, (rows, 1))
  begin = lambda *args: decoder.init(
    *args, buffer_length=slots, max_new_tokens=slots - length,
    sampling=make_sampling(rows, temperature=0.0),
  )  # fmt: skip
  args = (params, prompts, np.full(rows, length), jax.random.key(0))
  return jax.jit(begin), args


def round_case(decoder, params, *, rows: int, text: int, slots: int) -> _Case:
  """One plain round of rows that have `text` tokens."""
  begin, args = _beginning(decoder, params, rows, text, slots)
  held = [begin(*args)]
  step = jax.jit(lambda *a: decoder.steps(*a, 1), donate_argnums=1)

  def act():
    held[0] = step(params, held[0])
    return held[0].length

  return _Case(slots, act)


def prompt_case(decoder, params, *, prompt: int, slots: int) -> _Case:
  """Reading one prompt into a buffer."""
  begin, args = _beginning(decoder, params, 1, prompt, slots)
  return _Case(slots, lambda: begin(*args).target_cache)


def _measured(cases: Sequence[_Case], **what) -> dict:
  for _ in range(cli.VISITS.value):
    for case in cases:
      case.turn()
  medians = {c.size: statistics.median(c.seconds) for c in cases}
  first = medians[cases[0].size]
  return {
    **what,
    "seconds": medians,
    "ratios": {size: each / first for size, each in medians.items()},
  }


def run(_) -> int:
  """The command."""
  config = cli.CONFIG.value
  sizes = {
    name: [int(x) for x in flag.value]
    for name, flag in (
      ("rows", cli.BATCHES),
      ("slots", _SLOTS),
      ("buffers", _BUFFERS),
    )
  }
  if min(sizes["slots"]) < cli.TEXT_TOKENS.value + cli.VISITS.value + 2:
    raise cli.UserError(
      "--allocated must hold --text_tokens and a token a visit: "
      f"{cli.TEXT_TOKENS.value} and {cli.VISITS.value} do not fit into "
      f"{min(sizes['slots'])}"
    )
  if min(sizes["buffers"]) <= _PROMPT.value:
    raise cli.UserError("--buffers must be larger than --prompt_tokens")
  print("compiling and measuring each size in turn ...", file=sys.stderr)
  target = pair.load(config).target
  decoder = decode.make_decoder(target.whole())
  params = Params(target=target.params)
  rounds = [
    _measured(
      [
        round_case(
          decoder, params, rows=rows, text=cli.TEXT_TOKENS.value, slots=slots
        )
        for slots in sizes["slots"]
      ],
      rows=rows, text=cli.TEXT_TOKENS.value,
    )
    for rows in sizes["rows"]
  ]  # fmt: skip
  prompts = _measured(
    [
      prompt_case(decoder, params, prompt=_PROMPT.value, slots=slots)
      for slots in sizes["buffers"]
    ],
    prompt=_PROMPT.value,
  )
  for one, what in (
    *[(r, f"rounds of {r['rows']} rows") for r in rounds],
    (prompts, f"prompts of {_PROMPT.value} tokens"),
  ):
    found = [f"{size} slots {x:.3f}" for size, x in one["ratios"].items()]
    print(f"{what}: {', '.join(found)}", file=sys.stderr)
  results.write_json(
    cli.OUTPUT.value,
    {
      "rounds": rounds,
      "prompts": prompts,
      **provenance.record(models=provenance.checkpoints(config)),
    },
  )
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
