"""Features of a target that a head is trained on, stored or not."""

import functools
import pathlib
from collections.abc import Sequence

from launch import provenance, results
from launch.training import data, features
from launch.training.features import Settings, Stored
from models import checkpoints, head_starts
from models.networks.layers import TransformerConfig
from models.networks.transformer import FINAL, Features


def layers_read(config, num_layers: int) -> Features:
  """Layers that a config's head reads, of a target of `num_layers` layers.

  Raises:
    ValueError: if the target has no such layers.
  """
  if config.init_from:
    return checkpoints.read_head(config.init_from, config.target).features
  head = config.head
  if head.kind == "eagle3":
    return head_starts.fused_layers(num_layers, tuple(head.layers))
  if head.kind == "dflash":
    return head_starts.spread_layers(
      head.num_layers, num_layers, tuple(head.layers)
    )
  return (FINAL,)


def settings(config, read: Features, target: TransformerConfig) -> Settings:
  """Settings of the features for a head that reads `read` of a target."""
  return Settings(
    target=provenance.hash_checkpoint(config.target),
    layers=features.all_layers(read),
    width=target.embed_dim,
    sequence_length=config.sequence_length,
    dataset=config.dataset,
    text_features=tuple(config.text_features),
  )


def stored(
  config,
  read: Features,
  target: TransformerConfig,
  texts: Sequence[data.Document],
  folder: pathlib.Path,
) -> Stored | None:
  """The features that a config names; None if they are made on the fly.

  Args:
    config: see configs/train_head.py.
    read: what the head reads of the target.
    target: its config.
    texts: the documents of the training split.
    folder: WORKDIR, which may know that the run began with others.

  Raises:
    ValueError: if they are not those of this training.
  """
  if not config.get("features"):
    return None
  if config.contexts != "data":
    raise ValueError(
      "config.features are of the data's texts, and config.contexts = "
      f"{config.contexts!r} draws new ones in every step: their features are "
      "made on the fly"
    )
  store = features.read(config.features)
  documents = {"train": lambda: texts}
  if config.validate_every:
    if not store.of("validation"):
      raise ValueError(
        f"{config.features} has no validation text: set "
        "config.validate_every=0, or make it with another"
      )
    documents["validation"] = lambda: data.documents(config, "validation")
  features.check(store, settings(config, read, target), documents)
  before = _noted(folder)
  if before is not None and before != store.sum:
    raise ValueError(
      f"{config.features} has other features than when the run in {folder} "
      "began: take another --workdir (config.init_from can begin with this "
      "run's head)"
    )
  return store


def batches(config, store: Stored | None, read: Features):
  """`(split, seed=...) -> batches` of stored features; None without them."""
  if store is None:
    return None
  return functools.partial(
    features.batches,
    store,
    layers=features.all_layers(read),
    batch_size=config.batch_size,
  )


def note(folder: pathlib.Path, store: Stored) -> None:
  """Notes in WORKDIR which features a run reads."""
  results.write_json(str(folder / features.NAME), {"sum": store.sum})


def _noted(folder: pathlib.Path) -> str | None:
  path = folder / features.NAME
  if not (path.is_file() and (folder / "checkpoints").is_dir()):
    return None
  return features.load(path).get("sum")
