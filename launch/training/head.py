"""Trains a head on the features of a frozen target."""

import functools
import json
import operator
import pathlib
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from launch import results
from launch.training import data, features, step
from launch.training.head_loss import (
  Loss,
  Vocabulary,
  draw_places,
  make_loss,
  make_measure,
  make_pass,
)
from launch.training.model import check_contexts, completer
from launch.training.step import Task, log
from models import checkpoints, head_shapes, head_starts
from models.formats import head_saving
from models.networks.dflash import Parallel
from models.networks.dflash2 import DFlash2
from models.networks.dspark import DSpark
from models.networks.params import shapes_of
from models.networks.training_time_test import num_kept
from models.networks.transformer import Features, Transformer, as_language_model
from models.tokenizers import Tokenizer

_VOCABULARY = "vocabulary.json"


def task(config, mesh: Mesh, folder: pathlib.Path) -> Task:
  """The task of a config like configs/train_head.py."""
  check_contexts(config, ("data", "target"))
  tokenizer = checkpoints.load_tokenizer(config.target)
  target = checkpoints.load_module(config.target)
  vocab_size = tokenizer.vocab_size
  ids = _vocabulary(config, tokenizer, folder)
  module, layers = _first(config, target, ids, tokenizer)
  head_saving.check(module.config)
  if getattr(module.config, "draft_vocab_size", None):
    ids = np.asarray(module.target_ids[...])
  words = Vocabulary(np.arange(vocab_size) if ids is None else ids, vocab_size)
  definition, trained, rest = nnx.split(module, head_shapes.is_own(module), ...)
  watch, rows = make_pass(target, layers), _rows(target)
  frozen = {"target": nnx.state(target), "rest": rest}
  batches = data.batches_of(config, tokenizer)
  if config.features:  # the target's layers are not needed
    watch, rows = features.reader(layers), operator.itemgetter("output")
    frozen["target"] = {"output": head_starts.output_rows(target)}
    batches = features.batches_of(config, target.config.num_layers)
  loss = Loss(
    objective=config.objective,
    depth=config.head.depth,
    decay=config.head.depth_decay,
    feature_weight=config.head.get("feature_weight", 0.0),
    first=config.prompt_length if config.contexts == "target" else 0,
    confidence=getattr(module.config, "confidence", False),
    selects=config.head.kind == "dflash2",
    by_count=config.head.kind == "p_eagle",
  )
  if loss.objective == "acceptance" and (loss.selects or loss.by_count):
    raise ValueError(
      f"{config.head.kind} heads cannot be trained for acceptance: choose "
      "another config.objective"
    )
  shared = (loss, watch, rows, words)
  sample = lambda params, batch, key: batch
  if config.contexts == "target":
    model, _ = as_language_model(target)
    sample = completer(model, prompt_length=config.prompt_length)
  place = lambda batch, key: batch
  if isinstance(module, Parallel) or loss.by_count:
    place = functools.partial(
      jax.jit(draw_places, static_argnames=("count", "first")),
      count=config.head.get("anchors") or num_kept(config.sequence_length, 1),
      first=loss.first,
    )

  def complete(state, frozen, batch, key):
    del state
    batch = sample(frozen["target"], batch, key)
    return place(batch, jax.random.fold_in(key, 1))

  def of_parts(function, definition, dtype):
    def rounded(x):  # leaves ids unchanged
      return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def of_params(params, frozen, batch):
      parts = jax.tree.map(rounded, (params, frozen["rest"]))
      return function(nnx.merge(definition, *parts), frozen["target"], batch)

    return of_params

  dtype = jnp.dtype(config.get("compute_dtype") or jnp.float32)
  shapes = shapes_of(
    lambda rngs: type(module)(module.config, dtype=dtype, rngs=rngs)
  )
  computes = nnx.split(shapes, head_shapes.is_own(module), ...)[0]

  def measure(module, target, batch):
    batch = place(batch, jax.random.key(0))  # the same in every validation
    return make_measure(*shared)(module, target, batch)

  def begin(folder: pathlib.Path) -> None:
    if ids is not None:  # the weights belong to these tokens
      results.write_json(folder / _VOCABULARY, {"token_ids": ids.tolist()})

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
    export=functools.partial(
      head_saving.save,
      features=layers,
      dtype=jnp.dtype(config.export_dtype),
      target=checkpoints.describe_target(
        target.config,
        embedding=target.embed.embedding[...],
        output=head_starts.output_rows(target),
      ),
      # An absolute path, which can be resolved from any directory.
      verifier=features.absolute(config.target),
    ),
    begin=begin,
    validate_first=True,
    batches=batches,
  )


