"""Core types: models, drafts, rules and drafters (draft heads are in `heads`).

Letters in shapes: B rows, T fed tokens, S cache slots, L token-buffer length,
N drafted nodes of the tree (N + 1 with the root), G its depth, E lanes, F =
N + 1 + E tokens fed to the target in a round, V vocabulary size.
All distributions are float32 log-probabilities (float64 when x64 is enabled and
the inputs are), with -inf for zero mass.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from specjax import cache as cache_lib
from specjax import random
from specjax.cache import Cache
from specjax.heads import BlockModel as BlockModel
from specjax.heads import CacheReader as CacheReader
from specjax.heads import FeatureModel as FeatureModel
from specjax.heads import MarginalModel as MarginalModel
from specjax.heads import MarkovModel as MarkovModel
from specjax.heads import TextBlockModel as TextBlockModel
from specjax.siblings import Siblings
from specjax.structs import static, struct
from specjax.tree import Topology, Tree, data_topology, fixed_topology

# ---------------------------------------------------------------- the models


@struct
class ModelOutput:
  """Output of a model for T fed tokens.

  Attributes:
    logits: `f32[B, T, V]`, for the token after each fed one; or `f32[B, W, V]`,
      only those requested by `logits_at`.
    features: `f[B, T, D]`, hidden states for a drafter, as chosen when the
      model is built, or None.
  """

  logits: Array
  features: Array | None = None


@struct
class Inputs:
  """A batch of encoder inputs.

  Attributes:
    tokens: `i32[B, W]`, right-padded with any ids.
    lengths: `i32[B]` in 1..W.
  """

  tokens: Array
  lengths: Array


class ApplyFn(Protocol):
  """Signature of `LanguageModel.apply`."""

  def __call__(
    self,
    params: Any,
    tokens: Array,
    cache: Cache,
    *,
    positions: Array | None = None,
    mask: np.ndarray | Array | None = None,
    logits_at: Array | None = None,
  ) -> tuple[ModelOutput, Cache]:
    """Feeds T tokens into slots `cache.length .. cache.length + T - 1`.

    Args:
      params: the model's parameters, any pytree.
      tokens: `i32[B, T]`.
      cache: from `init_cache`; slots at or beyond its length are stale.
      positions: `i32[B, T]`, by default `cache.length + arange(T)`.
      mask: `bool[T, M]`, static, or `bool[B, T, M]`, M >= T: which of the last
        M slots (ending with the T-th fed token) each fed token sees; all slots
        before those are visible. None means a causal chain. `bool[B, T, M]` may
        begin before slot 0; columns there must be ignored.
      logits_at: `i32[B, W]`, indices of tokens whose logits to return; None for
        all. Prompts are fed with W = 0: their logits may be the largest array.

    Returns:
      The output, and the cache with its length increased by T. A token's logits
      depend only on visible slots, even if an invisible one holds NaN
      (`specjax.cache.contain`).
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel:
  """A causal model as two pure functions.

  Attributes:
    vocab_size: V, the last axis of the logits.
    init_cache: `(batch, slots) -> Cache`.
    apply: see `ApplyFn`.
    encode: `(params, inputs) -> context`, for encoder-decoders (text inputs are
      `Inputs`): arrays with rows first, kept in `Cache.context`.
    max_positions: how many positions the model supports; None if unbounded.
      Prompts and completions stay within them; drafted nodes may go beyond.
    takes_rows: whether `apply` accesses keys and values only through
      `write_rows` and `read_rows`. They may then be a few rows of a larger
      cache (`specjax.cache.RowsView`), and prefill works in place.
    has_states: whether its cache holds recurrent states (`Cache.recurrent`),
      which can be rolled back only over the last pass.
  """

  vocab_size: int
  init_cache: Callable[[int, int], Cache]
  apply: ApplyFn
  encode: Callable[[Any, Any], Any] | None = None
  max_positions: int | None = None
  takes_rows: bool = False
  has_states: bool = False

  def new_cache(
    self, params: Any, batch: int, slots: int, inputs: Any = None
  ) -> Cache:
    """An empty cache, holding the encoded inputs if there are any.

    Raises:
      ValueError: for inputs without an encoder, or an encoder without inputs.
    """
    cache = self.init_cache(batch, slots)
    if (self.encode is None) != (inputs is None):
      raise ValueError(
        f"a model with{'out' if self.encode is None else ''} an encoder was "
        f"given {'no' if inputs is None else 'some'} inputs"
      )
    if self.encode is None:
      return cache
    return cache.replace(context=self.encode(params, inputs))


