"""The share of a device's memory bandwidth that plain decoding reaches.

A plain step of a few rows multiplies every weight once and attends over the
cached text, and does little else with them: its time is bounded below by the
bytes it reads over the bandwidth of the memory. What is counted of a target
pass:

- the weights that are multiplied (or added): all but tables of which a pass
  looks up a few rows, which are the positions' and, unless it is also the
  output projection, the embedding;
- the cache's slots up to the longest text of the rows, as attention reads them.

Activations, logits and what is written are not counted. All rows of a batch
share a pass. The share says little where the weights fit into a processor's
cache: it can then exceed 1.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from launch import hardware
from specjax.cache import Cache
from specjax.runtime import timing

SPEC_SHEET = "spec sheet"
MEASURED = "measured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bandwidth:
  """What a device's memory can do.

  Attributes:
    bytes_per_second: of reads, or of reads and writes together if measured.
    source: `SPEC_SHEET` or `MEASURED`.
  """

  bytes_per_second: float
  source: str


def from_spec_sheet(device_kind: str) -> Bandwidth | None:
  """The bandwidth that the maker states, or None for an unknown device."""
  known = hardware.bandwidth_of(device_kind)
  return known and Bandwidth(bytes_per_second=known, source=SPEC_SHEET)


def measure(
  device: jax.Device,
  *,
  num_bytes: int = 2**28,
  repeats: int = 8,
  rounds: int = 5,
) -> Bandwidth:
  """Times reading and writing a large array, which no cache should hold.

  Args:
    device: whose memory.
    num_bytes: of the array; all of it is read and written.
    repeats: times in one program.
    rounds: timed runs of the program; the median counts.

  Returns:
    Bytes read and written a second.
  """

  def run(x):
    return lax.fori_loop(0, repeats, lambda _, x: x + 1, x)

  run = jax.jit(run, donate_argnums=0)
  kept = [jax.device_put(jnp.zeros(num_bytes // 4, jnp.float32), device)]

  def part():
    kept[0] = jax.block_until_ready(run(kept[0]))

  seconds = timing.alternate({"copy": part}, rounds=rounds)["copy"]
  moved = 2 * repeats * kept[0].nbytes
  return Bandwidth(bytes_per_second=moved / seconds, source=MEASURED)


def of_device(device: jax.Device) -> Bandwidth:
  """From the maker's data sheet if known, else measured now."""
  return from_spec_sheet(device.device_kind) or measure(device)


def weight_bytes(params) -> int:
  """Bytes of the weights that one pass multiplies.

  Args:
    params: a transformer's, from
      `models.networks.transformer.as_language_model`.
  """
  sizes = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = path[0].key
    sizes[name] = sizes.get(name, 0) + leaf.size * leaf.dtype.itemsize
  looked_up = {"position_embed"}
  if "lm_head" in sizes:
    looked_up.add("embed")
  return sum(size for name, size in sizes.items() if name not in looked_up)


def cache_bytes(cache: Cache, text: float) -> int:
  """Bytes of the keys and values of so many tokens; shapes alone will do."""
  buffers = jax.tree.leaves((cache.keys, cache.values))
  whole = sum(x.size * x.dtype.itemsize for x in buffers)
  return round(whole * min(text / cache.slots, 1))


def share(
  *,
  weight_bytes: int,
  cache_bytes: int,
  rows: int,
  step_seconds: float,
  bandwidth: Bandwidth,
) -> dict:
  """What plain decoding reads a second, against what the memory can do.

  Args:
    weight_bytes, cache_bytes: that one target pass reads.
    rows: B, all in one pass.
    step_seconds: of a plain step, which is one target pass and its overhead.
    bandwidth: of the device.

  Returns:
    The numbers under their names, for a JSON file; `share` is
    (bytes a pass) x (passes a second) / (bytes a second of the device).
  """
  total = weight_bytes + cache_bytes
  reached = total / step_seconds
  return {
    "share": reached / bandwidth.bytes_per_second,
    "bytes_per_second": reached,
    "device_bytes_per_second": bandwidth.bytes_per_second,
    "device_bandwidth_source": bandwidth.source,
    "weight_bytes_per_pass": weight_bytes,
    "cache_bytes_per_pass": cache_bytes,
    "passes_per_second": 1 / step_seconds,
    "rows_per_pass": rows,
    "bytes_per_token": total / rows,
    "tokens_per_second": rows / step_seconds,
  }


def row(found: dict) -> str:
  """`share`'s numbers as one line."""
  mega = lambda name: f"{found[name] / 1e6:.1f}"
  giga = lambda name: f"{found[name] / 1e9:.1f}"
  return (
    f"plain decoding: {mega('weight_bytes_per_pass')} MB of weights and "
    f"{mega('cache_bytes_per_pass')} MB of cache a pass, "
    f"{found['passes_per_second']:.0f} passes/s of {found['rows_per_pass']} "
    f"rows: {giga('bytes_per_second')} of "
    f"{giga('device_bytes_per_second')} GB/s "
    f"({found['device_bandwidth_source']}), {found['share']:.0%}"
  )
