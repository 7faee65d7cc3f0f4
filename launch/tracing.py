"""Traces rounds: drafts, distributions, accepted nodes and emitted tokens.

The host reads the state after every round: tokens are the same as without
tracing, but times are not meaningful.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch import results
from launch.prompts import Prompt
from specjax.runtime import engine as engine_lib
from specjax.runtime.engine import Completion, Engine
from specjax.runtime.requests import Batch
from specjax.state import Origin
from specjax.tree import take_node
from specjax.types import Params

_OF_NODES = ("drafted", "parents", "draft_log_probs", "target_log_probs")
# A batch's completions, and the trace of each.
Traced = tuple[list[Completion], list[dict[str, Any]]]


def tracer(engine: Engine) -> Callable[[Batch], Traced]:
  """Makes a function that decodes and traces batches.

  Besides the completion it returns for each row "log_probs", the target's for
  each emitted token (temperature 1, no truncation), "warped_log_probs", those
  after temperature and truncation, and "rounds" (docs/decode.md).
  """
  if engine.mesh is not None:
    raise ValueError("tracing runs on one device: give no config.mesh")
  engine = dataclasses.replace(
    engine,
    decoder=dataclasses.replace(engine.decoder, with_log_probs=True),
    programs={},
  )
  step = jax.jit(_traced_step(engine.decoder), donate_argnums=1)

  def trace(batch: Batch) -> Traced:
    engine.compile(batch)
    state = engine.prefill(batch)
    stopping = engine.stopping(batch, state)
    seen: list[dict[str, np.ndarray]] = []
    while not np.all(jax.device_get(state.done)):
      state, arrays = step(engine.params, state)
      seen.append(jax.device_get(arrays))
      if stopping:
        state = stopping.end_rows(state)
    done = engine_lib.completions(state, len(batch.prompts))
    log_probs, starts = jax.device_get((state.log_probs, state.prompt_length))
    traces = []
    for row, completion in enumerate(done):
      rounds = _rounds_of(seen, row, completion)
      warped = [x for one in rounds for x in one["warped_log_probs"]]
      own = _numbers(log_probs[row, starts[row] :][: len(completion.token_ids)])
      traces.append(
        {"log_probs": own, "warped_log_probs": warped, "rounds": rounds}
      )
    return done, traces

  return trace


def _traced_step(decoder):
  """A round and its trace; large distributions stay on the device."""

  def step(params: Params, state):
    after, info = decoder.step(params, state)
    draft, topology = info.draft, info.draft.topology()
    count = draft.tree.num_nodes
    per_row = lambda x: jnp.broadcast_to(x, (len(state.length), *x.shape[1:]))
    parents = per_row(topology.parents)[:, :count]
    tokens = draft.tokens[:, :count]
    rows = jnp.arange(len(tokens))[:, None]
    path = take_node(per_row(topology.paths), info.node)  # [B, G + 1]
    drafted = jnp.zeros(tokens.shape)
    if draft.log_probs is not None:
      drafted = jnp.take_along_axis(draft.log_probs, tokens[..., None], -1)
      drafted = drafted[..., 0]
    return after, {
      "position": state.length,
      "present": per_row(topology.present)[:, :count],
      "parents": parents,
      "drafted": tokens,
      "draft_log_probs": drafted,
      "target_log_probs": info.target_log_probs[rows, parents, tokens],
      "node_probs": info.node_probs,
      "path": path,
      "depth": take_node(per_row(topology.depth), info.node),
      "tokens": info.tokens,
      "warped_log_probs": info.target_log_probs[rows, path, info.tokens],
      "num_emitted": info.num_emitted,
    }

  return step


def _rounds_of(
  seen: list[dict[str, np.ndarray]], row: int, completion: Completion
) -> list[dict[str, Any]]:
  """The rounds of a row, cut at the end of its completion."""
  rounds: list[dict[str, Any]] = []
  start, end = 0, len(completion.token_ids)
  for arrays in seen:
    one = {name: values[row] for name, values in arrays.items()}
    count = min(int(one["num_emitted"]), end - start)
    if not count:
      continue
    nodes = {
      name: [
        x if here else None
        for x, here in zip(_numbers(one[name]), one["present"], strict=True)
      ][1:]
      for name in _OF_NODES
    }
    emitted = slice(start, start + count)
    origins = [Origin(x).name.lower() for x in completion.origins[emitted]]
    rounds.append(
      {
        "round": len(rounds),
        "position": int(one["position"]),
        **nodes,
        "node_probs": _numbers(one["node_probs"]),
        "accepted": one["path"][1 : int(one["depth"]) + 1].tolist(),
        "tokens": completion.token_ids[emitted],
        "origins": origins,
        "warped_log_probs": _numbers(one["warped_log_probs"][:count]),
      }
    )
    start += count
  return rounds


def _numbers(values: np.ndarray) -> list[float | int | None]:
  """Numbers for JSON; non-finite ones, such as log 0, become null."""
  return [x if np.isfinite(x) else None for x in values.tolist()]


def lines_of(items: Iterable[Prompt], rows: Mapping[str, dict]) -> str:
  """The text of a trace: a line for every round of every prompt."""
  return results.dumps(
    {"id": item.id}
    | ({} if item.sample is None else {"sample": item.sample})
    | one
    for item in items
    for one in rows[item.key]["rounds"]
  )
