"""Bytes of a plan on a device, and the largest batch and length that fit."""

import dataclasses

from launch.planning import borrowing, heads, networks, program
from launch.planning.program import Question
from models.networks import lowbits

_ITEM = 2  # bytes of a bfloat16
_LANES = 128  # heads have channels for all of them, used or not


def held(q: Question) -> int:
  """Bytes of weights and caches on a device, as the compiler lays them out."""
  total, refed = 0, heads.more_pending(q.head, q.tree) if q.head else 0
  for config, weights, cache, size in _models(q):
    total += networks.num_bytes(config, weights) // size
    total += _ITEM * networks.replicated(config) * (size - 1) // size
    slots = q.rows * (q.slots + q.input_length)
    total += _cache(config, size, slots, cache)
    states, pending = networks.state_bytes(config)
    total += q.rows * (states + (q.tree.num_fed + refed) * pending) // size
  if q.own_weights is not None:
    config = q.cut_target()
    copies = borrowing.rounded(q.own_shapes(), networks.shapes(config))
    total += sum(map(lowbits.num_bytes, copies.values())) // q.layout.model
  if q.head is not None:
    total += _ITEM * program.num_draft_params(q) // q.layout.draft
    if layers := heads.cached(q.cut_head()[0]):
      slots = q.slots + heads.more_slots(q.head, q.tree)
      one = _cache(layers, q.layout.draft, q.rows * slots)
      total += one * heads.num_depths(q.head, q.tree)
  return total


def _models(q: Question):
  """The models as they are cut, what is stored how, over how many devices."""
  yield q.cut_target(), q.weights, q.cache, q.layout.model
  if q.draft:
    yield q.cut_draft(), q.draft_weights, q.draft_cache, q.layout.draft


def _cache(config, size: int, slots: int, cache: str | None = None) -> int:
  layers = networks.cached(config)
  per_slot = sum(networks.slot_channels(layer, _LANES) for layer in layers)
  if cache is None:
    return _ITEM * per_slot * slots // size
  scales = 2 * sum(layer.num_kv_heads for layer in layers)  # of four bytes
  return (per_slot + 4 * scales) * slots // size


def largest(q: Question, temporaries: int, hbm: int) -> dict:
  """The largest batch at this length, and length at this batch, that fit.

  Temporaries are taken to grow with the rows, and with the length: an estimate
  from the one program that was compiled. Room is left for one more copy of the
  target's keys, which the compiler was seen to make once memory is nearly full.
  """
  size = q.layout.model
  keys = lambda other: (
    _cache(q.cut_target(), size, other.rows * other.slots, q.cache) / 2
  )

  def fits(**changes):
    other = dataclasses.replace(q, **changes)
    rows, length = other.rows / q.rows, other.max_length / q.max_length
    total = held(other) + keys(other) + temporaries * rows * max(length, 1)
    return total <= hbm

  batch = (
    _last(lambda n: fits(batch_size=n * q.layout.data), 2**20) * q.layout.data
  )
  length = _last(lambda n: fits(max_length=n), q.longest)
  return {"batch_size": batch, "max_length": length}


def _last(holds, most: int) -> int:
  """The largest n in 1..most for which it holds, 0 if none; monotone."""
  low, high = 0, most
  while low < high:
    middle = (low + high + 1) // 2
    low, high = (middle, high) if holds(middle) else (low, middle - 1)
  return low