def _vocabulary(
  config, tokenizer: Tokenizer, folder: pathlib.Path
) -> np.ndarray | None:
  """Ids of the head's draft vocabulary; None for all tokens."""
  size = config.head.get("draft_vocab_size", 0)
  if not size:
    return None
  if config.init_from:
    raise ValueError(
      "config.head.draft_vocab_size must be 0 with config.init_from: a head "
      "keeps its vocabulary"
    )
  path = folder / _VOCABULARY
  if path.is_file() and (folder / "checkpoints").is_dir():
    return np.array(json.loads(path.read_text())["token_ids"], np.int32)
  texts = data.documents(config, "train")
  ids, covered = most_frequent(texts, tokenizer, size)
  log(f"the {size} most frequent tokens are {covered:.2%} of the text")
  return ids


def most_frequent(
  documents: Iterable[data.Document], tokenizer: Tokenizer, size: int
) -> tuple[np.ndarray, float]:
  """The most frequent tokens of documents; ties go to lower ids.

  Returns:
    Their ids `i32[size]`, ascending, and the share of the documents' tokens
    that they cover.
  """
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
  """The initial head, and the target's features that it reads."""
  if config.init_from:
    loaded = _loaded(config, target)
    return loaded.module, loaded.features
  layers = features.layers_read(config, target.config.num_layers)
  return _of_the_target(config, target, layers, ids, tokenizer), layers


def _loaded(config, target: Transformer) -> checkpoints.Head:
  """The head of `config.init_from`."""
  network = checkpoints.Network.of_module(target)
  head = checkpoints.load_head(config.init_from, network, dtype=jnp.float32)
  depth, wanted = head.module.config.num_predicted, config.head
  if head.kind != wanted.kind or depth not in (None, wanted.depth):
    raise ValueError(
      f"config.init_from ({config.init_from}) is of kind {head.kind} and "
      f"drafts {depth or 'any number of'} tokens, not {wanted.kind} and "
      f"{wanted.depth}"
    )
  return head


def _of_the_target(
  config, target: Transformer, layers: Features, ids, tokenizer: Tokenizer
) -> nnx.Module:
  """A head initialized from the target."""
  rngs, head = nnx.Rngs(config.seed), config.head
  mask_token = tokenizer.eos_token_id  # never the last token of unfinished text
  match head.kind:
    case "eagle":
      return head_starts.eagle1(target, rngs=rngs)
    case "mtp":
      return head_starts.mtp(target, rngs=rngs)
    case "eagle3" | "p_eagle":
      return head_starts.eagle3(
        target, layers=layers, draft_vocab=ids, mlp_dim=head.mlp_dim,
        num_layers=head.get("num_layers", 1),
        mask_token=mask_token if head.kind == "p_eagle" else None, rngs=rngs,
      )  # fmt: skip
    case "medusa":
      return head_starts.medusa(target, num_heads=head.depth, rngs=rngs)
  more: dict = {
    "block_size": head.depth + 1,
    "causal": head.get("causal", False),
  }
  if head.kind == "dspark":
    more = {
      "kind": DSpark, "block_size": head.depth, "markov": head.markov,
      "rank": head.rank, "confidence": True,
    }  # fmt: skip
  if head.kind == "dflash2":
    more |= {
      "kind": DFlash2, "taps": 2, "group": head.group, "rank": head.rank,
      "num_candidates": 16,
    }  # fmt: skip
  return head_starts.parallel(
    target, num_layers=head.num_layers, layers=layers, draft_vocab=ids,
    mask_token=mask_token, rngs=rngs, **more,
  )  # fmt: skip


def _rows(target: Transformer):
  """A function from the target's parameters to its output projection."""
  definition = nnx.graphdef(target)
  return lambda params: head_starts.output_rows(nnx.merge(definition, params))


def _report(sums) -> dict[str, float]:
  """Acceptance and top-1 agreement of drafted tokens, by depth."""
  record = {}
  for name, total in sums.items():
    quantity, _, depth = name.rpartition("_")
    if quantity != "tokens":
      record[f"validation_{quantity}_{depth}"] = total / sums[f"tokens_{depth}"]
  return record
