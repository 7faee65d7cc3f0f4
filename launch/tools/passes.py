r"""Times passes of a published shape on this machine's device.

  python -m launch.tools.passes --target=llama-3.1-8b --batch_sizes=1,8 \
    --widths=1,2,4,8,16 --output=P.json

A pass over t tokens of a row verifies a tree of t nodes. Its cost in passes
over one token, and the tree's acceptance, decide whether a draft pays. This
needs neither draft nor checkpoint: weights are random, which affects only a
mixture's choice of experts. Weights are bfloat16, --text tokens are cached, and
layers are separate, as on one device, or --stacked, as on meshes of TPUs.
Widths take turns; medians are reported. --profile also writes a trace, and the
time of each kind of kernel in a pass.
"""

import collections
import dataclasses
import functools
import pathlib
import re
import statistics

import jax
import jax.numpy as jnp
from absl import flags

from configs import shapes
from launch import cli, provenance, results
from launch.evaluation import timing
from launch.planning import networks
from models.formats.huggingface import translate
from models.networks import stacked
from models.networks.layers import lay_out
from models.networks.params import shapes_of
from models.networks.transformer import Transformer, as_language_model
from specjax import recurrent

cli.reads(cli.BATCH_SIZES, cli.TARGET, cli.OUTPUT)
_WIDTHS = flags.DEFINE_list(
  "widths", None, "Tokens per row in a pass, including 1."
)
_TEXT = flags.DEFINE_integer(
  "text", 512, "Tokens in each row's cache.", lower_bound=1
)
_LAYERS = flags.DEFINE_integer("layers", None, "Use only the first N layers.")
_STACKED = flags.DEFINE_bool("stacked", False, "Scan over stacked layers.")
_PROFILE = flags.DEFINE_string(
  "profile", None, "Where to write traces, a folder per batch size and width."
)
_KINDS = 15  # of kernels in the table
_REPEATS = 20  # passes in one timing
_TURNS = 5  # timings of each width


def random_params(shapes):
  """Random normal parameters for shapes, on the device."""
  leaves, form = jax.tree.flatten(shapes)

  @functools.partial(jax.jit, static_argnums=(1, 2))
  def draw(key, shape, dtype):
    return (0.02 * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)

  keys = jax.random.split(jax.random.key(0), len(leaves))
  made = [draw(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
  return jax.tree.unflatten(form, made)


def _cache(model, rows: int, pending: int, slots: int):
  """A cache with --text tokens, and room for pending ones in its states."""
  cache = model.init_cache(rows, slots)
  length = jnp.full(rows, _TEXT.value, jnp.int32)
  states = recurrent.widen(cache.recurrent, pending)
  if states is not None:
    states = dataclasses.replace(states, base=jnp.copy(length))
  return cache.replace(length=length, recurrent=states)


def _model(config):
  """The model as pure functions, and the shapes of its parameters."""
  if _STACKED.value:
    model = stacked.as_language_model(config, dtype=networks.DTYPE)
    return model, networks.shapes(config)

  def made(rngs):
    module = Transformer(config, dtype=networks.DTYPE, rngs=rngs)
    for layer in module.layers:  # as in `checkpoints.load`
      lay_out(layer)
    return module

  return as_language_model(shapes_of(made))


def kernels(trace: str) -> dict[str, tuple[int, float]]:
  """Count and milliseconds of each kind of kernel in a trace's folder.

  A kind is the name of an operation without its number. On a CPU a loop's time
  includes its kernels.
  """
  kinds = collections.defaultdict(lambda: (0, 0.0))
  for path in pathlib.Path(trace).rglob("*.xplane.pb"):
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
      for line in plane.lines:
        of_device = "/device:" in plane.name and line.name.startswith("Stream")
        for event in line.events:
          name = dict(event.stats).get(
            "hlo_op", event.name if of_device else ""
          )
          if name and not event.name.startswith("end:"):
            kind = re.sub(r"[._]\d+", "", str(name))
            count, spent = kinds[kind]
            kinds[kind] = count + 1, spent + event.duration_ns / 1e6
  return dict(sorted(kinds.items(), key=lambda kind: -kind[1][1]))


def _profiled(loop, params, carry, folder: str):
  """Traces the passes of one timing, and prints the kernels of a pass."""
  with jax.profiler.trace(folder):
    carry = jax.block_until_ready(loop(params, carry, _REPEATS))
  out = results.messages(cli.OUTPUT.value)
  print(f"{folder}, of a pass:", file=out)
  for kind, (count, spent) in [*kernels(folder).items()][:_KINDS]:
    count, spent = count / _REPEATS, spent / _REPEATS
    print(f"{spent:9.3f} ms, {count:7.1f} of {kind}", file=out)
  return carry


def measure(config, rows: int, widths: list[int]) -> list[dict]:
  """Measures each width at one batch size; a record per width."""
  model, shapes = _model(config)
  params = {"target": random_params(shapes)}
  # Recurrent states need room for the tokens of a pass.
  carry_of = {width: width if model.has_states else 0 for width in widths}
  carries = {
    of: {"target": _cache(model, rows, of, _TEXT.value + max(widths))}
    for of in {*carry_of.values()}
  }
  seconds: dict[int, list[float]] = {width: [] for width in widths}
  loops = {
    width: timing.passes_loop(
      {"target": (model, "target")}, (("target", width),)
    )
    for width in widths
  }
  per_pass = functools.partial(timing.per_repeat, repeats=_REPEATS)
  for turn in range(_TURNS + 1):
    for width, of in carry_of.items():
      spent, carries[of] = per_pass(loops[width], params, carries[of])
      if turn:  # the first compiles
        seconds[width].append(spent)
  for width, of in carry_of.items() if _PROFILE.value else ():
    folder = f"{_PROFILE.value}/{rows}x{width}"
    carries[of] = _profiled(loops[width], params, carries[of], folder)
  median = {width: statistics.median(seconds[width]) for width in widths}
  return [
    {
      "rows": rows, "tokens": width, "milliseconds": 1e3 * median[width],
      "form": "stacked" if _STACKED.value else "separate",
      "cost": median[width] / median[1],
    }
    for width in widths
  ]  # fmt: skip


def run(_) -> int:
  """The command."""
  results.check(cli.OUTPUT.value)
  sizes = cli.integers(cli.BATCH_SIZES, default=[1])
  widths = cli.integers(_WIDTHS, default=[1, 2, 4, 8, 16])
  if 1 not in widths:
    raise cli.UserError("--widths must include 1, the unit of costs")
  if cli.TARGET.value not in shapes.SHAPES:
    raise cli.UserError(f"--target must be one of {', '.join(shapes.SHAPES)}")
  config = translate(shapes.SHAPES[cli.TARGET.value])
  if _LAYERS.value:
    some = config.layers[: _LAYERS.value]
    config = dataclasses.replace(config, layers=some)
  lines = [line for rows in sizes for line in measure(config, rows, widths)]
  for line in lines:
    print(
      f"{line['rows']:4} rows of {line['tokens']:3}: "
      f"{line['milliseconds']:8.2f} ms, {line['cost']:5.2f} passes over one, "
      f"layers {line['form']}",
      file=results.messages(cli.OUTPUT.value),
    )
  if cli.OUTPUT.value:
    result = {
      "target": cli.TARGET.value, "text": _TEXT.value, "passes": lines,
      "layers": config.num_layers,
      "device": jax.devices()[0].device_kind, "jax": jax.__version__,
      **provenance.record(),
    }  # fmt: skip
    results.write_json(cli.OUTPUT.value, result)
  return 0


if __name__ == "__main__":
  cli.run(run, required=("target",))
