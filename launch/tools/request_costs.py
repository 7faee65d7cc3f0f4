r"""Cost of a request's settings: penalties, biases, likeliest tokens.

  python -m launch.tools.request_costs --config=configs/smollm2.py \
    --batches=1,8 --text_tokens=100 --output=R.json

Every ratio is over a round of a program that has none of them (`absent`).
`unasked` is a round of the server's program, which has them all, where no row
asks for any; in the others every row asks. Cases take turns, and medians are
compared.
"""

import dataclasses
import functools
import sys
from typing import Any

import jax
import numpy as np

from launch import cli, prompt_lines, provenance, results
from launch.assembly import pair
from launch.serving import control
from specjax.decode import Decoder
from specjax.runtime import timing
from specjax.state import DecodeState
from specjax.types import Params
from specjax.warp import make_sampling

cli.reads(cli.CONFIG, cli.OUTPUT, cli.BATCHES, cli.TEXT_TOKENS, cli.ITERATIONS)
_ROUNDS = 2  # of an iteration

# What rows ask for, by the name of the case; {} for nothing.
CASES: dict[str, dict[str, Any]] = {
  "unasked": {},
  "penalties": dict(
    presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1
  ),
  "biases": dict(
    logit_bias=dict.fromkeys(range(prompt_lines.MOST_BIASES), -1.0)
  ),
  "likeliest": {},
}


def _programs(decoder: Decoder, params: Params, rows: int, length: int):
  """Of rows of one text: what begins them with a warp, and makes rounds."""
  text = np.tile(np.arange(length) % min(decoder.vocab_size, 1000), (rows, 1))
  room = (
    (cli.ITERATIONS.value + 1) * _ROUNDS * (decoder.drafter.tree.max_depth + 1)
  )
  begin = jax.jit(
    lambda params, text, sampling: decoder.init(
      params, text, np.full(rows, length), jax.random.key(0),
      buffer_length=length + room, max_new_tokens=room, sampling=sampling,
    )
  )  # fmt: skip
  step = jax.jit(lambda *args: decoder.steps(*args, _ROUNDS), donate_argnums=1)
  return functools.partial(begin, params, text), step


def measured(
  decoder: Decoder, params: Params, *, rows: int, text: int
) -> dict[str, Any]:
  """Seconds of a round in every case, and their ratios.

  Args:
    decoder: which records nothing beside tokens.
    params: of both models.
    rows: of the batch.
    text: tokens that each has.
  """
  whole = dataclasses.replace(
    decoder,
    with_log_probs=True,
    num_likeliest=min(control.MOST_LIKELIEST, decoder.vocab_size),
  )
  truncations = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
  plain = make_sampling(rows, **truncations)
  begin, step = _programs(decoder, params, rows, text)
  states, steps = {"absent": begin(plain)}, {"absent": step}
  begin, step = _programs(whole, params, rows, text)
  neutral = dict(
    repetition_penalty=1.0,
    logit_bias=dict.fromkeys(range(prompt_lines.MOST_BIASES), 0.0),
  )
  for name, asked in CASES.items():
    sampling = make_sampling(rows, **(truncations | neutral | asked))
    state: DecodeState = begin(sampling)
    assert state.likeliest is not None  # the decoder records them
    wanted = np.full(rows, name == "likeliest")
    likeliest = dataclasses.replace(state.likeliest, wanted=wanted)
    states[name] = dataclasses.replace(state, likeliest=likeliest)
    steps[name] = step

  def act(name: str):
    states[name] = steps[name](params, states[name])
    return jax.block_until_ready(states[name].length)

  seconds = timing.alternate(
    {name: functools.partial(act, name) for name in states},
    rounds=cli.ITERATIONS.value,
  )
  medians = {name: each / _ROUNDS for name, each in seconds.items()}
  return {
    "rows": rows,
    "text": text,
    "nodes": decoder.drafter.tree.num_nodes,
    "seconds": medians,
    "ratios": {n: each / medians["absent"] for n, each in medians.items()},
  }


def run(_) -> int:
  """The command."""
  results.check({"--output": cli.OUTPUT.value})
  config = cli.CONFIG.value
  models = pair.assemble(config, pair.load(config))
  decoder = dataclasses.replace(models.decoder, with_log_probs=False)
  rounds = []
  for rows in map(int, cli.BATCHES.value):
    print(f"compiling and measuring {rows} rows ...", file=sys.stderr)
    one = measured(
      decoder, models.params, rows=rows, text=cli.TEXT_TOKENS.value
    )
    ratios = [f"{name} {ratio:.3f}" for name, ratio in one["ratios"].items()]
    print(f"rounds of {rows} rows: {', '.join(ratios)}", file=sys.stderr)
    rounds.append(one)
  about = provenance.record(models=provenance.checkpoints(config))
  results.write_json(cli.OUTPUT.value, {"rounds": rounds, **about})
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