@struct
class Params:
  """Parameters of target and draft: the first argument of jitted functions.

  Attributes:
    target: the target model's parameters.
    draft: the drafter's own parameters, or None if it has none.
  """

  target: Any
  draft: Any = None


# ------------------------------------------------------------------- sampling


@struct
class Penalties:
  """Penalties and biases on the target's logits, per row; all traced.

  See `specjax.penalties`; K and S are static, `penalties.NONE` is padding.

  Attributes:
    presence: `f32[B]`, subtracted from the logits of emitted tokens.
    frequency: `f32[B]`, subtracted once for each time a token was emitted.
    repetition: `f32[B]`, above 0; divides positive logits of tokens that occur
      in the prompt or completion, and multiplies negative ones.
    bias_tokens, bias: `i32[B, K]`, `f32[B, K]`, added to those tokens' logits.
    min_tokens: `i32[B]`, tokens to emit before a stop token is allowed.
    stop_tokens: `i32[B, S]`, this row's own stop ids, besides the shared ones.
  """

  presence: Array
  frequency: Array
  repetition: Array
  bias_tokens: Array
  bias: Array
  min_tokens: Array
  stop_tokens: Array


@struct
class Sampling:
  """Settings of the warp from logits to distributions, per row; all traced.

  Attributes:
    temperature: `f32[B]`; 0 is greedy.
    top_k: `i32[B]`; 0 keeps all tokens. None leaves this truncation, and its
      sort of the vocabulary, out of the program; likewise below.
    top_p: `f32[B]` in (0, 1]; 1 keeps all tokens. Or None.
    min_p: `f32[B]` in [0, 1]; 0 keeps all tokens. Or None.
    penalties: applied to the logits first. None leaves them out of the program.
  """

  temperature: Array
  top_k: Array | None
  top_p: Array | None
  min_p: Array | None
  penalties: Penalties | None = None


