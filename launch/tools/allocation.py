r"""Cost of allocated slots: plain rounds and prompts in buffers of any size.

  python -m launch.tools.allocation --config=configs/smollm2.py \
    --batches=1,8 --allocated=128,512,2048,4096 --text_tokens=100 \
    --prompt_tokens=512 --buffers=1024,4096 --output=A.json

A round and a prompt should cost what is there, whatever is allocated: every
ratio is over the first size named. All cases are compiled first and then take
turns, and medians are compared.
"""

import sys
from collections.abc import Callable, Mapping

import jax
import numpy as np
from absl import flags

from launch import cli, provenance, results
from launch.assembly import pair
from specjax import decode
from specjax.runtime import timing
from specjax.types import Params
from specjax.warp import make_sampling

cli.reads(cli.CONFIG, cli.OUTPUT, cli.BATCHES, cli.TEXT_TOKENS, cli.ITERATIONS)
_SLOTS = flags.DEFINE_list(
  "allocated", ["128", "4096"], "Slots that rounds are made in."
)
_PROMPT = flags.DEFINE_integer(
  "prompt_tokens", 512, "Tokens of the prompt whose reading is timed.",
  lower_bound=1,
)  # fmt: skip
_BUFFERS = flags.DEFINE_list(
  "buffers", ["1024", "4096"], "Slots that the prompt is read into."
)


def _beginning(decoder, params: Params, rows: int, length: int, slots: int):
  """Calls a jitted `init` of rows of one text."""
  text = np.arange(length) % min(decoder.vocab_size, 1000)
  prompts = np.tile(text, (rows, 1))
  begin = jax.jit(
    lambda *args: decoder.init(
      *args, buffer_length=slots, max_new_tokens=slots - length,
      sampling=make_sampling(rows, temperature=0.0),
    )
  )  # fmt: skip
  args = (params, prompts, np.full(rows, length), jax.random.key(0))
  return lambda: begin(*args)


def round_case(decoder, params, *, rows: int, text: int, slots: int):
  """One plain round of rows that have `text` tokens."""
  held = [_beginning(decoder, params, rows, text, slots)()]
  step = jax.jit(lambda *a: decoder.steps(*a, 1), donate_argnums=1)

  def act():
    held[0] = step(params, held[0])
    return held[0].length

  return act


def _measured(cases: Mapping[int, Callable[[], object]], **about) -> dict:
  """Median seconds of cases by their size, and ratios over the first."""
  parts = {
    str(size): lambda act=act: jax.block_until_ready(act())
    for size, act in cases.items()
  }
  seconds = timing.alternate(parts, rounds=cli.ITERATIONS.value)
  first, *_ = seconds.values()
  ratios = {size: each / first for size, each in seconds.items()}
  return {**about, "seconds": seconds, "ratios": ratios}


def run(_) -> int:
  """The command."""
  results.check({"--output": cli.OUTPUT.value})
  config, text = cli.CONFIG.value, cli.TEXT_TOKENS.value
  batches, slots, buffers = (
    [int(x) for x in flag.value] for flag in (cli.BATCHES, _SLOTS, _BUFFERS)
  )
  if min(slots) < text + cli.ITERATIONS.value + 2:
    raise cli.UserError(
      "--allocated must hold --text_tokens and a token an iteration: "
      f"{text} and {cli.ITERATIONS.value} do not fit into {min(slots)}"
    )
  if min(buffers) <= _PROMPT.value:
    raise cli.UserError("--buffers must be larger than --prompt_tokens")
  print("compiling and measuring each size in turn ...", file=sys.stderr)
  target = pair.load(config).target
  decoder = decode.make_decoder(target.whole())
  params = Params(target=target.params)
  rounds = [
    _measured(
      {
        size: round_case(decoder, params, rows=rows, text=text, slots=size)
        for size in slots
      },
      rows=rows, text=text,
    )
    for rows in batches
  ]  # fmt: skip
  reading = lambda begin: lambda: begin().target_cache
  prompts = _measured(
    {
      size: reading(_beginning(decoder, params, 1, _PROMPT.value, size))
      for size in buffers
    },
    prompt=_PROMPT.value,
  )
  for one, what in (
    *[(r, f"rounds of {r['rows']} rows") for r in rounds],
    (prompts, f"prompts of {_PROMPT.value} tokens"),
  ):
    shown = [f"{size} slots {x:.3f}" for size, x in one["ratios"].items()]
    print(f"{what}: {', '.join(shown)}", file=sys.stderr)
  about = provenance.record(models=provenance.checkpoints(config))
  result = {"rounds": rounds, "prompts": prompts, **about}
  results.write_json(cli.OUTPUT.value, result)
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
