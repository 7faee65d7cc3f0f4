"""Traces of real rounds, drafted as deep as can be, for replay.

A static chain of G tokens is decoded, and of each round is kept what a policy
would see of it and what became of it: of every depth up to G at once.
"""

import dataclasses

import jax
import ml_collections
import numpy as np

from launch.assembly import pair as pair_lib
from launch.assembly.drafting import Drafting
from launch.assembly.pair import Models
from launch.prompts import Prompt
from specjax.runtime.requests import make_batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traces:
  """Rounds of R rows, M at most in each, of G drafted tokens.

  Attributes:
    accept: `f32[R, M, G]`, `min(1, q / p)` of each token.
    top: `f32[R, M, G]`, the largest probability of the law that it was drawn
      from, at temperature 1.
    confidence: `f32[R, M, G]`, its own in that.
    hidden: `f32[R, M, G, H]`, the draft's hidden state that the law was read
      of; H is 0 if none was asked for.
    present: `bool[R, M]`, which rounds there were.
    temperature: of the sampling.
  """

  accept: np.ndarray
  top: np.ndarray
  confidence: np.ndarray
  hidden: np.ndarray
  present: np.ndarray
  temperature: float

  @property
  def depth(self) -> int:
    """G."""
    return self.accept.shape[2]

  @property
  def num_rounds(self) -> int:
    """Of all rows."""
    return int(self.present.sum())


def collect(
  config: ml_collections.ConfigDict,
  models: Models,
  items: list[Prompt],
  drafting: Drafting,
) -> Traces:
  """Decodes prompts, and writes down every round.

  Args:
    config: of the pair. Its rule does not matter: positions that a rule would
      not come to are there too, and count for their survival.
    models: of the config.
    items: the prompts.
    drafting: from `launch.assembly.registry.recording`.
  """
  pair = pair_lib.assemble(config, models, drafting=drafting)
  one = pair_lib.engine_of(config, pair)

  @jax.jit
  def step(params, state):
    going = ~state.done
    after, _ = one.decoder.step(params, state)
    now = after.drafter_state.memory
    return after, (now.accept, now.top, now.confidence, now.hidden, going)

  rows = []
  for batch in make_batches(
    items, batch_size=config.batch_size,
    max_width=pair.room(config.max_new_tokens),
  ):  # fmt: skip
    one.compile(batch)
    state, seen = one.prefill(batch), []
    while not np.all(jax.device_get(state.done)):
      state, info = step(one.params, state)
      seen.append(jax.device_get(info))
    columns = [np.stack(column, axis=1) for column in zip(*seen, strict=True)]
    for row in range(len(batch.prompts)):
      rows.append([column[row] for column in columns])
  most = max(len(row[0]) for row in rows)

  def padded(index):
    return np.stack(
      [
        np.pad(
          row[index],
          [(0, most - len(row[index]))] + [(0, 0)] * (row[index].ndim - 1),
        )
        for row in rows
      ]
    )

  return Traces(
    accept=padded(0),
    top=padded(1),
    confidence=padded(2),
    hidden=padded(3),
    present=padded(4),
    temperature=config.temperature,
  )
