"""The registry of what drafts: a call of the grammar, a function each.

`config.drafter` is a call of `DRAFTERS` (`specjax.calls`), and so is a system
of `launch.evaluate`: `eagle3(tokens=7)`, `model("DIR", tree=paths(3))`,
`repeats(eagle3(tokens=1), tokens=7)`. Each function here checks its arguments
and returns a `Drafting`; no model is read for that. What is put around a
drafter takes a `Drafting` and returns another. `package.module:NAME` is a
function of one's own that returns one.

A checkpoint that a call does not name is `config.checkpoints`' of the
drafter's name, or its `draft`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from launch.build import layers, retrieval
from launch.build.policies import POLICIES
from launch.build.precision import WEIGHTS
from models.formats import head_checkpoints
from models.formats.head_checkpoints import Head
from models.head_shapes import HeadShape
from models.networks import specdec as block_networks
from models.networks.lowbits import Format
from models.networks.specdec import Block
from models.networks.transformer import FINAL, SkippedLayers
from specjax import drafters
from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.adaptive import chains, policies, widths
from specjax.adaptive.policies import Policy
from specjax.adaptive.rungs import LENGTHS, Rungs, make_rungs
from specjax.adaptive.rungs import check as check_lengths
from specjax.calls import Call, Grammar
from specjax.drafters import medusa as medusa_lib
from specjax.drafters.rasd import Parts
from specjax.drafters.shared import occurrences
from specjax.rules import GRAMMAR as RULES
from specjax.siblings import GIVEN, IID, Siblings
from specjax.training import losses
from specjax.tree import Form, Tree
from specjax.types import Drafter, LanguageModel, Rule

_TOKENS = 5
_NOTHING = tree_lib.chain(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learning:
  """How a draft learns while it decodes: the arguments of `online`."""

  rounds: int
  entries: int
  laws: int
  objective: str
  rate: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
  """A way to draft, checked, of which no model has been read.

  Attributes:
    name: of the registry's entry that drafts.
    tree: what every proposal fills; of no drafted node it is plain decoding.
    siblings: how children are drawn.
    make: `(Drafting, what drafts, V) -> Drafter`; what drafts is that of
      `source`. It reads tree, siblings, policy and lengths of its argument, so
      that `dataclasses.replace` gives the drafter of another tree.
    reads: what the checkpoint holds: "model", "block", "layers" (of the target,
      which are skipped), "weights" (the target's, in few bits, and no
      checkpoint), "head" (of the kind `name`), or "" for nothing; "mtp" is a
      head in the target's own.
    checkpoint: its path.
    corpus: path of an index of texts; "" for none.
    policy: what ends chains; None if nothing does.
    takes_policy: whether it drafts token by token, so that a policy can.
    foreign: whether its state goes on from drafts of others
      (`Drafter.reads_anew`).
    climbs: the form of its chains in a ladder; None if it has none.
    learns: whether its draft has parameters that can learn online.
    verified_by: the rule to name where another does not verify its trees.
    lengths: of a ladder's chains, rising.
    widths: tokens of the target's narrower passes, beside the whole draft's.
    learning: how it learns; None if it does not.
    rule: what verifies, in place of `config.rule`.
    skipped: layers of the target that are skipped, in place of a file's.
    weights: how the draft's weights are stored; None for the config's dtype.
  """

  name: str
  make: Callable[["Drafting", Any, int], Drafter]
  tree: Tree = _NOTHING
  siblings: Siblings = IID
  reads: str = ""
  checkpoint: str = ""
  corpus: str = ""
  policy: Policy | None = None
  takes_policy: bool = False
  foreign: bool = False
  climbs: Form | None = None
  learns: bool = False
  verified_by: str = ""
  lengths: tuple[int, ...] = ()
  widths: tuple[int, ...] = ()
  learning: Learning | None = None
  rule: str = ""
  skipped: SkippedLayers | None = None
  weights: Format | None = None

  @property
  def needs_checkpoint(self) -> bool:
    """Whether what drafts is a file of its own."""
    return self.reads not in ("", "weights", "mtp")

  @property
  def drafts(self) -> bool:
    """Whether anything is drafted."""
    return self.tree.num_drafted > 0

  def check(self, rule: Rule) -> None:
    """Raises ValueError unless a rule verifies what is drafted."""
    masked = self.policy or (self.climbs is Form.MASKED and self.lengths)
    tree = self.tree
    if masked:
      tree = dataclasses.replace(tree, form=Form.MASKED)
    try:
      rule.check(tree, self.siblings)
    except ValueError as error:
      if not self.verified_by:
        raise
      raise ValueError(
        f"{error}; drafter {self.name!r} drafts trees that follow from the "
        f"text: config.rule={self.verified_by} verifies them"
      ) from None


# ------------------------------------------------------------------- trees


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """The form of drafts, by their depth.

  Attributes:
    make: the tree of a depth.
    depth: its own depth, where it has one.
    dynamic: whether the drafter chooses the nodes, as EAGLE-2 does.
  """

  make: Callable[[int], Tree]
  depth: int | None = None
  dynamic: bool = False


def paths(num_drafts: int) -> Shape:
  """Separate paths, as deep as `tokens`."""
  return Shape(make=lambda tokens: tree_lib.paths(tokens, num_drafts))


def _fixed(tree: Tree) -> Shape:
  return Shape(make=lambda tokens: tree, depth=tree.max_depth)


def k_ary(*branching: int) -> Shape:
  """So many children of every node, level by level."""
  return _fixed(tree_lib.k_ary(*branching))


def parents(*nodes: int) -> Shape:
  """Any tree, by its nodes' parents, root first: (-1, 0, 0, 1, 1)."""
  return _fixed(Tree(nodes))


