"""Systems under comparison: plain decoding, drafters, transformers.

A system is written like `config.drafter` (`assembly.registry`): `plain`, the
baseline of every speed-up; `ngram(tokens=8)`; `with_rule(eagle3, block)`, with
its own rule; or transformers' `hf`, `hf_assisted` and `hf_prompt_lookup`.
Separate several with commas.
"""

import dataclasses
from collections.abc import Sequence

import ml_collections

from launch.assembly import pair, registry
from launch.assembly.drafting import Drafting
from launch.assembly.pair import Models, Pair
from launch.assembly.registry import DRAFTERS
from specjax import calls
from specjax.calls import Grammar

PLAIN, HF = "plain", "hf"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
  """Settings for decoding the same target with transformers.

  Attributes:
    kind: the entry's name.
    tokens: draft length; 0 without drafting.
    draft: the assistant's checkpoint, or "".
    max_ngram: longest n-gram of prompt lookup.
  """

  kind: str
  tokens: int = 0
  draft: str = ""
  max_ngram: int = 0


def hf() -> Reference:
  """transformers, with the target alone."""
  return Reference(kind="hf")


def hf_assisted(draft: str = "", *, tokens: int = 5) -> Reference:
  """Transformers with a draft model as assistant, one prompt at a time."""
  return Reference(kind="hf_assisted", draft=draft, tokens=tokens)


def hf_prompt_lookup(*, tokens: int = 5, max_ngram: int = 3) -> Reference:
  """Transformers with prompt lookup, one prompt at a time."""
  return Reference(kind="hf_prompt_lookup", tokens=tokens, max_ngram=max_ngram)


SYSTEMS = Grammar(
  kind="system",
  entries={
    **DRAFTERS.entries,
    **{one.__name__: one for one in (hf, hf_assisted, hf_prompt_lookup)},
  },
  nested=DRAFTERS.nested,
  custom=Drafting,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
  """A system that answers the questions.

  Attributes:
    name: its canonical form.
    config: the run's config.
    drafting: how it drafts; None if transformers decodes.
    reference: how transformers decodes, or None.
  """

  name: str
  config: ml_collections.ConfigDict
  drafting: Drafting | None = None
  reference: Reference | None = None

  @property
  def is_plain(self) -> bool:
    """True for plain decoding, the baseline of every speed-up."""
    return self.drafting is not None and not self.drafting.drafts

  @property
  def drafts_here(self) -> bool:
    """True if it drafts in this library's loop."""
    return self.drafting is not None and self.drafting.drafts

  @property
  def is_timed(self) -> bool:
    """True if its rounds can be timed: the host changes those of a ladder."""
    return self.drafts_here and not self.drafting.lengths

  def takes(self, batch_size: int) -> bool:
    """True if it can decode batches of this size."""
    return batch_size == 1 or not (self.reference and self.reference.tokens)


def parse(text: str, config: ml_collections.ConfigDict) -> list[System]:
  """Parses a list of systems; plain decoding is always first."""
  compared = [_made(call, config) for call in calls.parse_list(text)]
  compared = [system for system in compared if not system.is_plain]
  compared.insert(0, _made(PLAIN, config))
  names = [system.name for system in compared]
  if len(names) != len(set(names)):
    raise ValueError(f"duplicate system in {text!r}")
  return compared


def _made(call, config: ml_collections.ConfigDict) -> System:
  name = SYSTEMS.canonical(call)
  made = SYSTEMS.make(call)
  if isinstance(made, Reference):
    if made.kind == "hf_assisted" and not made.draft:
      draft = config.checkpoints.get("model") or config.checkpoints.draft
      made = dataclasses.replace(made, draft=draft)
    return System(name=name, config=config, reference=made)
  try:
    made = registry.with_checkpoint(made, config)
    pair.check_config(config, made)
  except ValueError as error:
    raise ValueError(f"system {name!r}: {error}") from None
  return System(name=name, config=config, drafting=made)


def assemble(
  systems: Sequence[System], *, inputs: bool = False
) -> dict[str, Pair]:
  """Builds the pairs of all systems except transformers', by name.

  Loads the target and every other checkpoint once.
  """
  loaded: dict[tuple, Models] = {}
  pairs = {}
  for system in systems:
    drafting = system.drafting
    if drafting is None:
      continue
    key = drafting.loaded
    if key not in loaded:
      first = next(iter(loaded.values()), None)
      loaded[key] = pair.load(
        system.config, drafting=drafting, loaded=first, inputs=inputs
      )
    pairs[system.name] = pair.assemble(
      system.config, loaded[key], drafting=drafting
    )
  return pairs
