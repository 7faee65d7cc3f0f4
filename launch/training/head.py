"""Training of a head, which drafts from the features of a frozen target."""

import functools
import operator
import os
import pathlib

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from launch.training import contexts, data, flops, head_features, step
from launch.training.head_loss import (
  Loss,
  Words,
  drawn_places,
  make_loss,
  make_measure,
  reader,
  watcher,
)
from launch.training.records import say
from launch.training.step import Task
from models import checkpoints, head_shapes, head_starts
from models.formats import head_saving
from models.head_shapes import KINDS, Target
from models.networks.dflash import Parallel
from models.networks.transformer import Features, Transformer, as_language_model
from models.tokenizers import Tokenizer


def task(config, mesh: Mesh, folder: pathlib.Path) -> Task:
  """The task of a config like configs/train_head.py.

  Args:
    config: the config.
    mesh: from `launch.training.step.make_mesh`.
    folder: WORKDIR, which may know those tokens already.

  Raises:
    ValueError: for a config that cannot be run.
  """
  check(config)
  texts = data.documents(config, "train")
  tokenizer = checkpoints.load_tokenizer(config.target)
  target = checkpoints.load_module(config.target)
  vocab_size = tokenizer.vocab_size
  ids = _vocabulary(config, texts, tokenizer, folder)
  module, features = _first(config, target, ids, tokenizer)
  head_saving.check(module.config)
  stored = head_features.stored(config, features, target.config, texts, folder)
  if getattr(module.config, "draft_vocab_size", None):
    ids = np.asarray(module.target_ids[...])
  words = Words.of(np.arange(vocab_size) if ids is None else ids, vocab_size)
  definition, trained, rest = nnx.split(module, head_shapes.is_own(module), ...)
  watch, rows = watcher(target, features), _rows(target)
  frozen = {"target": nnx.state(target), "rest": rest}
  if stored:  # the target's layers have done their part
    watch, rows = reader(features), operator.itemgetter("output")
    frozen["target"] = {"output": head_starts.output_rows(target)}
  loss = Loss(
    objective=config.objective,
    depth=config.head.depth,
    decay=config.head.depth_decay,
    feature_weight=config.head.get("feature_weight", 0.0),
    first=config.prompt_length if config.contexts == "target" else 0,
  )
  shared = (loss, watch, rows, words)
  sample = place = None
  if config.contexts == "target":
    sample = contexts.completer(
      as_language_model(target)[0], prompt_length=config.prompt_length
    )
  if isinstance(module, Parallel):
    place = jax.jit(
      functools.partial(
        drawn_places, count=config.head.anchors, first=loss.first
      )
    )

  def complete(state, frozen, batch, key):
    del state
    if sample is not None:
      batch = sample(frozen["target"], batch, key)
    return batch if place is None else place(batch, jax.random.fold_in(key, 1))

  def of_parts(function, definition, dtype):
    def whole(params, frozen, batch):
      parts = _rounded((params, frozen["rest"]), dtype)
      return function(nnx.merge(definition, *parts), frozen["target"], batch)

    return whole

  dtype = jnp.dtype(config.get("compute_dtype") or jnp.float32)
  make = lambda: type(module)(module.config, dtype=dtype, rngs=nnx.Rngs(0))
  shapes = nnx.eval_shape(make)
  computes = nnx.split(shapes, head_shapes.is_own(module), ...)[0]

  def measure(module, target, batch):
    if place is not None:  # the same in every validation
      batch = place(batch, jax.random.key(0))
    return make_measure(*shared)(module, target, batch)

  return Task(
    tokenizer=tokenizer,
    first=module,
    steps=step.jitted(
      config,
      mesh,
      trained,
      frozen,
      loss=of_parts(make_loss(*shared), computes, dtype),
      measure=of_parts(measure, definition, module.dtype),
      complete=complete,
    ),
    module=lambda params: nnx.merge(definition, params, rest),
    step_flops=flops.head_step_flops(
      config,
      target,
      module,
      trained,
      num_words=len(words.ids),
      stored=stored is not None,
    ),
    report=lambda sums, batches: _report(sums),
    export=functools.partial(_export, config, _about(target), features),
    begin=lambda folder: _note(folder, ids, stored),
    knows=True,
    batches=head_features.batches(config, stored, features)
    or data.batches_of(config, tokenizer),
    incomplete_batch=None
    if stored
    else lambda: data.incomplete_batch(config, tokenizer),
  )


def step_flops(config: ml_collections.ConfigDict) -> float:
  """Operations of a step of a config, before anything is counted or trained.

  They do not depend on which tokens a head can say, but on how many.
  """
  target = checkpoints.load_module(config.target)
  tokenizer = checkpoints.load_tokenizer(config.target)
  size = config.head.get("draft_vocab_size", 0)
  ids = np.arange(size) if size else None
  module, _ = _first(config, target, ids, tokenizer)
  said = getattr(module.config, "draft_vocab_size", None)
  return flops.head_step_flops(
    config,
    target,
    module,
    nnx.state(module, head_shapes.is_own(module)),
    num_words=said or tokenizer.vocab_size,
    stored=bool(config.get("features")),
  )


