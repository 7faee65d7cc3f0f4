"""The registry of drafters, by the names that configs use.

`config.drafter` is a call in the grammar `DRAFTERS` (`specjax.calls`), and so
is a system of `launch.evaluate`: `eagle3(tokens=7)`, `model("DIR",
tree=paths(3))`, `repeats(eagle3(tokens=1), tokens=7)`. To register a drafter,
add a line with its function in `specjax.drafters`
(`launch.assembly.drafting.entry`); a wrapper is a function from one `Drafting`
to another. `package.module.NAME` is a user's function that returns a
`Drafting`.

A call without a checkpoint uses the one in `config.checkpoints` under the
drafter's name, or `draft`.

How weights are stored, such as `int8` or `int4(group=64)`, is a call in
`WEIGHTS`: `config.weights`, and a drafter's `weights` for its model or head.
"""

import dataclasses
import inspect
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from launch.assembly import files
from launch.assembly.drafting import (
  Drafting,
  Learning,
  Published,
  as_library,
  checked,
  entry,
)
from models import checkpoints, hub
from models.formats import head_checkpoints
from models.formats.head_checkpoints import Head
from models.networks import quantized
from models.networks import specdec as block_networks
from models.networks.quantized import Quantization
from models.networks.specdec import Block
from models.networks.transformer import SkippedLayers
from specjax import drafters, quantized_cache, shapes
from specjax import siblings as siblings_lib
from specjax.adaptive import policies
from specjax.adaptive.ladder import LENGTHS, Ladder, make_ladder
from specjax.adaptive.ladder import check as check_lengths
from specjax.adaptive.policies import GRAMMAR as POLICIES
from specjax.adaptive.policies import Policy
from specjax.calls import Grammar
from specjax.drafters.families.rasd import Parts
from specjax.rules import GRAMMAR as RULES
from specjax.shapes import Shape
from specjax.siblings import GIVEN, IID, Siblings
from specjax.tree import Tree
from specjax.types import Drafter, LanguageModel, Rule

# ------------------------------------------- what weights are stored in


def _format(kind: str, words: str) -> Callable[..., Quantization]:
  """The function of a number format, with the format's default group size."""

  def call(
    *,
    group: int | None = quantized.DTYPES[kind].group,
    output: bool = True,
    embedding: bool = False,
    dense: bool = True,
  ) -> Quantization:
    return Quantization(
      dtype=kind, group=group, output=output, embedding=embedding, dense=dense
    )

  call.__doc__ = words
  return call


def published() -> Published:
  """As stored in the files, if a format supports that; else like `whole`."""
  return "published"


def whole() -> None:
  """The config's dtype; quantized files are dequantized."""


_NUMBERS = {
  "int8": "8-bit integers, with a scale per output or group.",
  "int4": "4-bit integers, with a scale per group of inputs.",
  "fp8": "8-bit floats (e4m3), with a scale per output or group.",
  "fp4": "4-bit floats (e2m1), with a scale per group of inputs.",
}
FORMATS = Grammar(
  kind="weights",
  entries={kind: _format(kind, words) for kind, words in _NUMBERS.items()},
)
WEIGHTS = Grammar(
  kind="weights",
  entries={**FORMATS.entries, "published": published, "whole": whole},
)


def weights(text: str) -> Quantization | None:
  """The format that weights are quantized to; None for "", no quantization."""
  return FORMATS.make(text) if text else None


def target_weights(
  text: str, path: str = ""
) -> Quantization | Published | None:
  """Storage of a target's weights, for `models.checkpoints.load`.

  The default is `published` for directories, whose formats are all supported,
  and `whole` for GGUF files, whose block formats mostly are not.
  """
  if text:
    return WEIGHTS.make(text)
  return None if checkpoints.is_file(path) else "published"


# ------------------------------------------------- fields of a `Drafting`


def _storage(
  *, weights: Quantization | None = None, cache: str = ""
) -> dict[str, Any]:
  """Storage of a draft; a quantized one cannot learn."""
  quantized_cache.check(cache or None)
  learns = weights is None and not cache
  return dict(weights=weights, cache=cache or None, learns=learns)


def _bits(
  *, bits: int = 8, group: int | None = None, skipped: str = ""
) -> dict[str, Any]:
  """Storage of a quantized copy of the target, and layers that it skips."""
  if bits not in (4, 8):
    raise ValueError(f"bits must be 4 or 8, got {bits}")
  kind = f"int{bits}"
  group = quantized.DTYPES[kind].group if group is None else group
  return dict(weights=Quantization(dtype=kind, group=group), checkpoint=skipped)


def _head(*, weights: Quantization | None = None) -> dict[str, Any]:
  """Storage of a head; a quantized one cannot learn."""
  if weights is None:
    return {}
  if weights == "published" or weights.embedding or not weights.dense:
    raise ValueError(
      "a head's weights must be int8, int4, fp8 or fp4, quantized from the "
      f"config's dtype, got {weights}"
    )
  return dict(weights=weights, learns=False)


def _states(
  *, normed: bool = True, weights: Quantization | None = None
) -> dict[str, Any]:
  """Whether a head reads normed hidden states, and its storage."""
  return dict(_head(weights=weights), normed=normed)


