"""Batches of a target's stored features, written by `launch.tools.features`.

For the splits train and validation, the folder has rows of `bf16[T, P, D]` (the
inputs of P layers) in SPLIT.states and of `i32[3, T + 1]` (tokens, segments and
positions) in SPLIT.rows; features.json, written last, identifies target and
text.
"""

import json
import os
import pathlib
from collections.abc import Callable, Sequence

import grain
import jax.numpy as jnp
import numpy as np

from launch.training import data
from launch.training.head_loss import States
from models import checkpoints, head_starts
from models.formats import dflash_format, eagle_format
from models.networks.transformer import FINAL, Features

NAME = "features.json"
ROWS = ("tokens", "segments", "positions")
STATES = jnp.bfloat16


def layers_read(config, num_layers: int) -> Features:
  """The target layers that a config's head reads, out of `num_layers`."""
  if config.init_from:
    return checkpoints.read_head(config.init_from, config.target).features
  head, chosen = config.head, tuple(config.head.get("layers", ()))
  if head.kind in ("eagle3", "p_eagle"):
    usual, first = eagle_format.usual_layers(num_layers), 0
  elif "anchors" in head:  # blocks, whose layers are numbered by outputs
    usual = dflash_format.usual_layers(head.num_layers, num_layers)
    first = 1
  else:
    return (FINAL,)
  # The defaults may coincide if there are few layers.
  distinct = chosen or tuple(dict.fromkeys(usual))
  head_starts.check_layers(distinct, num_layers, first=first)
  return chosen or usual


def absolute(path: str) -> str:
  """An absolute path, or the unchanged name of a dataset or on the Hub."""
  return os.path.abspath(path) if os.path.exists(path) else path


def settings_of(config, num_layers: int) -> dict:
  """The settings that determine a config's features, for features.json."""
  layers = (x for x in layers_read(config, num_layers) if x != FINAL)
  return {
    "target": absolute(config.target),
    "dataset": absolute(config.dataset),
    "sequence_length": config.sequence_length,
    "layers": [*layers, FINAL],
  }


class _Records(Sequence):
  """The rows of a split, read from disk on access."""

  def __init__(self, folder: pathlib.Path, split: str, settings, parts):
    length = settings["sequence_length"]
    states = np.memmap(folder / f"{split}.states", STATES, "r")
    rows = np.memmap(folder / f"{split}.rows", np.int32, "r")
    self._rows = rows.reshape(-1, len(ROWS), length + 1)
    self._states = states.reshape(
      len(self._rows), length, len(settings["layers"]), -1
    )
    self._parts = parts

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    row = dict(zip(ROWS, np.array(self._rows[index]), strict=True))
    return row | {"states": np.array(self._states[index][:, self._parts])}


def batches_of(config, num_layers: int) -> Callable[..., grain.IterDataset]:
  """`(split, seed=...) -> batches` of the features that a config names.

  Like `launch.training.data`'s, with "states" for `reader`; rows are reshuffled
  every epoch.
  """
  if config.contexts != "data":
    raise ValueError("features of sampled contexts cannot be stored")
  folder = pathlib.Path(config.features)
  stored = json.loads((folder / NAME).read_text("utf-8"))
  wanted = settings_of(config, num_layers)
  layers = wanted.pop("layers")
  for name, value in wanted.items():
    if stored[name] != value:
      raise ValueError(
        f"the features in {folder} are for {name} {stored[name]!r}, not "
        f"{value!r}"
      )
  if missing := [layer for layer in layers if layer not in stored["layers"]]:
    raise ValueError(f"the features in {folder} lack the layers {missing}")
  parts = [stored["layers"].index(layer) for layer in layers]

  def batches(split: str, *, seed: int | None) -> grain.IterDataset:
    source = _Records(folder, split, stored, parts)
    rows, count = data.shared(source, config.batch_size, seed)
    rows = rows.to_iter_dataset(
      grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
    )
    return rows.batch(count, drop_remainder=True)

  return batches


def reader(layers: Features) -> Callable[..., States]:
  """`(params, batch) -> States`, for batches of stored features.

  Args:
    layers: that the head reads; the batch has their states, the final one last.
  """
  order = [*(x for x in layers if x != FINAL), FINAL]
  places = np.array([order.index(layer) for layer in layers])

  def read(params, batch) -> States:
    del params
    states = batch["states"].astype(jnp.float32)
    return States(
      features=states[:, :, places].reshape(*states.shape[:2], -1),
      final=states[:, :, -1],
    )

  return read
