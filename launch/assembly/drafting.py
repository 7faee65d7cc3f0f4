"""`Drafting`: a call to a library drafter whose model is not loaded yet.

`entry` turns a function of `specjax.drafters` into one for
`launch.assembly.registry`: a path replaces the model; everything else,
including defaults and checks, is the library's. That function returns a
`Drafting`, checked on a stand-in model that supports everything.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any, Literal

from models.networks.quantized import Quantization
from models.networks.transformer import SkippedLayers
from specjax import drafters
from specjax import siblings as siblings_lib
from specjax.adaptive.policies import Policy
from specjax.siblings import IID, Siblings
from specjax.training import losses
from specjax.tree import Tree
from specjax.types import Drafter, LanguageModel, MarkovModel, Rule

# Keeps weights as stored in the files.
Published = Literal["published"]
# Arguments that no config sets: those of the loop, and sizes for tests.
_INTERNAL = (
  "vocab_size", "max_hits", "num_retrieved", "pool_size",
  "from_text",
)  # fmt: skip


_MARKOV = MarkovModel(state_size=0, estimates=True, apply=tuple)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StandIn(LanguageModel):
  """A stand-in for a model that is not loaded yet; supports everything."""

  vocab_size: int = 2**31 - 1
  init_cache: None = None
  apply: None = None
  num_features: int = 1
  num_depths: int = 2**31 - 1
  max_positions: None = None
  later: tuple = ()
  has_states: bool = False
  mask: tuple = ()
  markov: MarkovModel = _MARKOV


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learning:
  """Settings of a draft that learns while it decodes: arguments of `online`."""

  rounds: int
  entries: int
  top_k: int
  objective: str
  rate: float

  def __post_init__(self):
    in_range = self.rounds >= 1 and self.entries >= 2 and self.top_k >= 0
    if not in_range or not 0 < self.rate < 1:
      raise ValueError(
        "rounds must be >= 1, entries >= 2, top_k >= 0 and rate in (0, 1), got "
        f"{self}"
      )
    losses.get(self.objective)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
  """A checked drafter call, whose model is not loaded yet.

  Attributes:
    name: the registry entry's name.
    call: `(model or None, V, **settings) -> Drafter`.
    settings: its arguments, by name.
    reads: what the checkpoint holds: "model", "block", "layers" (those of the
      target to skip), "weights" (the same for the quantized target; optional),
      "head" (of the kind `name`), "file" (read by `load`), or "" for nothing;
      "mtp" is a head in the target's own files.
    checkpoint: the checkpoint's path.
    load: reads parameters, a pytree of arrays, from a "file"; otherwise None.
    corpus: path of a text index; "" for none.
    takes_policy: whether it drafts token by token, so that a policy can end
      its chains.
    resizes: whether a ladder may change its draft length between rounds.
    learns: whether its draft has parameters that can learn online.
    from_text: whether its trees depend on the text.
    lengths: a ladder's draft lengths, ascending.
    widths: tokens of target passes narrower than the full draft's.
    learning: how it learns online; None if it does not.
    rule: overrides `config.rule`.
    skipped: layers of the target to skip, instead of those in a file.
    weights: how the draft's weights are stored, as for
      `models.checkpoints.load`; None for the config's dtype.
    cache: dtype of the draft's KV cache, likewise.
    normed: whether an MTP head reads hidden states after the final norm.
  """

  name: str
  call: Callable[..., Drafter]
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  reads: str = ""
  checkpoint: str = ""
  load: Callable[[str], Any] | None = None
  corpus: str = ""
  takes_policy: bool = False
  resizes: bool = False
  learns: bool = False
  from_text: bool = False
  lengths: tuple[int, ...] = ()
  widths: tuple[int, ...] = ()
  learning: Learning | None = None
  rule: str = ""
  skipped: SkippedLayers | None = None
  weights: Quantization | Published | None = None
  cache: str | None = None
  normed: bool = True

  @functools.cached_property
  def unloaded(self) -> Drafter:
    """The drafter on a stand-in model, to inspect its form."""
    model = _StandIn()
    return self.make(model, model.vocab_size)

  @property
  def tree(self) -> Tree:
    """The tree of a proposal; without drafted nodes, it is plain decoding."""
    return self.unloaded.tree

  @property
  def siblings(self) -> Siblings:
    """How siblings are drawn."""
    return self.unloaded.siblings

  @property
  def policy(self) -> Policy | None:
    """The policy that ends chains, or None."""
    return self.settings.get("policy")

  @property
  def needs_checkpoint(self) -> bool:
    """True if it drafts with a checkpoint of its own."""
    return self.reads not in ("", "weights", "mtp")

  @property
  def loaded(self) -> tuple:
    """Everything that determines what is loaded from disk."""
    return (
      self.reads, self.checkpoint, self.weights, self.cache, self.normed,
    )  # fmt: skip

  @property
  def drafts(self) -> bool:
    """True unless it is plain decoding."""
    return self.tree.num_drafted > 0

  def make(self, model: Any, vocab_size: int) -> Drafter:
    """Makes the drafter for a model (or None) and V tokens."""
    return self.call(model, vocab_size, **self.settings)

  def of_form(self, **settings: Any) -> "Drafting":
    """A copy with another `tokens` or `tree`, and related settings."""
    form = ("tokens", "tree")
    others = {k: x for k, x in self.settings.items() if k not in form}
    return dataclasses.replace(self, settings=others | settings)

  def check(self, rule: Rule) -> None:
    """Raises ValueError unless a rule can verify the drafts."""
    try:
      rule.check(self.tree, self.siblings)
    except ValueError as error:
      if self.from_text:
        drawn = siblings_lib.get(self.settings.get("siblings", IID))
        certain = not self.reads or drawn.deterministic
        fits = (
          f"drafter {self.name!r} drafts trees that depend on the text: use "
          f"config.rule={'match' if certain else 'recursive'}"
        )
      elif self.siblings is IID and not self.tree.is_chain:
        fits = "config.rule=block_transport accepts the most of i.i.d. paths"
      else:
        raise
      raise ValueError(f"{error}; {fits}") from None


def entry(
  function: Callable[..., Drafter],
  *,
  reads: str = "",
  before: Callable[..., dict[str, Any]] | None = None,
  after: Callable[..., dict[str, Any]] | None = None,
  **facts: Any,
) -> Callable[..., Drafting]:
  """Makes a registry function from one of `specjax.drafters`.

  Args:
    function: takes the model first, if any, and keyword arguments.
    reads: as in `Drafting`. If it needs a checkpoint of its own, the path is
      the first argument. For "file", also give `load`.
    before, after: functions that return fields of `Drafting`; the call also
      takes their arguments, before and after the library's.
    **facts: other fields of `Drafting`.
  """
  known = inspect.signature(function).parameters
  first = next(iter(known.values()), None)
  model = first if first and first.kind is first.POSITIONAL_OR_KEYWORD else None
  sized = "vocab_size" in known

  def call(source: Any, vocab_size: int, **settings: Any) -> Drafter:
    if unknown := settings.keys() - known.keys():
      raise ValueError(
        f"drafter {function.__name__!r} has no {' and '.join(sorted(unknown))}"
      )
    models = () if model is None else (source,)
    size = {"vocab_size": vocab_size} if sized else {}
    return function(*models, **size, **settings)

  path = []
  if reads == "file":
    path = [Parameter("path", Parameter.POSITIONAL_OR_KEYWORD)]
  elif model is not None and reads != "weights":
    path = [model]
  path = [one.replace(annotation=str, default="") for one in path]
  settings = [
    one.replace(annotation=str, default="") if one.name == "corpus" else one
    for one in known.values()
    if one is not model and one.name not in _INTERNAL
  ]
  extras = [
    (of, list(inspect.signature(of).parameters.values()) if of else [])
    for of in (before, after)
  ]

  def registered(*args: Any, **keywords: Any) -> Drafting:
    given = dict(signature.bind(*args, **keywords).arguments)
    fields = dict(facts)
    for of, parameters in extras:
      names = [one.name for one in parameters if one.name in given]
      if of is not None:
        fields |= of(**{name: given.pop(name) for name in names})
    if path:
      fields["checkpoint"] = given.pop(path[0].name, "")
    if corpus := given.pop("corpus", ""):
      fields["corpus"] = corpus
      given["corpus"] = True
    drafting = Drafting(
      name=function.__name__, call=call, settings=given,
      reads="head" if reads == "mtp" and fields["checkpoint"] else reads,
      takes_policy="policy" in known, **fields,
    )  # fmt: skip
    return checked(drafting)

  signature = as_library(
    registered, function, [*path, *extras[0][1], *settings, *extras[1][1]]
  )
  return registered


def as_library(
  wrapper: Callable[..., Drafting],
  function: Callable[..., Drafter],
  parameters: Sequence[Parameter],
) -> inspect.Signature:
  """Copies a library function's name and docstring, and sets a signature."""
  signature = inspect.Signature(parameters, return_annotation=Drafting)
  wrapper.__name__, wrapper.__doc__ = function.__name__, function.__doc__
  wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
  wrapper.__annotations__["return"] = Drafting
  wrapper.__signature__ = signature  # type: ignore[attr-defined]
  return signature


def checked(drafting: Drafting) -> Drafting:
  """Returns its argument; ValueError if no model could draft like this."""
  _ = drafting.unloaded
  return drafting


def with_tokens(drafting: Drafting, tokens: int) -> Drafting:
  """A copy with a chain of `tokens`; 0 means plain decoding."""
  if tokens:
    return drafting.of_form(tokens=tokens)
  nothing = lambda model, vocab_size: drafters.plain()
  return dataclasses.replace(drafting, call=nothing, settings={})
