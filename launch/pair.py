"""From a config to something that decodes: models, tokenizer, decoders."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from jax.sharding import Mesh

from launch import (
  depths,
  draft_checks,
  drafting,
  online,
  processes,
  prompt_lines,
  skipped_layers,
  stops,
)
from models import checkpoints, meshes
from models.checkpoints import Network
from models.formats.head_checkpoints import Head
from models.networks import specdec
from models.networks.specdec import Block
from models.networks.transformer import SkippedLayers
from models.tokenizers import Tokenizer
from specjax import decode, drafters, rules
from specjax import siblings as siblings_lib
from specjax.adaptive import chains, widths
from specjax.adaptive.ladder import Ladder
from specjax.adaptive.rungs import Rungs
from specjax.drafters.rasd import Parts
from specjax.runtime.engine import Engine
from specjax.types import LanguageModel, Params
from specjax.warp import make_sampling

# Keys have 32 bits of a seed; ranks are 32-bit integers.
_LIMITS = {"seed": 2**32, "top_k": 2**31}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
  """A target, a way to draft for it, and the plain decoder to compare with.

  Attributes:
    decoder: the speculative decoder that the config asks for.
    baseline: plain autoregressive decoding of the same target.
    params: parameters for both.
    target: the target as pure functions.
    draft: the draft model, the thinned target, or None for n-grams and heads.
    tokenizer: the pair's one tokenizer.
    stop_tokens: ids that end a row.
    max_length: longest prompt with completion, in tokens.
    mesh: the devices, or None for one without a mesh.
    layout: what is cut over which of the mesh's axes, if there is one.
    encoder: what inputs must keep to, of an encoder-decoder; else None.
    lesson: what the draft learns online; else None.
    rungs: decoders of all lengths of the config's ladder, the longest of which
      is `decoder`; None without one.
  """

  decoder: decode.Decoder
  baseline: decode.Decoder
  params: Params
  target: LanguageModel
  draft: LanguageModel | None
  tokenizer: Tokenizer
  stop_tokens: tuple[int, ...]
  max_length: int
  mesh: Mesh | None = None
  layout: meshes.Layout | None = None
  encoder: prompt_lines.Encoder | None = None
  lesson: online.Lesson | None = None
  rungs: Rungs | None = None

  def room(self, max_new_tokens: int) -> int:
    """Tokens left for a prompt; ValueError if there are none."""
    if max_new_tokens >= self.max_length:
      raise ValueError(
        f"max_new_tokens ({max_new_tokens}) leaves no room for a prompt: "
        f"prompt and completion share {self.max_length} positions"
      )
    return self.max_length - max_new_tokens


def check_config(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError for settings that can be judged without the models."""
  family = drafting.of(config)
  rules.get(config.rule)
  if config.dtype not in ("float32", "bfloat16", "float16"):
    raise ValueError(
      "dtype must be float32, bfloat16 or float16, got " + repr(config.dtype)
    )
  for name in ("seed", "top_k"):
    if not 0 <= config[name] < _LIMITS[name]:
      raise ValueError(
        f"{name} must be in 0..{_LIMITS[name] - 1}, got {config[name]}"
      )
  make_sampling(
    1,
    temperature=config.temperature,
    top_k=config.top_k,
    top_p=config.top_p,
    min_p=config.min_p,
  )
  gamma, budget = config.num_speculative_tokens, config.max_new_tokens
  for name in ("num_nodes", "num_children"):
    if config[name] < 0:
      raise ValueError(f"{name} must be >= 0, got {config[name]}")
  if gamma < 0:
    raise ValueError(f"num_speculative_tokens must be >= 0, got {gamma}")
  if any(width < 1 for width in config.widths):
    raise ValueError(f"widths must be >= 1, got {tuple(config.widths)}")
  if config.num_drafts < 1:
    raise ValueError(f"num_drafts must be >= 1, got {config.num_drafts}")
  if budget < 1:
    raise ValueError(f"max_new_tokens must be >= 1, got {budget}")
  if config.batch_size < 1:
    raise ValueError(f"batch_size must be >= 1, got {config.batch_size}")
  if config.tree:
    what = "the depth of config.tree"
    depth = drafting.make_tree(config).max_depth
    if not gamma:
      raise ValueError(
        f"{what} is {depth}, and num_speculative_tokens=0 asks for plain "
        "decoding: give one of them"
      )
  else:
    what, depth = "num_speculative_tokens", gamma
  if depth > budget:
    raise ValueError(
      f"{what} ({depth}) is larger than max_new_tokens ({budget})"
    )
  how = drafting.make_siblings(config)
  tree = drafting.make_tree(config)
  if (
    config.num_nodes
    and not family.form
    and (
      config.tree
      or config.num_drafts != 1
      or config.siblings not in ("iid", siblings_lib.GIVEN.name)
    )
  ):
    raise ValueError(
      "num_nodes is of a dynamic tree, which has no tree, num_drafts or "
      "siblings of its own: give one of them"
    )
  if config.num_nodes and not (family.is_head or family.form):
    raise ValueError(
      "num_nodes is of a tree whose form is data, as that of an EAGLE head, "
      f"and the drafter is {config.drafter!r}"
    )
  family.check(config, tree, how)
  online.check(config)
  if gamma:
    rules.get(config.rule).check(tree, how)
  draft_checks.check_depth(config, rules.get(config.rule))
  draft_checks.check_ladder(config, rules.get(config.rule))
  draft_checks.check_repeats(config, rules.get(config.rule))