def dynamic(nodes: int, *, top_k: int = 10) -> Shape:
  """The best nodes of a head, in a tree as deep as `tokens` (EAGLE-2)."""
  return Shape(
    make=lambda tokens: tree_lib.bound(nodes, tokens, top_k), dynamic=True
  )


def _published(tree: Tree) -> Callable[[], Shape]:
  def published() -> Shape:
    return _fixed(tree)

  published.__doc__ = f"The published tree of {tree.num_nodes} nodes."
  return published


TREES = Grammar(
  kind="tree",
  entries={
    "paths": paths,
    "k_ary": k_ary,
    "parents": parents,
    "dynamic": dynamic,
    **{name: _published(tree) for name, tree in medusa_lib.TREES.items()},
  },
  literal="parents",
)


def _tree(
  tokens: int | None,
  shape: Shape | None,
  siblings: Siblings,
  policy: Policy | None,
  *,
  default: int = _TOKENS,
  dynamic: bool = False,
) -> dict[str, Any]:
  """Tree, siblings and policy of a drafter that fills the tree it is given.

  Raises:
    ValueError: if they do not go together.
  """
  if tokens is not None and tokens < 1:
    raise ValueError(
      f"tokens must be >= 1, got {tokens} (drafter 'plain' drafts nothing)"
    )
  if shape is not None and shape.dynamic:
    if not dynamic:
      raise ValueError("a dynamic tree is of a head on the target's features")
    if siblings is not IID:
      raise ValueError("a dynamic tree has no siblings of its own")
    siblings = GIVEN
  if shape is None:
    tree = tree_lib.chain(tokens or default)
  elif shape.depth is not None and tokens is not None:
    raise ValueError(f"the tree is {shape.depth} deep: give no tokens beside")
  else:
    tree = shape.make(tokens or default)
  if policy is not None:
    chains.check(tree, siblings, policy)
  return dict(tree=tree, siblings=siblings, policy=policy)


# --------------------------------------------------------- models and layers


def plain() -> Drafting:
  """Nothing: the target decodes alone."""
  return Drafting(name="plain", make=lambda own, source, vocab_size: None)