@struct
class Draft:
  """A proposed token tree and the distributions it was sampled from.

  Attributes:
    tree: the static part of its shape.
    siblings: how the children of a node were drawn (static).
    tokens: `i32[B, F]`; node 0 is the last committed token, nodes 1..N are
      drafted, the E lanes come last.
    log_probs: `f32[B, N + 1, V]`; row n is the distribution that token n itself
      was drawn from, given the tokens drawn before it. Entry 0 and those of
      masked nodes are ignored. A NaN ends its batch row with NAN_LOGITS
      (drafters draw from `specjax.distributions.replace_nans`). None means that
      every token is a function of what was known before the round.
    parents: `i32[B, F]`, the index of each token's parent, smaller than its
      own; -1 for the root and for masked nodes. None exactly if the tree's
      form is `FIXED`.
    noise: `f32[B, K, G + 1, V]`, Gumbel noise that the rule reuses, only for
      siblings `with_noise`: token t of path k is `argmax(log p +
      noise[:, k, t - 1])`. Entry G is for the token after the last drafted one.
  """

  tree: Tree = static()
  siblings: Siblings = static()
  tokens: Array
  log_probs: Array | None
  parents: Array | None = None
  noise: Array | None = None

  def topology(self, max_depth: Array | None = None) -> Topology:
    """The tree as arrays; NumPy constants where the form is `FIXED`.

    Args:
      max_depth: `i32[B]`; deeper nodes count as masked, unless the form is
        `FIXED`: such a tree is always drafted in full.
    """
    if self.parents is None:
      return fixed_topology(self.tree)
    return data_topology(self.tree, self.parents, max_depth)

  def distributions(self, like: Array) -> Array:
    """The distribution of each node; a point mass if drafts are deterministic.

    Args:
      like: `f32[B, N + 1, V]`, for its vocabulary and dtype.

    Returns:
      `f32[B, N + 1, V]` log-probabilities.
    """
    if self.log_probs is not None:
      return self.log_probs
    here = self.tokens[:, : self.tree.num_nodes, None]
    point = here == jnp.arange(like.shape[-1])
    return jnp.where(point, 0, -jnp.inf).astype(like.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
  """A rule's result for a draft: distributions that the loop draws from.

  Attributes:
    node_probs: `f32[B, N + 1]`, the probability that node n is the deepest
      accepted node; rows sum to 1.
    next_log_probs: `i32[B] -> f32[B, V]`, the distribution of the token after
      node n, given that node n is the deepest accepted one. Where that has
      probability 0 it may be anything but NaN.
    total_variation: `f32[B, N + 1]`, the exact total variation between the
      target's distribution and that of the token after node n (over drafts and
      random draws), given that the walk reached n. None if the rule is lossless
      or does not report it.
  """

  node_probs: Array
  next_log_probs: Callable[[Array], Array]
  total_variation: Array | None = None


class VerifyFn(Protocol):
  """Signature of `Rule.verify`."""

  def __call__(
    self, draft: Draft, topology: Topology, target_log_probs: Array
  ) -> Verification:
    """Verifies a draft deterministically.

    Args:
      draft: tokens, and the distributions they were drawn from.
      topology: the tree as arrays, `draft.topology()`.
      target_log_probs: `f32[B, N + 1, V]`, the warped target's distribution of
        the token after each node.

    Returns:
      The `Verification`.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
  """A verification rule.

  Attributes:
    name: as given to `specjax.rules.get`, with its parameters.
    verify: see `VerifyFn`.
    lossless: whether the output distribution is exactly the warped target's.
    check: `(tree, siblings) -> None`; raises ValueError for trees or siblings
      that the rule does not support, saying what it expects.
    with_noise: whether it verifies drafts that carry noise.
  """

  name: str
  verify: VerifyFn
  lossless: bool
  check: Callable[[Tree, Siblings], None]
  with_noise: bool = False


# ---------------------------------------------------------------- the drafter


# `(numbers f32[B, n, 2], nodes, log_probs f32[B, n, V]) -> i32[B, n]`.
DrawFn = Callable[[Array, ArrayLike | Sequence[int], Array], Array]


def pick_nodes(
  numbers: Array, nodes: ArrayLike | Sequence[int], log_probs: Array
) -> Array:
  """Draws each node's token from its distribution (`specjax.random.pick`)."""
  del nodes
  return random.pick(numbers, log_probs)


@struct
class Context:
  """What a drafter may use to propose a draft.

  Attributes:
    tokens: `i32[B, L]`, prompt and completion so far; stale from `length` on.
    length: `i32[B]`, at least 1.
    max_depth: `i32[B]`, how deep each row may draft, in 0..G; 0 for rows that
      are done. Deeper nodes are masked unless the tree is `FIXED`; a drafter
      need not compute them.
    sampling: the warp; the draft must be sampled from the warped distribution.
    keys: `key[B]`, fresh for this round.
    row_keys: `key[B]`, the same in every round, for noise tied to positions.
    numbers: `f[B, N, 2]`, random numbers for drawing nodes 1..N.
    draws: draws the tokens (static); `specjax.exact` replaces it.
  """

  tokens: Array
  length: Array
  max_depth: Array
  sampling: Sampling
  keys: Array
  row_keys: Array
  numbers: Array
  draws: DrawFn = dataclasses.field(
    default=pick_nodes, metadata={"static": True}
  )

  @property
  def root(self) -> Array:
    """`i32[B, 1]`, the last committed token: node 0."""
    newest = self.length[:, None] - 1
    return jnp.take_along_axis(self.tokens, newest, axis=1)

  def draw(self, nodes: ArrayLike | Sequence[int], log_probs: Array) -> Array:
    """Draws tokens; drafts drawn only here can be enumerated (`specjax.exact`).

    Args:
      nodes: indices of drafted nodes, n of them.
      log_probs: `f32[B, n, V]`.

    Returns:
      `i32[B, n]`.
    """
    if isinstance(nodes, range):
      numbers = self.numbers[:, nodes.start - 1 : nodes.stop - 1]
    else:
      numbers = self.numbers[:, jnp.asarray(nodes) - 1]
    dtype = jnp.promote_types(log_probs.dtype, jnp.float32)
    return self.draws(numbers.astype(dtype), nodes, log_probs)


@struct
class Commit:
  """Tokens fed in prefill or a round, and which of them were committed.

  Of a prompt these are all tokens but the newest: the newest committed token
  never counts as fed, since it is fed again as the next round's root.

  Attributes:
    tokens: `i32[B, T]`, the fed tokens: the prompt, or the draft's F tokens.
    start: `i32[B]`, the slot of the first of them.
    path: `i32[B, W]`, indices of the committed ones, in order; entries from
      `count` on are any valid indices.
    length: `i32[B]`, the number of committed tokens now.
    target_output: the target's output at all T tokens; for prompts, logits may
      be missing.
    num_refed: `i32[B]`, how many committed tokens were fed again because a text
      was extended, for drafts whose caches lack the last of them.
    newest: `i32[B]`, the newest committed token.
    target_log_probs: `f32[B, N + 1, V]`, the warped target's distributions in a
      round; None for a prompt.
  """

  tokens: Array
  start: Array
  path: Array
  length: Array
  newest: Array
  target_output: ModelOutput
  num_refed: Array
  target_log_probs: Array | None = None

  @property
  def count(self) -> Array:
    """`i32[B]`, number of committed fed tokens, in slots `start ..`."""
    return self.length - 1 - self.start

  def next_tokens(self) -> Array:
    """`i32[B, W]`, the token after each committed one, ending in the newest."""
    along = jnp.take_along_axis(self.tokens, self.path, axis=1)
    last = jnp.maximum(self.count - 1, 0)[:, None]
    return jnp.where(
      np.arange(along.shape[1]) == last,
      self.newest[:, None],
      jnp.roll(along, -1, axis=1),
    )

  def features(self, width: int) -> Array:
    """The target's features of all fed tokens, `f[B, T, F]` with F = `width`.

    Raises:
      ValueError: if the target returns features of another width.
    """
    features = self.target_output.features
    if features is None or features.shape[-1] != width:
      given = "none" if features is None else str(features.shape[-1])
      raise ValueError(
        f"the draft needs {width} features of the target, got {given} "
        "(build the target with features=)"
      )
    return features

  def newest_features(self, previous: Array) -> Array:
    """Features of the newest token both fed and committed, else `previous`."""
    features = self.features(previous.shape[-1])
    last = jnp.maximum(self.count - 1, 0)[:, None]
    node = jnp.take_along_axis(self.path, last, axis=1)[..., None]
    newest = jnp.take_along_axis(features, node, axis=1)[:, 0]
    committed = self.count[:, None] > 0
    return jnp.where(committed, newest.astype(previous.dtype), previous)


def no_state(params, batch, slots, inputs):
  """The `init` of a drafter without state."""
  del params, batch, slots, inputs
  return ()


def keep(params, state, commit):
  """The `prefill` and `commit` of a drafter that ignores them."""
  del params, commit
  return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafter:
  """A drafter: pure functions and static facts.

  Attributes:
    name: for messages and reports.
    tree: the form of every draft.
    siblings: how children of a node are drawn.
    propose: `(params, state, target_cache, context) -> (Draft, state,
      target_cache)`. A drafter that runs on the target's own cache may write
      to slots at or beyond `context.length - 1`; all others pass it through.
    init: `(params, batch, slots, inputs) -> state`; `inputs` are the encoder's,
      None for decoder-only models. By default there is no state.
    prefill, commit: `(params, state, Commit) -> state`, after the target's pass
      over a prompt or an extension of it, and after verification.
    passes: tokens per row in each draft pass of a round, in order: the cost of
      drafting. Empty if no model drafts.
    reads_text: whether each pass also recomputes the row's whole text.
    max_positions: positions the draft supports; None if unbounded.
    num_refed: how many tokens to feed again when a row is extended
      (`Decoder.extend`), at most 2 G + 2: the newest, which was not fed, and
      those before it that the drafter's state may lack.
    accepts_foreign_drafts: whether its state depends only on the committed
      tokens of a round, so that another draft, or none, may be verified instead
      of its own (`specjax.drafters.repeats`, `specjax.adaptive.ladder`).
    catches_up: whether `propose` first feeds the tokens that its state lacks,
      for example after rounds in which it did not draft.
    row_axes: `state -> pytree of int | None`: the row axis of each array of the
      state. None for an array shared by all rows: a round's additions to it are
      summed over devices. The default is for states made of `Cache`s.
    has_states: whether its caches hold recurrent states, as in `LanguageModel`.
  """

  name: str
  tree: Tree
  siblings: Siblings
  propose: Callable[[Params, Any, Cache, Context], tuple[Draft, Any, Cache]]
  init: Callable[[Params, int, int, Any], Any] = no_state
  prefill: Callable[[Params, Any, Commit], Any] = keep
  commit: Callable[[Params, Any, Commit], Any] = keep
  row_axes: Callable[[Any], Any] = cache_lib.row_axes
  passes: tuple[int, ...] = ()
  reads_text: bool = False
  max_positions: int | None = None
  num_refed: int = 2
  accepts_foreign_drafts: bool = False
  catches_up: bool = False
  has_states: bool = False

  def tokens_of_passes(self, text: int) -> tuple[int, ...]:
    """Tokens per row that each draft pass of a round computes, in order.

    With `reads_text` these include all `text` tokens of the row's buffer.
    """
    more = text if self.reads_text else 0
    return tuple(fed + more for fed in self.passes)