def settled(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """The config as it is run, for records.

  A drafter that is a head takes the one of `heads` where `draft` is none. A
  tree decides how deep it drafts: beside it, `num_speculative_tokens` is not
  read, and becomes its depth; of a ladder it is the last. Of `skip_layers` the
  set that the file holds is kept, and not its path.
  """
  config = ml_collections.ConfigDict(config.to_dict())
  if config.skip_layers:
    skipped = skipped_layers.of(config)
    config.skip_attention, config.skip_mlp = skipped.attention, skipped.mlp
    config.skip_layers = ""
  heads = config.get("heads", {})
  if config.drafter in heads and not drafting.has_head(config):
    config.draft = heads[config.drafter]
  if (
    config.tree
    and config.num_speculative_tokens
    and not drafting.of(config).form
  ):
    config.num_speculative_tokens = drafting.make_tree(config).max_depth
  if config.get("ladder") and config.num_speculative_tokens:
    config.num_speculative_tokens = config.ladder[-1]
  return config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
  """What is read from disk, for any rule, tree and sampling.

  Attributes:
    target: the target.
    draft: the draft, head or block drafter, or None where nothing else drafts.
    tokenizer: the pair's one tokenizer.
    eos_tokens: ids that end a text.
    mesh: the devices, or None for one without a mesh.
    layout: what is cut over which of the mesh's axes, if there is one.
    depth: parameters of a depth policy that has some.
  """

  target: Network
  draft: Network | Head | Block | None
  tokenizer: Tokenizer
  eos_tokens: tuple[int, ...]
  mesh: Mesh | None
  layout: meshes.Layout | None
  depth: Any = None


def load(
  config: ml_collections.ConfigDict,
  *,
  beside: Models | None = None,
  inputs: bool = False,
) -> Models:
  """Loads the checkpoints of a config.

  Args:
    config: fields as in configs/common.py.
    beside: models with the same target and dtype: its arrays are shared if they
      lie where this config wants them.
    inputs: whether the caller decodes encoder-decoders too.

  Returns:
    The `Models`, to be shared by every `assemble` of the same checkpoints.

  Raises:
    ValueError: for unknown or contradictory settings, broken checkpoints, or
      models that do not share a tokenizer.
    FileNotFoundError: for checkpoints that are not there.
  """
  check_config(config)
  has_draft = drafting.reads_draft(config)
  has_head = has_draft and drafting.of(config).is_head
  has_block = has_draft and drafting.has_block(config)
  check_kinds(config, has_draft=has_draft, inputs=inputs)
  layout, mesh, shardings = None, None, (None, None)
  if config.mesh:
    sizes = None
    if has_head:
      sizes = checkpoints.read_head(config.draft, config.target).even_sizes()
    elif has_draft and not has_block:
      sizes = checkpoints.read_config(config.draft)
    layout = meshes.parse(
      config.mesh,
      jax.device_count(),
      draft=sizes,
      draft_devices=config.draft_devices or None,
    )
    if config.batch_size % layout.data:
      raise ValueError(
        f"batch_size ({config.batch_size}) must be a multiple of the mesh's "
        f"'data' axis ({layout.data})"
      )
    mesh, shardings = layout.mesh(jax.devices()), layout.shardings()
  dtype = jnp.dtype(config.dtype)
  if beside is not None and beside.layout == layout:
    target = beside.target
  else:
    target = checkpoints.load(
      config.target, dtype=dtype, mesh=mesh, sharding=shardings[0]
    )
  tokenizer = checkpoints.load_tokenizer(config.target)
  draft = None
  if has_head:
    draft = checkpoints.load_head(
      config.draft, target, dtype=dtype, mesh=mesh, sharding=shardings[1]
    )
  elif has_block:
    draft = specdec.load(config.draft, dtype=dtype, mesh=mesh)
    check_same_tokenizer(tokenizer, checkpoints.load_tokenizer(config.draft))
  elif has_draft:
    draft = checkpoints.load(
      config.draft, dtype=dtype, mesh=mesh, sharding=shardings[1]
    )
    check_same_tokenizer(tokenizer, checkpoints.load_tokenizer(config.draft))
  if shares_encoder(config):
    check_same_width(target, draft)
  eos_tokens = {*checkpoints.eos_token_ids(config.target)}
  eos_tokens |= {tokenizer.eos_token_id} - {None}
  return Models(
    target=target,
    draft=draft,
    tokenizer=tokenizer,
    eos_tokens=tuple(sorted(eos_tokens)),
    mesh=mesh,
    layout=layout,
    depth=depths.load(head, mesh) if (head := depths.head_of(config)) else None,
  )


def assemble(
  config: ml_collections.ConfigDict,
  models: Models,
  *,
  learns: bool = False,
  climbs: bool = False,
) -> Pair:
  """Makes the decoders of a config from models that are loaded.

  Args:
    config: with the checkpoints, dtype and drafter that `models` are of.
    models: from `load`.
    learns: whether the caller lets drafts learn (`config.online`).
    climbs: whether it changes draft lengths between rounds (`config.ladder`).

  Raises:
    ValueError: for unknown or contradictory settings.
  """
  check_config(config)
  tokenizer = models.tokenizer
  vocab_size = tokenizer.vocab_size
  features = models.draft.features if isinstance(models.draft, Head) else ()
  target = models.target.functions(SkippedLayers(), features)
  draft, draft_params, drafter, lesson = None, None, None, None
  rungs = None
  if config.num_speculative_tokens:
    family = drafting.of(config)
    draft, draft_params = family.model(config, models)
    drafter = family.make(
      config,
      draft,
      tree=drafting.make_tree(config),
      siblings=drafting.make_siblings(config),
      vocab_size=vocab_size,
    )
    if config.get("repeats") and family.reads_on:
      drafter = drafters.repeats.drafter(
        drafter, least=config.repeats, max_ngram=config.max_ngram
      )
    if config.ladder and (not climbs or processes.several()):
      raise ValueError(
        "draft lengths change between rounds (config.ladder) in launch.decode "
        "and launch.evaluate, in one process"
      )
    if config.ladder:
      rungs = drafting.rungs(
        config,
        target,
        draft,
        rule=rules.get(config.rule),
        vocab_size=vocab_size,
      )
      drafter = rungs.longest.drafter
    if config.online and not learns:
      raise ValueError(
        "drafts learn (config.online) in launch.decode and launch.evaluate"
      )
    if config.online:
      drafter, lesson = online.wrapped(
        config, drafter, draft, vocab_size=vocab_size
      )
  if drafter is not None and models.depth is not None:
    draft_params = chains.Parts(own=draft_params, policy=models.depth)
  if isinstance(draft, Head | Block) or isinstance(
    draft_params, Parts | chains.Parts
  ):
    draft = None  # no model alone, whose passes can be timed apart
  encoder = None
  if models.target.reads_inputs:
    encoder = prompt_lines.Encoder(
      start_token=models.target.config.start_token,
      max_tokens=config.max_length,
    )
    if encoder.start_token >= vocab_size:
      raise ValueError(
        f"the decoder begins with token {encoder.start_token}, and the "
        f"tokenizer has {vocab_size}"
      )
  limits = [
    config.max_length,
    target.max_positions,
    draft.max_positions if draft else None,
    drafter.max_positions if drafter else None,
  ]
  wrong = [i for i in config.stop_token_ids if not 0 <= i < vocab_size]
  if wrong:
    raise ValueError(
      f"stop_token_ids must be in 0..{vocab_size - 1}, got {wrong}"
    )
  return Pair(
    decoder=rungs.longest
    if rungs
    else decode.make_decoder(
      target,
      drafter=drafter,
      rule=config.rule,
      vocab_size=vocab_size,
      widths=widths.within(drafting.widths_of(config), drafter.tree)
      if drafter
      else (),
      share_encoder=shares_encoder(config),
    ),
    baseline=decode.make_decoder(target, vocab_size=vocab_size),
    params=Params(target=models.target.params, draft=draft_params),
    target=target,
    draft=draft,
    tokenizer=tokenizer,
    stop_tokens=tuple(sorted({*config.stop_token_ids, *models.eos_tokens})),
    max_length=min(x for x in limits if x is not None),
    mesh=models.mesh,
    layout=models.layout,
    encoder=encoder,
    lesson=lesson,
    rungs=rungs,
  )


def build(
  config: ml_collections.ConfigDict,
  *,
  inputs: bool = False,
  learns: bool = False,
  climbs: bool = False,
) -> Pair:
  """Loads the checkpoints and makes the decoders: `load`, then `assemble`."""
  models = load(config, inputs=inputs)
  return assemble(config, models, learns=learns, climbs=climbs)


def check_kinds(
  config: ml_collections.ConfigDict, *, has_draft: bool, inputs: bool
) -> None:
  """Raises ValueError if one model reads inputs and the other does not.

  Or if the target does, and the caller has none.
  """
  of_target = checkpoints.reads_inputs(config.target)
  if of_target and not inputs:
    raise ValueError(
      f"{config.target} is an encoder-decoder, which launch.decode and "
      "launch.benchmark alone give inputs"
    )
  if not has_draft:
    return
  if drafting.has_head(config):
    if of_target:
      raise ValueError(
        f"{config.target} is an encoder-decoder, and {config.draft} is a head "
        "on a decoder-only target's features"
      )
    return
  of_draft = drafting.has_block(config) or checkpoints.reads_inputs(
    config.draft
  )
  if of_target == of_draft:
    return
  kind = lambda reads: "an encoder-decoder" if reads else "decoder-only"
  raise ValueError(
    f"target and draft must be of one kind: {config.target} is "
    f"{kind(of_target)}, {config.draft} is {kind(of_draft)}"
  )


def shares_encoder(config: ml_collections.ConfigDict) -> bool:
  """Whether the draft reads what the target's encoder made (T5s alone)."""
  return bool(
    config.get("share_encoder", False) and drafting.reads_draft(config)
  )


def check_same_width(target: Network, draft: Network | Head | Block) -> None:
  """Raises ValueError unless a draft can read what the target's encoder made.

  Both are encoder-decoders, as `check_kinds` has seen.
  """
  if not target.reads_inputs:
    raise ValueError("config.share_encoder is of encoder-decoders")
  of_draft = draft.config.t5 if isinstance(draft, Block) else draft.config
  ours, theirs = target.config.embed_dim, of_draft.embed_dim
  if ours != theirs:
    raise ValueError(
      "config.share_encoder needs models of one width: the target's encoder "
      f"gives {ours} numbers a token, and the draft reads {theirs}"
    )


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer) -> None:
  """Raises ValueError, with an example, if any token's id differs."""
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


def engine_of(config, pair: Pair, *, baseline: bool = False) -> Engine:
  """The engine of a config: speculative, or plain autoregressive."""
  learner = None
  if pair.lesson is not None and not baseline:
    learner = online.Learner(config, pair.params, pair.lesson)
  return Engine(
    decoder=pair.baseline if baseline else pair.decoder,
    params=pair.params,
    stop_tokens=pair.stop_tokens,
    max_new_tokens=config.max_new_tokens,
    temperature=config.temperature,
    top_k=config.top_k,
    top_p=config.top_p,
    min_p=config.min_p,
    seed=config.seed,
    watch=lambda prompt: stops.watch(
      pair.tokenizer, prompt.stop, prompt.token_ids
    ),
    rungs=None if baseline else pair.rungs,
    ladder=None
    if baseline or not pair.rungs
    else Ladder(lengths=tuple(config.ladder)),
    learner=learner,
    mesh=pair.mesh,
    cache_specs=pair.layout and pair.layout.cache_specs(),
  )