def _policy(own: Drafting) -> Policy | None:
  """What ends chains; those of a ladder that outlive empty rounds have one."""
  if own.lengths and own.climbs is Form.MASKED:
    return policies.fixed(own.tree.max_depth)
  return own.policy


def model(
  draft: str = "",
  *,
  tokens: int | None = None,
  tree: Shape | None = None,
  siblings: Siblings = IID,
  policy: Policy | None = None,
  weights: Format | None = None,
) -> Drafting:
  """A smaller model (Leviathan et al., 2023)."""

  def make(own: Drafting, source: LanguageModel, vocab_size: int) -> Drafter:
    return drafters.model.drafter(
      source, tree=own.tree, siblings=own.siblings, vocab_size=vocab_size,
      depth=_policy(own),
    )  # fmt: skip

  return Drafting(
    name="model", make=make, reads="model", checkpoint=draft,
    learns=weights is None, takes_policy=True, climbs=Form.MASKED,
    weights=weights, **_tree(tokens, tree, siblings, policy),
  )  # fmt: skip


def layer_skip(
  skipped: str = "",
  *,
  tokens: int | None = None,
  tree: Shape | None = None,
  siblings: Siblings = IID,
  policy: Policy | None = None,
) -> Drafting:
  """The target without the layers that a file of launch.layer_search names."""

  def make(own: Drafting, source: LanguageModel, vocab_size: int) -> Drafter:
    return drafters.layer_skip.drafter(
      source, tree=own.tree, siblings=own.siblings, vocab_size=vocab_size,
      depth=_policy(own),
    )  # fmt: skip

  return Drafting(
    name="layer_skip", make=make, reads="layers", checkpoint=skipped,
    takes_policy=True, foreign=True, climbs=Form.MASKED,
    **_tree(tokens, tree, siblings, policy),
  )  # fmt: skip


def quantised_self(
  *,
  bits: int = 8,
  group: int | None = None,
  tokens: int | None = None,
  tree: Shape | None = None,
  siblings: Siblings = IID,
  policy: Policy | None = None,
) -> Drafting:
  """The target's weights in few bits, on its own cache (QuantSpec, 2025)."""
  if bits not in (4, 8):
    raise ValueError(f"bits must be 4 or 8, got {bits}")
  if bits == 4 and group is None:
    group = 32
  weights = Format(kind=f"int{bits}", group=group)

  def make(own: Drafting, source: LanguageModel, vocab_size: int) -> Drafter:
    return drafters.quantised_self.drafter(
      source, tree=own.tree, siblings=own.siblings, vocab_size=vocab_size,
      depth=_policy(own),
    )  # fmt: skip

  return Drafting(
    name="quantised_self", make=make, reads="weights", weights=weights,
    takes_policy=True, foreign=True, climbs=Form.MASKED,
    **_tree(tokens, tree, siblings, policy),
  )  # fmt: skip


def specdec(
  draft: str = "",
  *,
  tokens: int | None = None,
  tree: Shape | None = None,
  siblings: Siblings = IID,
) -> Drafting:
  """A block at once, of an encoder-decoder (SpecDec, Xia et al., 2023)."""

  def make(own: Drafting, source: Block, vocab_size: int) -> Drafter:
    blocks, encode = source.functions()
    return drafters.specdec.drafter(
      blocks, encode, num_masks=source.config.num_masks, tree=own.tree,
      siblings=own.siblings, vocab_size=vocab_size,
    )  # fmt: skip

  return Drafting(
    name="specdec", make=make, reads="block", checkpoint=draft,
    **_tree(tokens, tree, siblings, None),
  )  # fmt: skip


# --------------------------------------------------------------------- heads


