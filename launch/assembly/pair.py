"""Builds models, tokenizer and decoders from a config."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from jax.sharding import Mesh

from launch import online, prompts, stops
from launch.assembly import registry
from launch.assembly.drafting import Drafting
from models import checkpoints, hub, meshes
from models.checkpoints import Network
from models.formats.head_checkpoints import Head
from models.networks import quantized, specdec
from models.networks.quantized import Quantization
from models.networks.transformer import SkippedLayers
from models.tokenizers import Tokenizer
from specjax import decode, quantized_cache, rules
from specjax.adaptive import widths
from specjax.adaptive.ladder import Ladder
from specjax.drafters.families.rasd import Parts
from specjax.runtime.engine import Engine, everywhere
from specjax.types import LanguageModel, Params
from specjax.warp import make_sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
  """A target, its drafter, and the plain decoder to compare with.

  Attributes:
    decoder: the speculative decoder that the config asks for.
    baseline: plain autoregressive decoding of the same target.
    params: parameters for both.
    draft: the draft model, which may be the target with skipped layers; None
      for n-grams and heads.
    source: what `registry.make` needs to make drafters of another form.
    stop_tokens: ids that end a row.
    max_length: maximum tokens of prompt and completion.
    mesh: the devices; None for one device without a mesh.
    encoder: limits on the inputs of an encoder-decoder.
    lesson: what the draft learns online.
    ladder: decoders of several draft lengths; the longest is `decoder`.
    notes: messages on how published quantized weights are stored.
  """

  decoder: decode.Decoder
  baseline: decode.Decoder
  params: Params
  target: LanguageModel
  draft: LanguageModel | None
  source: Any
  tokenizer: Tokenizer
  stop_tokens: tuple[int, ...]
  max_length: int
  drafting: Drafting
  mesh: Mesh | None = None
  layout: meshes.Layout | None = None
  encoder: prompts.Encoder | None = None
  lesson: online.Lesson | None = None
  ladder: Ladder | None = None
  notes: tuple[str, ...] = ()

  def room(self, max_new_tokens: int) -> int:
    """Maximum tokens of a prompt; ValueError if there is no room."""
    if max_new_tokens >= self.max_length:
      raise ValueError(
        f"max_new_tokens ({max_new_tokens}) leaves no room for a prompt: "
        f"prompt and completion share {self.max_length} positions"
      )
    return self.max_length - max_new_tokens


def check_config(
  config: ml_collections.ConfigDict, drafting: Drafting | None = None
) -> Drafting:
  """Checks a config as far as possible without models; returns its drafter."""
  drafting = drafting or registry.of(config)
  rule = rules.get(drafting.rule or config.rule)
  if config.dtype not in ("float32", "bfloat16", "float16"):
    raise ValueError(
      "dtype must be float32, bfloat16 or float16, got " + repr(config.dtype)
    )
  form = registry.target_weights(config.get("weights", ""))
  if drafting.reads == "weights" and isinstance(form, Quantization):
    assert isinstance(drafting.weights, Quantization)  # quantized_self's
    quantized.for_copy(drafting.weights, form)
  quantized_cache.check(config.get("cache") or None)
  if not 0 <= config.seed < 2**32:
    raise ValueError(f"seed must be in 0..{2**32 - 1}, got {config.seed}")
  if not 0 <= config.top_k < 2**31:
    raise ValueError(f"top_k must be in 0..{2**31 - 1}, got {config.top_k}")
  make_sampling(
    1, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p,
    min_p=config.min_p,
  )  # fmt: skip
  for name in ("max_new_tokens", "batch_size"):
    if config[name] < 1:
      raise ValueError(f"{name} must be >= 1, got {config[name]}")
  if drafting.tree.max_depth > config.max_new_tokens:
    raise ValueError(
      f"drafts of {drafting.tree.max_depth} tokens are longer than "
      f"max_new_tokens ({config.max_new_tokens})"
    )
  if config.get("draft_devices") and not config.mesh:
    raise ValueError("draft_devices needs a mesh")
  if drafting.learning and config.mesh:
    raise ValueError("online learning runs on one device, without a mesh")
  if drafting.reads in ("head", "mtp") and drafting.weights and config.mesh:
    raise ValueError(
      f"a quantized head runs on one device, got the mesh {config.mesh!r}: "
      f"leave out weights={drafting.weights}"
    )
  if not pathlib.Path(hub.local(config.target)).exists():
    raise FileNotFoundError(
      f"there is no target {config.target}: a path, or ORG/NAME on the Hub"
    )
  if drafting.drafts:
    drafting.check(rule)
    registry.check_checkpoint(drafting)
  return drafting


def _check_kinds(
  config: ml_collections.ConfigDict, drafting: Drafting, *, inputs: bool
) -> None:
  """Raises ValueError if an encoder-decoder is used with a decoder-only model.

  Or if the target is an encoder-decoder and the caller provides no inputs.
  """
  of_target = checkpoints.reads_inputs(config.target)
  if of_target and not inputs:
    raise ValueError(
      f"{config.target} is an encoder-decoder: only launch.decode and "
      "launch.evaluate --prompts support these"
    )
  reads, path = drafting.reads, drafting.checkpoint
  if reads in ("head", "mtp") and of_target:
    raise ValueError(
      f"{config.target} is an encoder-decoder, but {path or reads} is a head "
      "for a decoder-only target"
    )
  if reads not in ("block", "model"):
    return
  of_draft = reads == "block" or checkpoints.reads_inputs(path)
  if of_target == of_draft:
    return
  kind = lambda reads: "an encoder-decoder" if reads else "decoder-only"
  raise ValueError(
    f"target and draft must be of the same kind: {config.target} is "
    f"{kind(of_target)}, {path} is {kind(of_draft)}"
  )


def _check_same_tokenizer(target: Tokenizer, draft: Tokenizer) -> None:
  """Raises ValueError with an example if any token's id differs."""
  if target.fingerprint() == draft.fingerprint():
    return
  ours, theirs = target.vocabulary(), draft.vocabulary()
  token = min(t for t in {**ours, **theirs} if ours.get(t) != theirs.get(t))
  describe = lambda ids: f"is {ids[token]}" if token in ids else "is missing"
  raise ValueError(
    "draft and target must share a tokenizer (padding of the embeddings may "
    f"differ): the target has {len(ours)} tokens, the draft {len(theirs)}; "
    f"for example {token!r} {describe(ours)} in the target's and "
    f"{describe(theirs)} in the draft's"
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
  """Loaded models and tokenizer, for any rule, tree and sampling.

  `draft` is a model, a head, a block drafter, the parameters in a user's file,
  or None.
  """

  target: Network
  draft: Any
  tokenizer: Tokenizer
  eos_tokens: tuple[int, ...]
  mesh: Mesh | None
  layout: meshes.Layout | None

  @property
  def notes(self) -> tuple[str, ...]:
    """Messages on how published quantized weights are stored."""
    networks = [x for x in (self.target, self.draft) if isinstance(x, Network)]
    return tuple(dict.fromkeys(x.note for x in networks if x.note))


def load(
  config: ml_collections.ConfigDict,
  *,
  drafting: Drafting | None = None,
  loaded: Models | None = None,
  inputs: bool = False,
) -> Models:
  """Loads the checkpoints of a config, for `assemble`.

  Args:
    config: fields as in configs/common.py.
    drafting: the drafter, instead of the config's.
    loaded: models with the same target, dtype and weights, whose target is
      shared if it has the same layout on the mesh.
    inputs: whether the caller supports encoder-decoders.
  """
  drafting = check_config(config, drafting)
  reads, path = drafting.reads, drafting.checkpoint
  _check_kinds(config, drafting, inputs=inputs)
  layout, mesh, shardings = None, None, (None, None)
  if config.mesh:
    layout = _layout(config, drafting)
    mesh, shardings = layout.mesh(jax.devices()), layout.shardings()
  dtype = jnp.dtype(config.dtype)
  if loaded is not None and loaded.layout == layout:
    target = loaded.target
  else:
    target = checkpoints.load(
      config.target, dtype=dtype, mesh=mesh, sharding=shardings[0],
      stored=config.get("cache") or None,
      weights=registry.target_weights(config.get("weights", ""), config.target),
    )  # fmt: skip
  tokenizer = checkpoints.load_tokenizer(config.target)
  draft = None
  if reads in ("head", "mtp"):
    draft = checkpoints.load_head(
      path or config.target, target, dtype=dtype, mesh=mesh,
      sharding=shardings[1], of_target=reads == "mtp",
      weights=drafting.weights,
    )  # fmt: skip
    if draft.kind == "mtp" and not drafting.normed:
      draft = draft.before_norms(target.config.num_layers)
  elif reads == "weights":
    assert isinstance(drafting.weights, Quantization)  # quantized_self's
    draft = target.quantize(drafting.weights)
  elif reads == "block":
    draft = specdec.load(hub.local(path), dtype=dtype, mesh=mesh)
  elif reads == "file":
    assert drafting.load is not None  # `entry` has both
    draft = everywhere(mesh, jax.tree.map(jnp.asarray, drafting.load(path)))
  elif reads == "model":
    draft = checkpoints.load(
      path, dtype=dtype, mesh=mesh, sharding=shardings[1],
      stored=drafting.cache, weights=drafting.weights,
    )  # fmt: skip
  if reads in ("block", "model"):
    _check_same_tokenizer(tokenizer, checkpoints.load_tokenizer(path))
  eos_tokens = {*checkpoints.eos_token_ids(config.target)}
  eos_tokens |= {tokenizer.eos_token_id} - {None}
  return Models(
    target=target,
    draft=draft,
    tokenizer=tokenizer,
    eos_tokens=tuple(sorted(eos_tokens)),
    mesh=mesh,
    layout=layout,
  )


def _layout(config: ml_collections.ConfigDict, drafting: Drafting):
  """The mesh layout of a config."""
  sizes, path = None, drafting.checkpoint
  if drafting.reads in ("head", "mtp"):
    head = checkpoints.read_head(path or config.target, config.target)
    sizes = head.config.even_sizes()
  elif drafting.reads == "model":
    sizes = checkpoints.read_config(path)
  layout = meshes.parse(
    config.mesh, jax.device_count(), draft=sizes,
    draft_devices=config.draft_devices or None,
  )  # fmt: skip
  if config.batch_size % layout.data:
    raise ValueError(
      f"batch_size ({config.batch_size}) must be a multiple of the mesh's "
      f"'data' axis ({layout.data})"
    )
  return layout


def assemble(
  config: ml_collections.ConfigDict,
  models: Models,
  *,
  drafting: Drafting | None = None,
) -> Pair:
  """Makes the decoders of a config from loaded models."""
  drafting = check_config(config, drafting)
  if drafting.lengths and jax.process_count() > 1:
    raise ValueError("a ladder needs a single process")
  tokenizer = models.tokenizer
  vocab_size = tokenizer.vocab_size
  rule = rules.get(drafting.rule or config.rule)
  features = models.draft.features if isinstance(models.draft, Head) else ()
  target = models.target.functions(SkippedLayers(), features)
  draft, params, drafter, lesson, ladder = None, None, None, None, None
  if drafting.drafts:
    draft, params = registry.source(drafting, models)
    drafter = registry.make(drafting, draft, vocab_size)
  if drafting.lengths:
    ladder = registry.ladder_of(
      drafting, target, draft, rule=rule, vocab_size=vocab_size
    )
    drafter = ladder.longest.drafter
  if drafting.learning:
    drafter, lesson = online.wrapped(
      drafting.learning, drafter, draft, vocab_size=vocab_size
    )
  source, encoder = draft, None
  if not isinstance(draft, LanguageModel) or isinstance(params, Parts):
    draft = None  # not a plain model whose passes can be timed
  limits = [config.max_length]
  limits += [x.max_positions for x in (target, draft, drafter) if x]
  if models.target.reads_inputs:
    encoder = prompts.Encoder(
      start_token=models.target.config.start_token, max_tokens=config.max_length
    )
  for token in config.stop_token_ids:
    if not 0 <= token < vocab_size:
      raise ValueError(
        f"stop_token_ids must be in 0..{vocab_size - 1}, got {token}"
      )
  return Pair(
    decoder=ladder.longest
    if ladder
    else decode.make_decoder(
      target,
      drafter=drafter,
      rule=rule,
      vocab_size=vocab_size,
      widths=widths.within(drafting.widths, drafter.tree) if drafter else (),
    ),
    baseline=decode.make_decoder(target, vocab_size=vocab_size),
    params=Params(target=models.target.params, draft=params),
    target=target,
    draft=draft,
    source=source,
    tokenizer=tokenizer,
    stop_tokens=tuple(sorted({*config.stop_token_ids, *models.eos_tokens})),
    max_length=min(x for x in limits if x is not None),
    drafting=drafting,
    mesh=models.mesh,
    layout=models.layout,
    encoder=encoder,
    lesson=lesson,
    ladder=ladder,
    notes=models.notes,
  )


def build(config: ml_collections.ConfigDict, *, inputs: bool = False) -> Pair:
  """Loads the checkpoints and makes the decoders: `load`, then `assemble`."""
  return assemble(config, load(config, inputs=inputs))


def engine_of(config, pair: Pair, *, baseline: bool = False) -> Engine:
  """The engine of a config: speculative, or plain autoregressive."""
  learner, learning = None, pair.drafting.learning
  if learning is not None and pair.lesson is not None and not baseline:
    learner = online.Learner(learning, pair.params, pair.lesson)
  return Engine(
    decoder=pair.baseline if baseline else pair.decoder,
    params=pair.params,
    stop_tokens=pair.stop_tokens,
    max_new_tokens=config.max_new_tokens,
    max_length=pair.max_length,
    temperature=config.temperature,
    top_k=config.top_k,
    top_p=config.top_p,
    min_p=config.min_p,
    seed=config.seed,
    watch=lambda prompt: stops.watch(
      pair.tokenizer, prompt.stop, prompt.token_ids
    ),
    ladder=None
    if baseline or not pair.ladder
    else dataclasses.replace(pair.ladder),
    learner=learner,
    mesh=pair.mesh,
    cache_specs=pair.layout and pair.layout.cache_specs(),
  )
