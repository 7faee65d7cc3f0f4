"""Training of a head, which drafts from the features of a frozen target."""

import functools
import json
import operator
import os
import pathlib
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from launch import results
from launch.training import contexts, data, features, step
from launch.training.head_loss import (
  Loss,
  Vocabulary,
  draw_places,
  make_loss,
  make_measure,
  target_pass,
)
from launch.training.records import say
from launch.training.step import Task
from models import checkpoints, head_shapes, head_starts
from models.formats import head_saving
from models.head_shapes import Target
from models.networks.dflash import Parallel
from models.networks.transformer import Features, Transformer, as_language_model
from models.tokenizers import Tokenizer

_VOCABULARY = "vocabulary.json"


def task(config, mesh: Mesh, folder: pathlib.Path) -> Task:
  """The task of a config like configs/train_head.py.

  Args:
    config: the config.
    mesh: from `launch.training.step.make_mesh`.
    folder: WORKDIR, which may know those tokens already.

  Raises:
    ValueError: for a config that cannot be run.
  """
  contexts.check(config, ("data", "target"))
  tokenizer = checkpoints.load_tokenizer(config.target)
  target = checkpoints.load_module(config.target)
  vocab_size = tokenizer.vocab_size
  ids = _vocabulary(config, tokenizer, folder)
  module, layers = _first(config, target, ids, tokenizer)
  head_saving.check(module.config)
  if getattr(module.config, "draft_vocab_size", None):
    ids = np.asarray(module.target_ids[...])
  words = Vocabulary.of(
    np.arange(vocab_size) if ids is None else ids, vocab_size
  )
  definition, trained, rest = nnx.split(module, head_shapes.is_own(module), ...)
  watch, rows = target_pass(target, layers), _rows(target)
  frozen = {"target": nnx.state(target), "rest": rest}
  batches = data.batches_of(config, tokenizer)
  if config.features:  # the target's layers have done their part
    watch, rows = features.reader(layers), operator.itemgetter("output")
    frozen["target"] = {"output": head_starts.output_rows(target)}
    batches = features.batches_of(config, target.config.num_layers)
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
        draw_places, count=config.head.anchors, first=loss.first
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
    report=lambda sums, batches: _report(sums),
    export=functools.partial(_export, config, _about(target), layers),
    begin=lambda folder: _write_vocabulary(folder, ids),
    knows=True,
    batches=batches,
  )


def _vocabulary(
  config, tokenizer: Tokenizer, folder: pathlib.Path
) -> np.ndarray | None:
  """Ids of the tokens that the head can draft; None for all of them."""
  size = config.head.get("draft_vocab_size", 0)
  if not size:
    return None
  path = folder / _VOCABULARY
  if path.is_file() and (folder / "checkpoints").is_dir():
    return np.array(json.loads(path.read_text())["token_ids"], np.int32)
  texts = data.documents(config, "train")
  ids, covered = most_frequent(texts, tokenizer, size)
  say(f"the {size} most frequent tokens are {covered:.2%} of the text")
  return ids


def _write_vocabulary(folder: pathlib.Path, ids: np.ndarray | None) -> None:
  """Keeps the vocabulary in WORKDIR: the run's weights are of these tokens."""
  if ids is not None:
    results.write_json(folder / _VOCABULARY, {"token_ids": ids.tolist()})


def most_frequent(
  documents: Iterable[data.Document], tokenizer: Tokenizer, size: int
) -> tuple[np.ndarray, float]:
  """The most frequent tokens of documents; of equal ones those of lower ids.

  Returns:
    `i32[size]`, their ids in rising order, and the share of the documents'
    tokens that are among them.

  Raises:
    ValueError: unless `size` is in 1..V, of the tokenizer's V tokens.
  """
  if not 1 <= size <= tokenizer.vocab_size:
    raise ValueError(
      f"draft_vocab_size must be in 1..{tokenizer.vocab_size}, got {size}"
    )
  counts = np.zeros(tokenizer.vocab_size, np.int64)
  for document in documents:
    ids = data.token_ids(document, tokenizer)
    counts += np.bincount(ids, minlength=len(counts))
  chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
  covered = counts[chosen].sum() / max(counts.sum(), 1)
  return chosen.astype(np.int32), float(covered)


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
    depth = loaded.shape.num_depths
    if depth is not None and depth != config.head.depth:
      raise ValueError(
        f"config.init_from ({config.init_from}) drafts {depth} tokens, and "
        f"head.depth is {config.head.depth}"
      )
    if ids is not None:
      head_starts.say(loaded.module, target, ids)
    return loaded.module, loaded.features
  module, layers = _of_the_target(config, target, ids, tokenizer)
  if config.head.start == "random":
    head_starts.forget(module, nnx.Rngs(config.seed))
  return module, layers


def _of_the_target(
  config, target: Transformer, ids: np.ndarray | None, tokenizer: Tokenizer
) -> tuple[nnx.Module, Features]:
  """A head made of the target, and what it reads of it."""
  rngs, head = nnx.Rngs(config.seed), config.head
  layers = features.layers_read(config, target.config.num_layers)
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
  config, target: Target, layers: Features, module, directory: str
) -> None:
  head_saving.save(
    module,
    directory,
    features=layers,
    dtype=jnp.dtype(config.export_dtype),
    target=target,
    # A folder is found from wherever the head is read.
    verifier=os.path.abspath(config.target),
  )