def head_drafter(
  shape: HeadShape,
  functions,
  *,
  tree: Tree,
  siblings: Siblings,
  vocab_size: int,
  policy: Policy | None = None,
  longest: int | None = None,
) -> Drafter:
  """The drafter of a head.

  Args:
    shape: what the head is.
    functions: of `models.head_shapes.functions`.
    tree: what every proposal fills; one whose parents are data
      (`specjax.tree.bound`) is EAGLE's dynamic tree, and of heads that say all
      depths at once the best tree of their product law.
    siblings: how children are drawn.
    vocab_size: V.
    policy: when chains of EAGLE's end.
    longest: of the chains of a ladder of EAGLE's.
  """
  static = dict(tree=tree, siblings=siblings, vocab_size=vocab_size)
  if shape.kind == "dflash":
    return drafters.dflash.drafter(functions, **static)
  if shape.num_depths is not None:
    return drafters.medusa.drafter(
      functions,
      num_heads=shape.num_depths,
      num_features=shape.config.embed_dim,
      name=shape.kind,
      **static,
    )
  if tree.form is Form.FREE:
    return drafters.eagle.dynamic(
      functions,
      num_nodes=tree.num_drafted,
      depth=tree.max_depth,
      top_k=tree.max_children,
      vocab_size=vocab_size,
    )
  return drafters.eagle.drafter(
    functions, **static, name=shape.kind, depth=policy, longest=longest
  )


def _make_head(own: Drafting, source: Head, vocab_size: int) -> Drafter:
  functions, _ = source.functions()
  return head_drafter(
    source.shape, functions, tree=own.tree, siblings=own.siblings,
    vocab_size=vocab_size, policy=own.policy,
    longest=own.lengths[-1] if own.lengths else None,
  )  # fmt: skip


def _head(name: str, head: str, tree: dict[str, Any], **can: Any) -> Drafting:
  return Drafting(
    name=name, make=_make_head, reads="head", checkpoint=head, foreign=True,
    **tree, **can,
  )  # fmt: skip


def eagle(
  head: str = "",
  *,
  tokens: int | None = None,
  tree: Shape | None = None,
  siblings: Siblings = IID,
  policy: Policy | None = None,
) -> Drafting:
  """An EAGLE head, static or dynamic trees (Li et al., ICML and EMNLP 2024)."""
  return _head(
    "eagle", head, _tree(tokens, tree, siblings, policy, dynamic=True),
    takes_policy=True, climbs=Form.FIXED, learns=True,
  )  # fmt: skip


def eagle3(
  head: str = "",
  *,
  tokens: int | None = None,
  tree: Shape | None = None,
  siblings: Siblings = IID,
  policy: Policy | None = None,
) -> Drafting:
  """An EAGLE-3 head (Li et al., 2025)."""
  return dataclasses.replace(
    eagle(head, tokens=tokens, tree=tree, siblings=siblings, policy=policy),
    name="eagle3",
  )


def mtp(
  head: str = "",
  *,
  tokens: int | None = None,
  tree: Shape | None = None,
  siblings: Siblings = IID,
  policy: Policy | None = None,
) -> Drafting:
  """A head of multi-token prediction: its target's own, or another one."""
  return dataclasses.replace(
    eagle(head, tokens=tokens, tree=tree, siblings=siblings, policy=policy),
    name="mtp", reads="head" if head else "mtp", learns=False,
  )  # fmt: skip


def medusa(
  head: str = "",
  *,
  tokens: int | None = None,
  tree: Shape | None = None,
  siblings: Siblings = IID,
) -> Drafting:
  """Medusa's heads, one a depth (Cai et al., ICML 2024)."""
  return _head(
    "medusa", head,
    _tree(tokens, tree, siblings, None, default=4, dynamic=True),
    climbs=Form.FIXED,
  )  # fmt: skip


def blockwise(
  head: str = "",
  *,
  tokens: int | None = None,
  tree: Shape | None = None,
  siblings: Siblings = IID,
) -> Drafting:
  """Blockwise decoding's heads (Stern et al., NeurIPS 2018)."""
  return dataclasses.replace(
    medusa(head, tokens=tokens, tree=tree, siblings=siblings), name="blockwise"
  )


def dflash(
  head: str = "",
  *,
  tokens: int | None = None,
  tree: Shape | None = None,
  siblings: Siblings = IID,
) -> Drafting:
  """A head that says a block at once, by diffusion (DFlash, 2026)."""
  return _head(
    "dflash", head, _tree(tokens, tree, siblings, None, dynamic=True)
  )


