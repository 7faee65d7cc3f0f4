"""Ways to look for a set: each proposes one, and is told what it is worth.

A method is a generator: it yields a set, and is sent that set's score, larger
is better. What it proposes follows from its arguments and the scores alone, so
a search that was stopped is gone through again without scoring anything twice.
"""

import itertools
from collections.abc import Callable, Generator

import numpy as np

from models.networks.transformer import SkippedLayers

Method = Generator[SkippedLayers, float, None]


def of_blocks(blocks) -> SkippedLayers:
  """The set of some sub-layers, 2 i for attention i and 2 i + 1 for MLP i."""
  found = sorted(int(b) for b in blocks)
  return SkippedLayers(
    attention=tuple(b // 2 for b in found if b % 2 == 0),
    mlp=tuple(b // 2 for b in found if b % 2),
  )


def random(num_layers: int, *, seed: int) -> Method:
  """Sets of any size, each size as likely, each set of it too."""
  rng = np.random.default_rng(seed)
  while True:
    size = int(rng.integers(1, 2 * num_layers))
    yield of_blocks(rng.permutation(2 * num_layers)[:size])


def greedy(num_layers: int, *, seed: int) -> Method:
  """Adds the sub-layer that is best to skip next, until all are skipped."""
  del seed
  chosen: list[int] = []
  while len(chosen) < 2 * num_layers:
    scores = {}
    for block in range(2 * num_layers):
      if block not in chosen:
        scores[block] = yield of_blocks([*chosen, block])
    chosen.append(max(scores, key=lambda block: scores[block]))


def bayesian(num_layers: int, *, seed: int) -> Method:
  """Tree-structured Parzen estimators over 2L switches (optuna).

  The paper fits a Gaussian process; with twice as many switches as layers the
  two find alike, and this one does not slow down as evaluations add up.

  Raises:
    ValueError: if optuna is not installed.
  """
  try:
    import optuna
  except ImportError:
    raise ValueError(
      "the method 'bayesian' needs optuna: pip install -e '.[search]'"
    ) from None
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  study = optuna.create_study(
    direction="maximize",
    sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=10),
  )
  # The first is a guess: every other layer, but neither the first nor the last.
  middle = set(range(1, num_layers - 1, 2))
  study.enqueue_trial(
    {_name(b): b // 2 in middle for b in range(2 * num_layers)}
  )
  while True:
    trial = study.ask()
    blocks = [
      b
      for b in range(2 * num_layers)
      if trial.suggest_categorical(_name(b), [False, True])
    ]
    # Nobody drafts with the whole target: no set that skips nothing.
    score = (yield of_blocks(blocks)) if blocks else 0.0
    study.tell(trial, score)


def _name(block: int) -> str:
  return f"{('attention', 'mlp')[block % 2]} {block // 2}"


def listed(sets: list[SkippedLayers]) -> Method:
  """Sets that were found otherwise, one after the other."""
  yield from (one for one in sets)  # a list itself takes no scores


METHODS: dict[str, Callable[..., Method]] = {
  "bayesian": bayesian,
  "random": random,
  "greedy": greedy,
}


def first(method: Method, count: int) -> list[SkippedLayers]:
  """What a method proposes whom nothing impresses; for tests and looks."""
  found = []
  for _ in range(count):
    try:
      found.append(method.send(0.0) if found else next(method))
    except StopIteration:
      break
  return list(itertools.islice(found, count))
