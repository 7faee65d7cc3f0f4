r"""Times passes of a published shape on this machine's device.

  python -m launch.tools.passes --target=llama-3.1-8b --batch_sizes=1,8 \
    --widths=1,2,4,8,16 --output=P.json

A pass over t tokens of a row is what verifies a tree of t nodes; what it costs
in passes over one token, and what is accepted of the tree, decide whether a
draft pays. So this says before there is a draft, or even a checkpoint: the
weights are random, which changes no time but a mixture's choice of experts.
The model is `launch.plan`'s: bfloat16, layers stacked, --text tokens in the
cache. Each width takes its turn with a copy of a large array, which says what
the memory can do; medians count. Bytes are those of all weights and of the
cached text, both read once, and of recurrent states, read and written.
"""

import dataclasses
import functools
import statistics

import jax
import jax.numpy as jnp
from absl import flags

from configs import shapes
from launch import cli, hardware, provenance, report, results
from launch.planning import networks
from models.formats.huggingface import translate
from models.networks import stacked
from specjax import recurrent
from specjax.runtime import timing
from specjax.runtime.timed_loops import passes_loop

cli.reads(cli.BATCH_SIZES, cli.TARGET, cli.OUTPUT, cli.TURNS)
_WIDTHS = flags.DEFINE_list(
  "widths", None, "Tokens of a row in a pass, 1 first."
)
_TEXT = flags.DEFINE_integer(
  "text", 512, "Tokens in the cache of a row.", lower_bound=1
)
_REPEATS = 20  # passes in one timing
_COPIED = 2**29  # bytes


def random_params(shapes):
  """Numbers of small normal draws in place of shapes, on the device."""
  leaves, form = jax.tree.flatten(shapes)

  @functools.partial(jax.jit, static_argnums=(1, 2))
  def draw(key, shape, dtype):
    return (0.02 * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)

  keys = jax.random.split(jax.random.key(0), len(leaves))
  made = [draw(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
  return jax.tree.unflatten(form, made)


@functools.partial(jax.jit, donate_argnums=1)
def _copies(params, array, count):
  """Reads and writes a large array so many times."""
  del params
  return jax.lax.fori_loop(0, count, lambda _, x: x + 1, array)


def _cache(model, rows: int, pending: int, slots: int):
  """A cache of --text tokens, whose states have room for pending ones."""
  cache = model.init_cache(rows, slots)
  length = jnp.full(rows, _TEXT.value, jnp.int32)
  states = recurrent.widened(cache.recurrent, pending)
  if states is not None:
    states = dataclasses.replace(states, base=jnp.copy(length))
  return cache.replace(length=length, recurrent=states)


def measure(config, rows: int, widths: list[int]) -> list[dict]:
  """A line for each width, at one batch size."""
  model = stacked.as_language_model(config, dtype=networks.DTYPE)
  params = {"target": random_params(networks.shapes(config))}
  # Recurrent states have room for as many tokens as a pass is over.
  carry_of = {width: width if model.has_states else 0 for width in widths}
  carries = {
    of: {"target": _cache(model, rows, of, _TEXT.value + max(widths))}
    for of in {*carry_of.values()}
  }
  array = jnp.zeros(_COPIED // 4, jnp.float32)
  seconds: dict[int | str, list[float]] = {}
  loops = {
    width: passes_loop({"target": (model, "target")}, (("target", width),))
    for width in widths
  }
  per_pass = functools.partial(timing.per_repeat, repeats=_REPEATS)
  for turn in range((cli.TURNS.value or 5) + 1):
    spent, array = per_pass(_copies, None, array)
    spans = {"copy": spent}
    for width, of in carry_of.items():
      spans[width], carries[of] = per_pass(loops[width], params, carries[of])
    for name, spent in spans.items() if turn else ():
      seconds.setdefault(name, []).append(spent)
  median = {name: statistics.median(times) for name, times in seconds.items()}
  copied = 2 * _COPIED / median["copy"]
  chip = hardware.bandwidth_of(jax.devices()[0].device_kind)
  work = networks.work(
    config,
    num_params=networks.num_params(config),
    skipped=networks.SkippedLayers(),
    slots=_TEXT.value + max(widths),
    text=_TEXT.value,
    input_length=0,
  )
  size = jnp.dtype(networks.DTYPE).itemsize
  cached = size * work.channels
  lines = []
  for width in widths:
    idle = networks.idle(config, networks.SkippedLayers(), rows * width)
    states, _ = networks.round_bytes(config, width)
    read = size * (work.weights - idle) + rows * (cached + states)
    lines.append(
      {
        "rows": rows, "tokens": width, "milliseconds": 1e3 * median[width],
        "cost": median[width] / median[1], "bytes": round(read),
        "bytes_per_second": read / median[width],
        "copy_bytes_per_second": copied,
        "share_of_copy": read / median[width] / copied,
        "share_of_spec_sheet": chip and read / median[width] / chip,
      }
    )  # fmt: skip
  return lines


def table(results: dict[str, dict]) -> str:
  """Costs of a file that this wrote: rows of a pass by tokens of each."""
  (result,) = results.values()
  lines = {(one["rows"], one["tokens"]): one for one in result["passes"]}
  rows, widths = (sorted(set(axis)) for axis in zip(*lines, strict=True))
  cell = lambda r, t: f"{lines[r, t]['cost']:.2f}"
  return report.table(
    ["rows", "one token", "of a copy's bytes/s", *map(str, widths[1:])],
    [
      [
        str(r), f"{lines[r, 1]['milliseconds']:.1f} ms",
        f"{lines[r, 1]['share_of_copy']:.0%}",
        *(cell(r, t) for t in widths[1:]),
      ]
      for r in rows
    ],
  )  # fmt: skip


def run(_) -> int:
  """The command."""
  results.check(cli.OUTPUT.value)
  sizes = cli.integers(cli.BATCH_SIZES, default=[1])
  widths = cli.integers(_WIDTHS, default=[1, 2, 4, 8, 16])
  if 1 not in widths:
    raise cli.UserError("--widths must hold 1: costs are in passes over one")
  if cli.TARGET.value not in shapes.SHAPES:
    raise cli.UserError(
      f"unknown shape {cli.TARGET.value!r}: expected one of "
      f"{sorted(shapes.SHAPES)}"
    )
  config = translate(shapes.SHAPES[cli.TARGET.value])
  lines = [line for rows in sizes for line in measure(config, rows, widths)]
  for line in lines:
    print(
      f"{line['rows']:4} rows of {line['tokens']:3}: "
      f"{line['milliseconds']:8.2f} ms, {line['cost']:5.2f} passes over one, "
      f"{line['bytes_per_second'] / 1e9:6.0f} GB/s, "
      f"{line['share_of_copy']:.0%} of a copy's",
      file=results.beside(cli.OUTPUT.value),
    )
  if cli.OUTPUT.value:
    result = {
      "target": cli.TARGET.value, "text": _TEXT.value, "passes": lines,
      "device": jax.devices()[0].device_kind, "jax": jax.__version__,
      **provenance.record(),
    }  # fmt: skip
    results.write_json(cli.OUTPUT.value, result)
  return 0


if __name__ == "__main__":
  cli.run(run, required=("target",))