def _texts(corpus: str) -> dict[str, Any]:
  return dict(corpus=corpus)


# --------------------------------------------------------- around a drafter


def repeats(drafter: Drafting, **settings: Any) -> Drafting:
  """Wraps `specjax.drafters.repeats`; gets its docstring and defaults below."""
  made = drafters.repeats(drafter.unloaded, **settings)
  if drafter.learning is not None or drafter.lengths:
    raise ValueError("repeats cannot wrap online or ladder")
  fed, depth = drafter.tree.num_drafted + 1, drafter.tree.max_depth
  longer = drafter.tree.is_chain and made.tree.max_depth > depth
  if longer and drafter.takes_policy and drafter.policy is None:
    # A policy saves draft passes where all rows repeat.
    drafter = drafter.of_form(tokens=depth, policy=policies.fixed(depth))

  def call(model: Any, vocab_size: int, **form: Any) -> Drafter:
    return drafters.repeats(drafter.call(model, vocab_size, **form), **settings)

  wrapped = dataclasses.replace(
    drafter, call=call, learns=False, resizes=False, takes_policy=False
  )
  if made.tree.num_drafted >= fed:
    wrapped = dataclasses.replace(wrapped, widths=(*drafter.widths, fed))
  return wrapped


_LIBRARY = list(inspect.signature(drafters.repeats).parameters.values())
as_library(
  repeats, drafters.repeats,
  [_LIBRARY[0].replace(annotation=Drafting), *_LIBRARY[1:]],
)  # fmt: skip


def ladder(
  drafter: Drafting, *, lengths: tuple[int, ...] = LENGTHS
) -> Drafting:
  """Chains of several lengths; the host switches to the fastest."""
  check_lengths(lengths)
  if not drafter.resizes:
    raise ValueError(
      "a ladder needs a drafter whose state does not depend on the draft "
      f"length, got {drafter.name!r}"
    )
  is_plain = drafter.tree.is_chain and drafter.siblings is IID
  if not is_plain or drafter.policy or drafter.widths or drafter.learning:
    raise ValueError(
      "a ladder needs a chain without tree, siblings, policy, widths and online"
    )
  wrapped = _of_length(drafter, lengths[-1])
  return checked(dataclasses.replace(wrapped, lengths=lengths))


def _of_length(drafter: Drafting, tokens: int) -> Drafting:
  """One length of a ladder; a policy lets draft models catch up."""
  form = {"policy": policies.fixed(tokens)} if drafter.reads == "model" else {}
  return drafter.of_form(tokens=tokens, **form)


def online(
  drafter: Drafting,
  *,
  rounds: int = 8,
  entries: int = 512,
  top_k: int = 0,
  objective: str = "forward_kl",
  rate: float = 5e-5,
) -> Drafting:
  """A draft that learns while decoding, once every `rounds` rounds."""
  if drafter.lengths:
    raise ValueError("the draft of a ladder does not learn online")
  if not drafter.learns:
    raise ValueError(
      "online learning needs a draft with its own, unquantized parameters "
      f"(model, eagle, eagle3), got {drafter.name!r}"
    )
  learning = Learning(
    rounds=rounds, entries=entries, top_k=top_k, objective=objective, rate=rate
  )
  return dataclasses.replace(drafter, learning=learning)


def with_widths(drafter: Drafting, *tokens: int) -> Drafting:
  """Adds narrower target passes for rounds whose drafts end early."""
  if not tokens or min(tokens) < 1:
    raise ValueError(f"widths must be >= 1, got {tokens}")
  return dataclasses.replace(drafter, widths=(*drafter.widths, *tokens))


def with_rule(drafter: Drafting, rule: Rule) -> Drafting:
  """Verifies a drafter with this rule instead of `config.rule`."""
  return dataclasses.replace(drafter, rule=rule.name)


# ---------------------------------------------------------------- the grammar

_NESTED: dict[type, Grammar] = {
  Shape: shapes.GRAMMAR,
  Siblings: Grammar(
    kind="siblings", entries=siblings_lib.SIBLINGS | {GIVEN.name: GIVEN}
  ),
  Policy: POLICIES,
  Rule: RULES,
  Quantization: WEIGHTS,
}
_ENTRIES = (
  entry(drafters.plain),
  entry(drafters.model, reads="model", after=_storage, resizes=True),
  entry(drafters.layer_skip, reads="layers", resizes=True),
  entry(drafters.quantized_self, reads="weights", before=_bits, resizes=True),
  entry(drafters.ngram, resizes=True),
  entry(drafters.suffix, from_text=True),
  entry(drafters.lookahead, from_text=True),
  entry(drafters.rest, before=_texts, from_text=True),
  entry(drafters.rasd, reads="model", from_text=True),
  entry(drafters.eagle, reads="head", after=_head, learns=True, resizes=True),
  entry(drafters.eagle3, reads="head", after=_head, learns=True, resizes=True),
  entry(drafters.p_eagle, reads="head", after=_head),
  entry(drafters.mtp, reads="mtp", after=_states, resizes=True),
  entry(drafters.assistant, reads="head", resizes=True),
  entry(drafters.medusa, reads="head", after=_head, resizes=True),
  entry(drafters.dflash, reads="head", after=_head),
  entry(drafters.dflash2, reads="head", after=_head),
  entry(drafters.dspark, reads="head", after=_head),
  entry(drafters.specdec, reads="block"),
  repeats,
  ladder,
  online,
  with_widths,
  with_rule,
)
DRAFTERS = Grammar(
  kind="drafter",
  entries={one.__name__: one for one in _ENTRIES},
  nested=_NESTED,
  custom=Drafting,
)
_NESTED[Drafting] = DRAFTERS


