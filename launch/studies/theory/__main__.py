r"""The theory of speculative decoding, held against the shipped loop.

  python -m launch.studies.theory --figure=all --workdir=W
  python -m launch.studies.theory --chain=C.npz --num_drafts=1,2,4 \
    --output=F.json --simulate=100000

Figures go to WORKDIR: NAME.json (every number plotted), NAME.svg and NAME.png.

  single       rejections of one draft against Theorem 1, over the runs
  batch        rejections with 4 and 5 drafts against Theorem 3
  drafts       expected rejections against M, and the limit
  improvement  what M drafts save, for Bernoulli and for uniform laws
  tradeoff     the Pareto front of loss and rejection, Decoding-OPT and -UNO
  throughput   tokens per second against N, the best N marked
  acceptance   what every lossless rule accepts of K drafts
  mixture      what verification reads of a mixture of experts, the best N there

A chain is an .npz file with `draft_initial` and `target_initial`, f[V], the
laws of the first token, and `draft` and `target`, f[T - 1, V, V], the laws of
the next token (last axis) after a token (middle axis).
"""

import os
import pathlib
import sys
import time
import zipfile
import zlib

import jax
import numpy as np
from absl import flags

from launch import cli, provenance, results
from launch import figures as figure_files
from launch.studies.theory import figures, plots
from specjax.theory import markov

cli.reads(cli.WORKDIR, cli.OUTPUT, cli.NUM_DRAFTS, cli.SEED)
_FIGURE = flags.DEFINE_list("figure", None, "Figures to draw, or all.")
_CHAIN = flags.DEFINE_string("chain", None, "An .npz file with a chain.")
_SIMULATE = flags.DEFINE_integer(
  "simulate", None,
  "Runs through the loop: none for --chain, 100000 for figures.",
)  # fmt: skip

_ARRAYS = ("draft_initial", "target_initial", "draft", "target")
_RUNS = 100_000
_FEWEST = 100  # runs from which averages are drawn


def read_chain(path: str) -> markov.MarkovPair:
  """A checked chain from a file.

  Raises:
    ValueError: if the file is none of arrays, or its arrays are no chain.
  """
  if not pathlib.Path(path).is_file():
    raise cli.UserError(f"no such file: {path}")
  try:
    with np.load(path, allow_pickle=False) as file:
      arrays = dict(file)
  except (
    ValueError, TypeError, EOFError, AttributeError,
    zipfile.BadZipFile, zlib.error,
  ):  # fmt: skip
    raise cli.UserError(f"{path} is not an .npz file of numbers") from None
  missing = [name for name in _ARRAYS if name not in arrays]
  if missing:
    raise cli.UserError(
      f"{path} must have arrays {', '.join(_ARRAYS)}; {missing} missing, got "
      f"{sorted(arrays)}"
    )
  for name in _ARRAYS:
    if arrays[name].dtype.kind not in "fiu":
      raise cli.UserError(f"{name} in {path} must be numbers")
  return markov.make_pair(**{name: arrays[name] for name in _ARRAYS})


def draw(name: str, folder: pathlib.Path, *, runs: int) -> None:
  """Computes a figure's numbers and draws it; both go to the folder."""
  start = time.perf_counter()
  numbers = figures.FIGURES[name](runs)
  result = {
    "figure": name,
    **numbers,
    "seconds": time.perf_counter() - start,
    **provenance.record(),
  }
  results.write_json(str(folder / f"{name}.json"), result)
  figure_files.save(
    lambda: plots.FIGURES[name](numbers),
    *(folder / f"{name}.{form}" for form in ("svg", "png")),
  )
  print(f"{name}: {result['seconds']:.1f} s", file=sys.stderr, flush=True)


def run(_) -> int:
  """The command."""
  if (_FIGURE.value is None) == (_CHAIN.value is None):
    raise cli.UserError("give either --figure or --chain; see --help")
  runs = _SIMULATE.value
  if runs is not None and runs < 1:
    raise cli.UserError(f"--simulate must be at least 1 run, got {runs}")
  if _CHAIN.value is not None:
    cli.refuse_with("--chain", cli.WORKDIR)
    results.check(
      {"--output": cli.OUTPUT.value},
      inputs={"--chain": _CHAIN.value},
      stdout=True,
    )
    found = figures.of_chain(
      read_chain(_CHAIN.value),
      cli.integers(cli.NUM_DRAFTS, default=[1, 2, 4]),
      runs=runs or 0,
      seed=cli.SEED.value or 0,
    )
    made_by = provenance.record(files={"--chain": _CHAIN.value})
    results.show_json(cli.OUTPUT.value, found | made_by)
    return 0
  cli.refuse_with("--figure", cli.OUTPUT, cli.NUM_DRAFTS, cli.SEED)
  names = list(_FIGURE.value)
  if names == ["all"]:
    names = list(figures.FIGURES)
  unknown = [name for name in names if name not in figures.FIGURES]
  if unknown or not names:
    raise cli.UserError(
      f"unknown figures {unknown}, expected all or some of "
      f"{list(figures.FIGURES)}"
    )
  if cli.WORKDIR.value is None:
    raise cli.UserError("--figure needs --workdir, where figures go")
  if runs is not None and runs < _FEWEST:
    raise cli.UserError(
      f"figures need --simulate of at least {_FEWEST} runs, got {runs}"
    )
  folder = results.check_folder("--workdir", cli.WORKDIR.value)
  folder.mkdir(parents=True, exist_ok=True)
  for name in names:
    path = lambda kind, name=name: str(folder / f"{name}.{kind}")
    results.check(
      {"--workdir": path("json")}, drawn={x: path(x) for x in ("svg", "png")}
    )
  for name in names:
    draw(name, folder, runs=runs or _RUNS)
  return 0


if __name__ == "__main__":
  # A device a core, to which `simulation` deals out the runs.
  jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
  cli.run(run, required=())
