"""Agreement of checkpoints of a config: kind, width, tokenizer, few bits."""

import ml_collections

from launch.assembly import precision
from launch.assembly.drafting import Drafting
from models import checkpoints
from models.checkpoints import Network
from models.formats.head_checkpoints import Head
from models.networks import lowbits
from models.networks.description import TransformerConfig
from models.networks.lowbits import Format
from models.networks.specdec import Block
from models.tokenizers import Tokenizer


def check_kinds(
  config: ml_collections.ConfigDict, drafting: Drafting, *, inputs: bool
) -> None:
  """Raises ValueError if one model reads inputs and the other does not.

  Or if the target does, and the caller has none.
  """
  of_target = checkpoints.reads_inputs(config.target)
  if of_target and not inputs:
    raise ValueError(
      f"{config.target} is an encoder-decoder, which launch.decode and "
      "launch.evaluate --prompts alone give inputs"
    )
  reads, path = drafting.reads, drafting.checkpoint
  if reads in ("head", "mtp") and of_target:
    raise ValueError(
      f"{config.target} is an encoder-decoder, and {path or reads} is a "
      "head on a decoder-only target's features"
    )
  if reads not in ("block", "model"):
    return
  of_draft = reads == "block" or checkpoints.reads_inputs(path)
  if of_target == of_draft:
    return
  kind = lambda reads: "an encoder-decoder" if reads else "decoder-only"
  raise ValueError(
    f"target and draft must be of one kind: {config.target} is "
    f"{kind(of_target)}, {path} is {kind(of_draft)}"
  )


def check_low(config: ml_collections.ConfigDict, drafting: Drafting) -> None:
  """Raises ValueError for weights or a cache that are not stored in few bits.

  Of configurations alone: nothing large is read for it.
  """
  form = precision.of_target(config.get("weights", ""))
  stored = [(config.target, form, config.get("cache") or None)]
  if drafting.reads == "weights":
    stored.append((config.target, drafting.weights, None))
  elif drafting.reads == "model":
    stored.append((drafting.checkpoint, drafting.weights, drafting.cache))
  for path, asked, cache in stored:
    weights = asked if isinstance(asked, Format) else None
    if weights is None and cache is None:
      continue
    description = checkpoints.read_config(path)
    if not isinstance(description, TransformerConfig):
      raise ValueError(
        f"{path} is an encoder-decoder, and weights and caches in few bits are "
        "of decoder-only models"
      )
    lowbits.check_weights(description, weights, on_mesh=bool(config.mesh))
    lowbits.check_cache(description, cache)


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