# ------------------------------------------------------------ from a config


def of(config: Mapping[str, Any], drafter: Any = None) -> Drafting:
  """The drafter of a config, or another with that config's checkpoints."""
  drafter = config["drafter"] if drafter is None else drafter
  return with_checkpoint(DRAFTERS.make(drafter), config)


def with_checkpoint(drafting: Drafting, config: Mapping[str, Any]) -> Drafting:
  """Fills in the config's checkpoint if the call names none."""
  if drafting.drafts and drafting.needs_checkpoint and not drafting.checkpoint:
    known = config.get("checkpoints", {})
    path = known.get(drafting.name) or (
      "" if drafting.reads in ("layers", "file") else known.get("draft", "")
    )
    if not path:
      raise ValueError(
        f"drafter {drafting.name!r} needs a checkpoint: "
        f'{drafting.name}("DIR"), or config.checkpoints.{drafting.name}'
      )
    drafting = dataclasses.replace(drafting, checkpoint=path)
  return drafting


def canonical(config: Mapping[str, Any]) -> str:
  """The canonical form of a config's drafter, for records."""
  return DRAFTERS.canonical(config["drafter"])


def check_checkpoint(drafting: Drafting) -> None:
  """Raises if a checkpoint is missing or of the wrong kind."""
  path, wanted = drafting.checkpoint, drafting.reads
  if not path or wanted in ("", "layers", "weights"):
    return
  try:
    path = path if wanted == "file" else hub.local(path)
  except FileNotFoundError as error:
    raise FileNotFoundError(f"drafter {drafting.name!r}: {error}") from error
  if not pathlib.Path(path).exists():
    raise FileNotFoundError(f"drafter {drafting.name!r}: there is no {path}")
  if wanted == "file":
    return
  if head_checkpoints.is_head(path):
    holds = "head"
  else:
    holds = "block" if block_networks.is_block(path) else "model"
  names = {
    "head": "a head on the target's features",
    "block": "a block drafter",
    "model": "a model of its own",
  }
  if holds != wanted:
    raise ValueError(
      f"drafter {drafting.name!r} needs {names[wanted]}, but {path} is "
      f"{names[holds]}"
    )


def source(drafting: Drafting, models: Any) -> tuple[Any, Any]:
  """The draft model, and its parameters unless they are the target's."""
  if drafting.reads == "layers":
    skipped = drafting.skipped or files.read_skipped(drafting.checkpoint)
    return models.target.functions(skipped, ()), None
  if drafting.reads == "weights":
    low, path = models.draft, drafting.checkpoint
    skipped = files.read_skipped(path) if path else SkippedLayers()
    return low.functions(skipped, ()), low.params
  if drafting.reads in ("head", "mtp"):
    head = models.draft
    if head.kind != drafting.name:
      raise ValueError(
        f"drafter {drafting.name!r}: the head in {drafting.checkpoint} is "
        f"{head.kind!r}"
      )
    return head, head.functions()[1]
  if drafting.reads == "block":
    return models.draft, models.draft.params
  if drafting.reads == "file":
    return None, models.draft
  corpus = files.index_of(drafting.corpus, models) if drafting.corpus else None
  if drafting.reads == "model":
    functions = models.draft.functions(SkippedLayers(), ())
    if drafting.name != "rasd":
      return functions, models.draft.params
    return functions, Parts(model=models.draft.params, corpus=corpus)
  return None, corpus


def make(drafting: Drafting, drafts: Any, vocab_size: int) -> Drafter:
  """Makes the drafter; `drafts` is from `source`."""
  if isinstance(drafts, Head):
    drafts, _ = drafts.functions()
  elif isinstance(drafts, Block):
    drafts = drafts.functions()
  return drafting.make(drafts, vocab_size)


def ladder_of(
  drafting: Drafting,
  target: LanguageModel,
  drafts: Any,
  *,
  rule: Rule,
  vocab_size: int,
) -> Ladder:
  """Makes the decoders of a ladder; `drafts` is from `source`."""

  def draft(tree: Tree) -> Drafter:
    return make(_of_length(drafting, tree.max_depth), drafts, vocab_size)

  return make_ladder(
    target, draft, rule=rule, vocab_size=vocab_size, lengths=drafting.lengths
  )


def help_table() -> list[tuple[str, str]]:
  """How to write drafters, trees and so on, and what each is."""
  return [
    row
    for grammar in (DRAFTERS, shapes.GRAMMAR, POLICIES, WEIGHTS)
    for row in grammar.help()
  ]