def check(config) -> None:
  """Raises ValueError for settings that can be judged without the models."""
  head, dtype = config.head, config.get("compute_dtype", "")
  for name, value, known in (
    ("head.kind", head.kind, KINDS),
    ("head.start", head.start, ("target", "random")),
    ("compute_dtype", dtype, ("", "float32", "bfloat16")),
  ):
    if value not in known:
      raise ValueError(f"{name} must be one of {[*known]}, got {value!r}")
  contexts.check(config, ("data", "target"))
  if config.init_from and head.start == "random":
    raise ValueError(
      "head.start is 'random', and config.init_from a head to begin with: give "
      "one of them"
    )
  if head.depth + 2 > config.sequence_length:
    raise ValueError(
      f"head.depth ({head.depth}) leaves nothing to train on in rows of "
      f"{config.sequence_length} tokens"
    )
  if head.kind == "dflash" and not (
    0 < head.anchors <= config.sequence_length - 2
  ):
    raise ValueError(
      f"head.anchors must be in 1..{config.sequence_length - 2}, places of a "
      f"row, got {head.anchors}"
    )


def _vocabulary(
  config, texts, tokenizer: Tokenizer, folder: pathlib.Path
) -> np.ndarray | None:
  """Ids of the tokens that the head can say; None for all of them."""
  size = config.head.get("draft_vocab_size", 0)
  if not size:
    return None
  ids = head_features.read_vocabulary(folder)
  if ids is not None and len(ids) == size:
    return ids
  if config.head.vocabulary_dataset:
    counted = config.copy_and_resolve_references()
    counted.dataset = config.head.vocabulary_dataset
    texts = data.documents(counted, "train")
  ids, covered = head_features.most_frequent(texts, tokenizer, size)
  say(f"the {size} most frequent tokens are {covered:.2%} of the text")
  return ids


def _note(folder: pathlib.Path, ids: np.ndarray | None, stored) -> None:
  if ids is not None:
    head_features.write_vocabulary(folder, ids)
  if stored:
    head_features.note(folder, stored)


def _first(
  config, target: Transformer, ids: np.ndarray | None, tokenizer: Tokenizer
) -> tuple[nnx.Module, Features]:
  """The head to begin with, and what it reads of the target."""
  if config.init_from:
    network = checkpoints.Network(
      config=target.config,
      params=nnx.state(target),
      functions=lambda skipped, features: as_language_model(
        target, skipped=skipped, features=features
      )[0],
    )
    loaded = checkpoints.load_head(config.init_from, network, dtype=jnp.float32)
    if loaded.kind != config.head.kind:
      raise ValueError(
        f"config.init_from ({config.init_from}) is a head of kind "
        f"{loaded.kind!r}, not {config.head.kind!r}"
      )
    said = loaded.shape.num_depths
    if said is not None and said != config.head.depth:
      raise ValueError(
        f"config.init_from ({config.init_from}) says {said} tokens ahead, and "
        f"head.depth is {config.head.depth}"
      )
    if ids is not None:
      head_starts.say(loaded.module, target, ids)
    return loaded.module, loaded.features
  module, features = _of_the_target(config, target, ids, tokenizer)
  if config.head.start == "random":
    head_starts.forget(module, nnx.Rngs(config.seed))
  return module, features


def _of_the_target(
  config, target: Transformer, ids: np.ndarray | None, tokenizer: Tokenizer
) -> tuple[nnx.Module, Features]:
  """A head made of the target, and what it reads of it."""
  rngs, head = nnx.Rngs(config.seed), config.head
  layers = head_features.layers_read(config, target.config.num_layers)
  if head.kind == "eagle3":
    module = head_starts.eagle3(
      target, layers=layers, draft_vocab=ids, mlp_dim=head.mlp_dim, rngs=rngs
    )
    return module, layers
  if head.kind == "dflash":
    mask = head.mask_token
    if mask == -1:
      mask = tokenizer.eos_token_id
    if mask is None:
      raise ValueError("the text has no end token: give head.mask_token")
    module = head_starts.parallel(
      target, num_layers=head.num_layers, layers=layers, mask_token=mask,
      block_size=head.depth + 1, draft_vocab=ids, rngs=rngs,
    )  # fmt: skip
    return module, layers
  if head.kind == "eagle":
    return head_starts.eagle1(target, rngs=rngs), layers
  if head.kind == "mtp":
    return head_starts.mtp(target, rngs=rngs), layers
  if head.kind == "medusa":
    heads = head_starts.medusa(
      target, num_heads=head.depth, draft_vocab=ids, rngs=rngs
    )
    return heads, layers
  heads = head_starts.blockwise(
    target, num_heads=head.depth, hidden_dim=head.hidden_dim, rngs=rngs
  )
  return heads, layers


def _rounded(parts, dtype):
  """Parameters in another type; ids stay what they are."""
  return jax.tree.map(
    lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
    parts,
  )


def _rows(target: Transformer):
  """Gives the output projection of the target's parameters."""
  definition = nnx.graphdef(target)
  return lambda params: head_starts.output_rows(nnx.merge(definition, params))


def _report(sums) -> dict[str, float]:
  """Shares of drafted tokens that are accepted, and the likeliest, by depth."""
  record = {}
  for name, total in sums.items():
    quantity, _, depth = name.rpartition("_")
    if quantity != "tokens":
      record[f"validation_{quantity}_{depth}"] = total / sums[f"tokens_{depth}"]
  return record


def _about(target: Transformer) -> Target:
  """The target's sizes and the arrays that a head borrows."""
  c = target.config
  return Target(
    num_layers=c.num_layers,
    embed_dim=c.embed_dim,
    vocab_size=c.vocab_size,
    embedding=target.embed.embedding[...],
    output=head_starts.output_rows(target),
  )


def _export(
  config, target: Target, features: Features, module, directory: str
) -> None:
  head_saving.save(
    module,
    directory,
    features=features,
    dtype=jnp.dtype(config.export_dtype),
    target=target,
    # A folder is found from wherever the head is read.
    verifier=os.path.abspath(config.target),
  )