# ------------------------------------------------------------------ look-ups


def ngram(*, tokens: int = _TOKENS, max_ngram: int = 3) -> Drafting:
  """What followed the last tokens where they occurred before in the text."""
  if tokens < 1 or max_ngram < 1:
    raise ValueError("tokens and max_ngram must be >= 1")

  def make(own: Drafting, source: None, vocab_size: int) -> Drafter:
    del source
    return drafters.ngram.drafter(
      num_speculative_tokens=own.tree.max_depth, max_ngram=max_ngram,
      vocab_size=vocab_size,
    )  # fmt: skip

  return Drafting(
    name="ngram", make=make, tree=tree_lib.chain(tokens), climbs=Form.FIXED
  )


def lookahead(
  *, tokens: int = _TOKENS, window: int = 7, num_guesses: int = 7
) -> Drafting:
  """N-grams of the target's own Jacobi trajectories (Fu et al., ICML 2024)."""
  tree = drafters.lookahead.form(
    window=window, ngram=tokens + 1, num_guesses=num_guesses
  )

  def make(own: Drafting, source: None, vocab_size: int) -> Drafter:
    del source
    return drafters.lookahead.drafter(
      window=window, ngram=own.tree.max_depth + 1, num_guesses=num_guesses,
      vocab_size=vocab_size,
    )  # fmt: skip

  return Drafting(
    name="lookahead", make=make, tree=tree, siblings=GIVEN, verified_by="match"
  )


def _look_up(
  name: str,
  tokens: int,
  nodes: int,
  corpus: str,
  limits: dict[str, Any],
  **how: Any,
) -> Drafting:
  """A drafter of `drafters.suffix`; 0 nodes are twice as many as tokens."""
  limits = _limits(nodes or 2 * tokens, tokens, **limits)

  def make(own: Drafting, source: None, vocab_size: int) -> Drafter:
    del source
    return drafters.suffix.drafter(
      num_nodes=own.tree.num_drafted, depth=own.tree.max_depth,
      vocab_size=vocab_size, with_corpus=bool(corpus), **limits, **how,
    )  # fmt: skip

  return Drafting(
    name=name, make=make, siblings=GIVEN, corpus=corpus, verified_by="match",
    tree=occurrences.bounds(nodes or 2 * tokens, tokens, None),
  )  # fmt: skip


def _limits(
  nodes: int, tokens: int, *, nodes_per_match: float, **limits: Any
) -> dict[str, Any]:
  limits |= dict(max_hits=64, nodes_per_match=nodes_per_match or math.inf)
  occurrences.check(num_nodes=nodes, depth=tokens, **limits)
  return limits


def suffix(
  *,
  tokens: int = _TOKENS,
  nodes: int = 0,
  corpus: str = "",
  max_match: int = 16,
  nodes_per_match: float = 1.0,
  min_prob: float = 0.1,
) -> Drafting:
  """How texts went on that ended so, own and a corpus's (SuffixDecoding)."""
  return _look_up(
    "suffix", tokens, nodes, corpus,
    dict(max_match=max_match, nodes_per_match=nodes_per_match,
         min_prob=min_prob),
  )  # fmt: skip


def rest(
  corpus: str,
  *,
  tokens: int = _TOKENS,
  nodes: int = 0,
  max_match: int = 16,
  nodes_per_match: float = 1.0,
  min_prob: float = 0.1,
) -> Drafting:
  """How texts of a corpus went on that ended so (REST, He et al., 2024)."""
  return _look_up(
    "rest", tokens, nodes, corpus,
    dict(max_match=max_match, nodes_per_match=nodes_per_match,
         min_prob=min_prob),
    own_text=False,
  )  # fmt: skip


