"""Systems under comparison: plain decoding, drafters, other libraries.

A system is a call, as `config.drafter` is (`assembly.registry`): `plain`,
the target alone, which every speed-up is against; `ngram(tokens=8)`; one that
another rule verifies, `with_rule(eagle3, block)`; transformers' `hf`,
`hf_assisted` and `hf_prompt_lookup`; or `llama_cpp`. Several are separated by
commas.
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
from specjax.runtime.engine import Engine

PLAIN, HF = "plain", "hf"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
  """Settings of transformers or llama.cpp for decoding the same target.

  Attributes:
    kind: its entry's name.
    tokens: drafted at a time; 0 for nothing.
    draft: the assistant's checkpoint, or "".
    max_ngram: of a prompt look-up.
    python: the interpreter of an environment that has `llama_cpp`.
  """

  kind: str
  tokens: int = 0
  draft: str = ""
  max_ngram: int = 0
  python: str = ""

  @property
  def takes_batches(self) -> bool:
    """True if it decodes several prompts at a time."""
    return not (self.tokens or self.python)


def hf() -> Reference:
  """transformers, the same target alone."""
  return Reference(kind="hf")


def hf_assisted(draft: str = "", *, tokens: int = 5) -> Reference:
  """Transformers with a draft model as assistant, a prompt at a time."""
  return Reference(kind="hf_assisted", draft=draft, tokens=tokens)


def hf_prompt_lookup(*, tokens: int = 5, max_ngram: int = 3) -> Reference:
  """Transformers with prompt lookup, a prompt at a time."""
  return Reference(kind="hf_prompt_lookup", tokens=tokens, max_ngram=max_ngram)


def llama_cpp(python: str) -> Reference:
  """llama.cpp in float32, a prompt at a time, by that Python's `llama_cpp`."""
  return Reference(kind="llama_cpp", python=python)


SYSTEMS = Grammar(
  kind="system",
  entries={
    **DRAFTERS.entries,
    **{
      one.__name__: one
      for one in (hf, hf_assisted, hf_prompt_lookup, llama_cpp)
    },
  },
  nested=DRAFTERS.nested,
  custom=Drafting,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
  """A system that answers the questions.

  Attributes:
    name: its canonical form.
    config: the run's.
    drafting: how it drafts; None if another library decodes.
    reference: how that decodes, or None.
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

  def takes(self, batch_size: int) -> bool:
    """True if it can decode batches of that size."""
    return batch_size == 1 or not self.reference or self.reference.takes_batches


def parse(text: str, config: ml_collections.ConfigDict) -> list[System]:
  """The systems of a list, plain decoding first, which is always there.

  Raises:
    ValueError: for what is no system, or that is there twice.
  """
  entered = [_made(call, config) for call in calls.parse_list(text)]
  entered = [system for system in entered if not system.is_plain]
  entered.insert(0, _made(PLAIN, config))
  names = [system.name for system in entered]
  if len(names) != len(set(names)):
    raise ValueError(f"a system is there twice in {text!r}")
  return entered


def _made(written, config: ml_collections.ConfigDict) -> System:
  name = SYSTEMS.canonical(written)
  made = SYSTEMS.make(written)
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
  systems: Sequence[System],
  *,
  inputs: bool = False,
  count_experts: bool = False,
) -> dict[str, Pair]:
  """The pairs of all systems but other libraries', by name.

  The target is read once, and every other checkpoint once too.

  Args:
    systems: all of them.
    inputs: whether prompts may have inputs, so that encoder-decoders decode.
    count_experts: whether the target's passes count the experts they touch.

  Raises:
    ValueError, FileNotFoundError: as `launch.assembly.pair`.
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
        system.config, drafting=drafting, beside=first, inputs=inputs
      )
    pairs[system.name] = pair.assemble(
      system.config, loaded[key], drafting=drafting,
      count_experts=count_experts,
    )  # fmt: skip
  return pairs


def engines(
  systems: Sequence[System], pairs: dict[str, Pair], temperature: float
) -> dict[str, Engine]:
  """An engine of each pair, at one temperature, nothing compiled yet."""
  by_name = {}
  for system in systems:
    if system.name in pairs:
      config = ml_collections.ConfigDict(system.config.to_dict())
      config.temperature = temperature
      by_name[system.name] = pair.engine_of(
        config, pairs[system.name], baseline=system.is_plain
      )
  return by_name
