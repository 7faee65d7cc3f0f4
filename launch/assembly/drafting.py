"""A way to draft: a call of a drafter of the library, before its model is read.

`entry` makes a function of `launch.assembly.registry` from one of
`specjax.drafters`: a path replaces the model, and everything else, with its
defaults and checks, is the library's. It returns a `Drafting`, tried on a
stand-in model that accepts everything, so that its form is known.
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

# Weights as the files have them.
Published = Literal["published"]
# Arguments that no config sets: the loop's, and sizes for tests.
_INTERNAL = (
  "vocab_size", "max_hits", "num_retrieved", "pool_size",
  "from_text",
)  # fmt: skip


_MARKOV = MarkovModel(state_size=0, estimates=True, apply=tuple)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Unread(LanguageModel):
  """Stands for a model that is not read yet: whatever is asked, it can."""

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
    whole = self.rounds >= 1 and self.entries >= 2 and self.top_k >= 0
    if not whole or not 0 < self.rate < 1:
      raise ValueError(
        "rounds must be >= 1, entries >= 2, top_k >= 0 and rate in (0, 1), got "
        f"{self}"
      )
    losses.get(self.objective)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
  """A way to draft, checked, of which no model has been read.

  Attributes:
    name: of the registry's entry that drafts.
    call: `(model or None, V, **settings) -> Drafter`.
    settings: what it was given, by name.
    reads: what the checkpoint holds: "model", "block", "layers" (of the target,
      which are skipped), "weights" (the same, of the target's quantized; may
      be none), "head" (of the kind `name`), "file" (read by `load`), or "" for
      nothing; "mtp" is a head in the target's own.
    checkpoint: its path.
    load: of a "file", the parameters of what drafts by its path, a pytree of
      arrays; None for all else.
    corpus: path of an index of texts; "" for none.
    takes_policy: whether it drafts token by token, so that a policy can end
      its chains.
    climbs: whether a ladder's chains of other lengths go on with its state.
    learns: whether its draft has parameters that can learn online.
    from_text: whether its trees follow from the text.
    lengths: of a ladder's chains, rising.
    widths: tokens of the target's narrower passes, beside the whole draft's.
    learning: how it learns; None if it does not.
    rule: what verifies, in place of `config.rule`.
    skipped: layers of the target that are skipped, in place of a file's.
    weights: how the draft's weights are stored, as
      `models.checkpoints.load` takes it; None for the config's dtype.
    cache: what the draft's keys and values are stored as, likewise.
    normed: whether an MTP head reads hidden states after their norms.
  """

  name: str
  call: Callable[..., Drafter]
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  reads: str = ""
  checkpoint: str = ""
  load: Callable[[str], Any] | None = None
  corpus: str = ""
  takes_policy: bool = False
  climbs: bool = False
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
  def unread(self) -> Drafter:
    """The drafter of a model that is not read: its form alone counts."""
    model = _Unread()
    return self.make(model, model.vocab_size)

  @property
  def tree(self) -> Tree:
    """Form of every proposal; without a drafted node it is plain decoding."""
    return self.unread.tree

  @property
  def siblings(self) -> Siblings:
    """The distribution by which siblings are drawn."""
    return self.unread.siblings

  @property
  def policy(self) -> Policy | None:
    """The policy that ends chains; None if nothing does."""
    return self.settings.get("policy")

  @property
  def needs_checkpoint(self) -> bool:
    """True if the model that drafts is a file of its own."""
    return self.reads not in ("", "weights", "mtp")

  @property
  def loaded(self) -> tuple:
    """All that says what is read from disk to draft."""
    return (
      self.reads, self.checkpoint, self.weights, self.cache, self.normed,
    )  # fmt: skip

  @property
  def drafts(self) -> bool:
    """True unless it is plain decoding."""
    return self.tree.num_drafted > 0

  def make(self, model: Any, vocab_size: int) -> Drafter:
    """The drafter of a model, if one drafts; V tokens are real."""
    return self.call(model, vocab_size, **self.settings)

  def of_form(self, **settings: Any) -> "Drafting":
    """The same with another form: `tokens` or `tree`, and what goes with it."""
    form = ("tokens", "tree")
    others = {k: x for k, x in self.settings.items() if k not in form}
    return dataclasses.replace(self, settings=others | settings)

  def check(self, rule: Rule) -> None:
    """Raises ValueError unless a rule verifies what is drafted."""
    try:
      rule.check(self.tree, self.siblings)
    except ValueError as error:
      if self.from_text:
        drawn = siblings_lib.get(self.settings.get("siblings", IID))
        certain = not self.reads or drawn.deterministic
        fits = (
          f"drafter {self.name!r} drafts trees that follow from the text: "
          f"config.rule={'match' if certain else 'recursive'} verifies them"
        )
      elif self.siblings is IID and not self.tree.is_chain:
        fits = "config.rule=block_transport accepts most of i.i.d. paths"
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
  """The function of the registry for one of `specjax.drafters`.

  Args:
    function: of keyword arguments, and first the model, if one drafts.
    reads: as `Drafting` has it; a path is the first argument where a file of
      its own is read. For "file" give `load` too.
    before, after: functions whose arguments the call has too, before and after
      the library's, and which return fields of `Drafting`.
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
  beside = [
    (of, list(inspect.signature(of).parameters.values()) if of else [])
    for of in (before, after)
  ]

  def written(*args: Any, **keywords: Any) -> Drafting:
    given = dict(signature.bind(*args, **keywords).arguments)
    fields = dict(facts)
    for of, parameters in beside:
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
    return tried(drafting)

  signature = as_library(
    written, function, [*path, *beside[0][1], *settings, *beside[1][1]]
  )
  return written


def as_library(
  written: Callable[..., Drafting],
  function: Callable[..., Drafter],
  parameters: Sequence[Parameter],
) -> inspect.Signature:
  """Gives a function name and words of the library's, and a signature."""
  signature = inspect.Signature(parameters, return_annotation=Drafting)
  written.__name__, written.__doc__ = function.__name__, function.__doc__
  written.__annotations__ = {one.name: one.annotation for one in parameters}
  written.__annotations__["return"] = Drafting
  written.__signature__ = signature  # type: ignore[attr-defined]
  return signature


def tried(drafting: Drafting) -> Drafting:
  """The same; ValueError if no model could draft so."""
  _ = drafting.unread
  return drafting


def with_tokens(drafting: Drafting, tokens: int) -> Drafting:
  """The same on one path of so many tokens; of none it drafts nothing."""
  if tokens:
    return drafting.of_form(tokens=tokens)
  nothing = lambda model, vocab_size: drafters.plain()
  return dataclasses.replace(drafting, call=nothing, settings={})