def rasd(
  draft: str = "",
  *,
  nodes: int,
  tokens: int = _TOKENS,
  tree: Shape | None = None,
  siblings: Siblings = IID,
  corpus: str = "",
  max_match: int = 16,
  nodes_per_match: float = 1.0,
  min_prob: float = 0.1,
) -> Drafting:
  """A draft's tree, and what was retrieved beside it (RASD, 2025)."""
  inner = (shape := tree or paths(1)).make(tokens)
  if shape.dynamic:
    raise ValueError("the draft's own tree cannot be dynamic")
  depth = max(tokens, inner.max_depth)
  if nodes <= inner.num_drafted:
    raise ValueError(
      f"nodes must be above the {inner.num_drafted} of the draft's own tree, "
      f"got {nodes}"
    )
  limits = _limits(
    nodes, depth, max_match=max_match, nodes_per_match=nodes_per_match,
    min_prob=min_prob,
  )  # fmt: skip

  def make(own: Drafting, source: LanguageModel, vocab_size: int) -> Drafter:
    return drafters.rasd.drafter(
      source, tree=inner, siblings=siblings, num_nodes=own.tree.num_drafted,
      depth=own.tree.max_depth,
      num_retrieved=max(2 * own.tree.num_drafted, own.tree.max_depth),
      vocab_size=vocab_size, with_corpus=bool(corpus), **limits,
    )  # fmt: skip

  return Drafting(
    name="rasd", make=make, reads="model", checkpoint=draft, corpus=corpus,
    tree=occurrences.bounds(nodes, depth, None), siblings=GIVEN,
    verified_by="match" if siblings.deterministic else "recursive",
  )  # fmt: skip


# ------------------------------------------------------- around another drafter


def repeats(
  drafter: Drafting,
  *,
  tokens: int | None = None,
  min_match: int = 3,
  max_ngram: int = 8,
) -> Drafting:
  """What followed a long match; elsewhere what the other drafter drafts."""
  chosen = drafter.siblings is IID and drafter.tree.is_chain
  if not drafter.foreign or not chosen or drafter.tree.lanes:
    raise ValueError(
      "repeats is around a chain of a drafter whose state is made of what was "
      f"committed (a head, layer_skip), got {drafter.name!r}"
    )
  if drafter.learning is not None or drafter.lengths:
    raise ValueError("repeats is not around online and ladder")
  if not 1 <= min_match <= max_ngram:
    raise ValueError(
      f"min_match must be in 1..max_ngram ({max_ngram}), got {min_match}"
    )
  if drafter.policy is not None and drafter.policy.learn is not None:
    raise ValueError(
      f"policy {drafter.policy.name!r} learns from rounds of the draft's own, "
      "and with repeats some are not"
    )
  own = drafter.tree.max_depth
  tokens = own if tokens is None else tokens
  if tokens < own:
    raise ValueError(f"tokens must be >= the other drafter's {own}")
  change: dict[str, Any] = {}
  if tokens > own:
    if not drafter.takes_policy or drafter.policy is not None:
      raise ValueError(
        "a longer chain is around what drafts token by token, without a policy"
      )
    change = dict(
      tree=tree_lib.chain(tokens),
      policy=policies.fixed(own),
      widths=(*drafter.widths, own + 1),
    )

  def make(of: Drafting, source: Any, vocab_size: int) -> Drafter:
    return drafters.repeats.drafter(
      drafter.make(of, source, vocab_size), least=min_match, max_ngram=max_ngram
    )

  return dataclasses.replace(drafter, make=make, learns=False, climbs=None,
                             takes_policy=False, **change)  # fmt: skip


def ladder(
  drafter: Drafting, *, lengths: tuple[int, ...] = LENGTHS
) -> Drafting:
  """Chains of several lengths; the host changes to the fastest by rounds."""
  check_lengths(lengths)
  if drafter.climbs is None:
    raise ValueError(
      "a ladder is of drafters whose state is the same for all lengths, got "
      f"{drafter.name!r}"
    )
  whole = drafter.tree.is_chain and drafter.siblings is IID
  if not whole or drafter.policy or drafter.widths or drafter.learning:
    raise ValueError(
      "a ladder is of chains that are drafted whole: without tree, siblings, "
      "policy, widths and online"
    )
  return dataclasses.replace(
    drafter, lengths=lengths, tree=tree_lib.chain(lengths[-1])
  )


