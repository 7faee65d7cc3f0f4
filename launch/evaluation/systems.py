"""Systems that answer the same questions: plain decoding, drafters, others.

A system is written NAME[:field=value,...]: a name, and settings that it alone
has. Names are

  plain              the target alone: every speed-up is against it
  a drafter          of `launch.drafting`, with the config's other settings; but
                     the config's `repeats` is of its own drafter, and not of a
                     system that says itself what shape its drafts have
  hf                 transformers, the same target
  hf_assisted        transformers with the config's draft model as assistant
  hf_prompt_lookup   transformers with prompt lookup

Several are separated by commas; what follows a comma and is no name but
`field=value` or a number belongs to the system before: "plain,
ngram:max_ngram=2,num_speculative_tokens=8" is two systems.
"""

import dataclasses
import re
from typing import Any

import ml_collections

from launch import drafting, pair
from launch.pair import Models, Pair
from specjax import suggestions
from specjax.drafters import medusa
from specjax.runtime.engine import Engine

PLAIN = "plain"
HF = "hf"
REFERENCES = (HF, "hf_assisted", "hf_prompt_lookup")
# Of these transformers takes one prompt at a time.
ONE_PROMPT = REFERENCES[1:]

_SETTINGS = re.compile(r"^(.+?)(?::(\w+=.*))?$", re.DOTALL)
_COMMA = re.compile(r",(?![^(]*\))")  # none within parentheses
# What all systems of a run share, or that is a flag of the run.
_SHARED = (
  "target", "dtype", "temperature", "top_k", "top_p", "min_p", "seed",
  "max_new_tokens", "stop_token_ids", "max_length", "batch_size", "mesh",
  "drafter",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
  """One system.

  Attributes:
    name: as it was written.
    kind: the name without settings.
    config: the run's config with the system's own settings.
  """

  name: str
  kind: str
  config: ml_collections.ConfigDict

  @property
  def is_reference(self) -> bool:
    """Whether transformers decodes."""
    return self.kind in REFERENCES

  def takes(self, batch_size: int) -> bool:
    """Whether it can decode batches of that size."""
    return batch_size == 1 or self.kind not in ONE_PROMPT


def parse(text: str, config: ml_collections.ConfigDict) -> list[System]:
  """The systems of a list, plain decoding first, which is always there.

  Raises:
    ValueError: for names and settings that are none, or that are there twice.
  """
  written: list[str] = []
  for part in filter(None, (p.strip() for p in _COMMA.split(text))):
    belongs = re.match(r"^(\w+=|-?\d+$)", part)
    if belongs and written:
      written[-1] += f",{part}"
    else:
      written.append(part)
  names = [PLAIN, *(name for name in written if name != PLAIN)]
  if len(names) != len(set(names)):
    raise ValueError(f"a system is there twice in {text!r}")
  return [_parsed(name, config) for name in names]


def _parsed(name: str, config: ml_collections.ConfigDict) -> System:
  found = _SETTINGS.match(name)
  assert found is not None  # any text that is not empty has a name
  kind, settings = found.groups()
  own = ml_collections.ConfigDict(config.to_dict())
  if kind == "hf_assisted":
    drafting.switch(own, "model")
  elif kind in (PLAIN, *REFERENCES):
    # Nothing is drafted by us: settings of drafters do not matter.
    own.update(dict(drafter="ngram", rule="token", siblings="iid"))
    own.update(dict(tree=(), num_drafts=1, num_nodes=0, draft=""))
    own.update(dict(online=False, depth="", ladder=()))
    drafting.alone(own)
  else:
    drafting.switch(own, kind)
  try:
    asked = _fields(settings or "")
    if not {*drafting.SHAPING}.isdisjoint(asked):
      drafting.alone(own)
    for field, value in asked.items():
      _set(own, field, value)
    if kind == PLAIN:
      if settings:
        raise ValueError("it has no settings")
      own.num_speculative_tokens = 0
    elif not own.num_speculative_tokens and kind != HF:
      raise ValueError(
        "num_speculative_tokens is 0, and nothing would be drafted: that is "
        f"the system {PLAIN!r}"
      )
    if kind not in (PLAIN, *REFERENCES):
      _known(kind)
    own = pair.settled(own)
    pair.check_config(own)
  except ValueError as error:
    raise ValueError(f"system {name!r}: {error}") from None
  return System(name=name, kind=kind, config=own)


def _known(kind: str) -> None:
  """Raises ValueError for what is neither a drafter nor any other system."""
  if ":" in kind or kind in drafting.FAMILIES:
    drafting.get(kind)
    return
  known = [PLAIN, *drafting.FAMILIES, *REFERENCES]
  raise ValueError(
    f"no such system{suggestions.guess(kind, known)}, expected one of {known}, "
    "or package.module:make"
  )


def _fields(settings: str) -> dict[str, str]:
  """`a=1,b=2,3` as {"a": "1", "b": "2,3"}."""
  found: dict[str, str] = {}
  last = ""
  for part in filter(None, _COMMA.split(settings)):
    if re.match(r"^\w+=", part):
      last, _, value = part.partition("=")
      if last in found:
        raise ValueError(f"{last} is there twice")
      found[last] = value
    else:
      found[last] += f",{part}"
  return found


def _set(config: ml_collections.ConfigDict, field: str, text: str) -> None:
  """Sets a field of a config to what a text says, as the field's type."""
  if field in _SHARED:
    raise ValueError(f"{field} is the same for all systems: give --config")
  if field not in config:
    raise ValueError(
      f"the config has no field {field!r}"
      + suggestions.guess(field, config.keys())
    )
  before = config[field]
  try:
    value: Any = text
    if isinstance(before, bool):
      value = {"true": True, "false": False}[text.lower()]
    elif isinstance(before, int | float):
      value = type(before)(text)
    elif field == "tree" and text in medusa.TREES:
      value = (text,)
    elif isinstance(before, tuple | list):
      value = tuple(int(part) for part in text.split(",") if part)
  except (KeyError, ValueError):
    kind = "integers" if isinstance(before, tuple) else type(before).__name__
    raise ValueError(f"{field} must be {kind}, got {text!r}") from None
  config[field] = value


def assemble(systems: list[System]) -> dict[str, Pair]:
  """The pairs of all systems but transformers', by name.

  The target is read once, and every other checkpoint once too.

  Raises:
    ValueError, FileNotFoundError: as `launch.pair`.
  """
  loaded: dict[str, Models] = {}
  pairs = {}
  for system in systems:
    if system.is_reference:
      continue
    own = system.config
    draft = own.draft if drafting.reads_draft(own) else ""
    if draft not in loaded:
      first = next(iter(loaded.values()), None)
      loaded[draft] = pair.load(own, beside=first)
    pairs[system.name] = pair.assemble(
      own, loaded[draft], learns=True, climbs=True
    )
  return pairs


def engines(
  systems: list[System], pairs: dict[str, Pair], temperature: float
) -> dict[str, Engine]:
  """An engine of each pair, at one temperature, nothing compiled yet."""
  found = {}
  for system in systems:
    if system.name in pairs:
      own = ml_collections.ConfigDict(system.config.to_dict())
      own.temperature = temperature
      found[system.name] = pair.engine_of(
        own, pairs[system.name], baseline=system.kind == PLAIN
      )
  return found