def online(
  drafter: Drafting,
  *,
  rounds: int = 8,
  entries: int = 512,
  laws: int = 0,
  objective: str = "forward_kl",
  rate: float = 5e-5,
) -> Drafting:
  """A draft that learns while it decodes, at once in so many rounds."""
  if not drafter.learns or drafter.lengths:
    raise ValueError(
      "online learning is for drafts with parameters of their own (model, "
      f"eagle, eagle3), got {drafter.name!r}"
    )
  if getattr(drafter.policy, "head", ""):
    raise ValueError(
      "a draft that learns online changes what its policy's head was trained on"
    )
  if rounds < 1 or entries < 1 or laws < 0 or not 0 < rate < 1:
    raise ValueError(
      "rounds and entries must be >= 1, laws >= 0 and rate in (0, 1), got "
      f"{rounds}, {entries}, {laws} and {rate}"
    )
  losses.get(objective)
  return dataclasses.replace(
    drafter,
    learning=Learning(
      rounds=rounds, entries=entries, laws=laws, objective=objective, rate=rate
    ),
  )


def with_widths(drafter: Drafting, *tokens: int) -> Drafting:
  """Passes of the target of these widths too, where a draft ends early."""
  if not tokens or min(tokens) < 1:
    raise ValueError(f"widths must be >= 1, got {tokens}")
  return dataclasses.replace(drafter, widths=(*drafter.widths, *tokens))


def with_rule(drafter: Drafting, rule: Rule) -> Drafting:
  """Verified by this rule, in place of `config.rule`."""
  return dataclasses.replace(drafter, rule=rule.name)


_NESTED: dict[type, Grammar] = {
  Shape: TREES,
  Siblings: Grammar(
    kind="siblings", entries=siblings_lib.SIBLINGS | {GIVEN.name: GIVEN}
  ),
  Policy: POLICIES,
  Rule: RULES,
  Format: WEIGHTS,
}
DRAFTERS = Grammar(
  kind="drafter",
  entries={
    one.__name__: one
    for one in (
      plain, model, layer_skip, quantised_self, ngram, suffix, lookahead, rest,
      rasd, eagle, eagle3, mtp, medusa, blockwise, dflash, specdec, repeats,
      ladder, online, with_widths, with_rule,
    )
  },
  nested=_NESTED,
  own=Drafting,
)  # fmt: skip
_NESTED[Drafting] = DRAFTERS


# ------------------------------------------------------------ from a config


def of(config: Mapping[str, Any], written: Any = None) -> Drafting:
  """The way to draft that a config, or a text beside it, names.

  Args:
    config: for `drafter` and `checkpoints`.
    written: a text or `calls.Call`, in place of the config's.

  Raises:
    ValueError: as `Grammar.make`, or if a checkpoint is named nowhere.
  """
  written = config["drafter"] if written is None else written
  return with_checkpoint(DRAFTERS.make(written), config)


def with_checkpoint(found: Drafting, config: Mapping[str, Any]) -> Drafting:
  """The same with the config's checkpoint, if its call names none.

  Raises:
    ValueError: if the config names none either.
  """
  if found.drafts and found.needs_checkpoint and not found.checkpoint:
    known = config.get("checkpoints", {})
    path = known.get(found.name) or (
      "" if found.reads == "layers" else known.get("draft", "")
    )
    if not path:
      raise ValueError(
        f'drafter {found.name!r} needs a checkpoint: {found.name}("DIR"), or '
        f"config.checkpoints.{found.name}"
      )
    found = dataclasses.replace(found, checkpoint=path)
  return found


def canonical(config: Mapping[str, Any]) -> str:
  """The drafter of a config, as records have it."""
  return DRAFTERS.canonical(config["drafter"])


def with_tokens(drafting: Drafting, tokens: int) -> Drafting:
  """The same on one path of so many tokens; of none it drafts nothing."""
  return dataclasses.replace(drafting, tree=tree_lib.chain(tokens))


def recording(drafting: Drafting, tokens: int, *, width: int = 0) -> Drafting:
  """The same with drafts all so deep, and kept until the next round.

  Args:
    drafting: of chains that a policy could end.
    tokens: G.
    width: H, of the draft's hidden states that are kept too; 0 for none.

  Raises:
    ValueError: if no policy could.
  """
  if not drafting.takes_policy or not drafting.tree.is_chain:
    raise ValueError(
      "depths are decided for chains that are drafted token by token (model, "
      f"layer_skip, eagle, eagle3), got {drafting.name!r}"
    )
  return dataclasses.replace(
    with_tokens(drafting, tokens), policy=policies.recorded(width=width)
  )


def chain(name: str, path: str, tokens: int) -> Drafting:
  """One drawn path of the drafter of that name, of a checkpoint."""
  return DRAFTERS.make(Call(name, (path,), {"tokens": tokens}))


def holds_model(path: str) -> bool:
  """Whether a checkpoint is a model of its own."""
  return not head_checkpoints.is_head(path) and not block_networks.is_block(
    path
  )


def check_checkpoint(drafting: Drafting) -> None:
  """Raises ValueError if the checkpoint holds something else than is read."""
  path, wanted = drafting.checkpoint, drafting.reads
  if not path or wanted in ("", "layers"):
    return
  if head_checkpoints.is_head(path):
    there = "head"
  else:
    there = "block" if block_networks.is_block(path) else "model"
  names = {
    "head": "a head on the target's features",
    "block": "a block drafter",
    "model": "a model of its own",
  }
  if there != wanted:
    raise ValueError(
      f"drafter {drafting.name!r} reads {names[wanted]}, and {path} is "
      f"{names[there]}"
    )


def source(drafting: Drafting, models: Any) -> tuple[Any, Any]:
  """What drafts, and its parameters if it does not have the target's.

  Args:
    drafting: the way to draft.
    models: `launch.build.pair.Models` that were read for it.

  Raises:
    ValueError: if a head is of another kind.
  """
  policy = drafting.policy
  features = (FINAL,) if policy is not None and policy.width else ()
  if drafting.reads == "layers":
    skipped = drafting.skipped or layers.read(drafting.checkpoint)
    return models.target.functions(skipped, features), None
  if drafting.reads == "weights":
    low = models.draft
    return low.functions(SkippedLayers(), features), low.params
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
  corpus = retrieval.index(drafting.corpus, models) if drafting.corpus else None
  if drafting.reads == "model":
    functions = models.draft.functions(SkippedLayers(), features)
    if drafting.name != "rasd":
      return functions, models.draft.params
    return functions, Parts(model=models.draft.params, corpus=corpus)
  return None, corpus


def make(drafting: Drafting, drafts: Any, vocab_size: int) -> Drafter:
  """The drafter; see `source` for what drafts."""
  return drafting.make(drafting, drafts, vocab_size)


def rungs(
  drafting: Drafting,
  target: LanguageModel,
  drafts: Any,
  *,
  rule: Rule,
  vocab_size: int,
) -> Rungs:
  """The decoders of a ladder; see `source` for what drafts."""
  return make_rungs(
    target,
    lambda tree: make(
      dataclasses.replace(drafting, tree=tree), drafts, vocab_size
    ),
    rule=rule,
    vocab_size=vocab_size,
    lengths=drafting.lengths,
  )


def pass_widths(drafting: Drafting, tree: Tree) -> tuple[int, ...]:
  """Tokens of the target's narrower passes that a tree's rounds can have."""
  return widths.within(drafting.widths, tree)


def help_table() -> list[tuple[str, str]]:
  """Drafters, trees and so on as they are written, and what they are."""
  return [
    row
    for grammar in (DRAFTERS, TREES, POLICIES, WEIGHTS)
    for row in grammar.help()
  ]
