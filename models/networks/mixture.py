"""Mixtures of experts: feed-forward layers that route each token to a few.

A router chooses k of E experts for a token and weights them. Experts have no
capacity and no token is dropped, so a token's output depends on that token
only. `Mixture` covers Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, gpt-oss, GLM-4.5,
DeepSeek-V3 and Gemma 4.

Letters in shapes: B rows, T fed tokens, N all tokens, D model width, E experts,
k experts of a token, M = N k pairs, I an expert's width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from models.networks import expert_forms

_LANES = 128  # of a TPU's vector registers
# Activations of gates, here and in dense blocks.
ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu": functools.partial(jax.nn.gelu, approximate=False),
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
  "relu": jax.nn.relu,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
  """Shapes and switches of a mixture of experts.

  Attributes:
    num_experts: E.
    num_chosen: k.
    embed_dim: D.
    expert_dim: I.
    router: "softmax" over all experts, or "sigmoid" per expert, with a
      correction bias for the choice but not for the weights (DeepSeek-V3,
      GLM-4.5).
    renormalized: whether the weights of the chosen experts add up to 1, false
      in releases of Qwen2-MoE and OLMoE. With a softmax this is a softmax over
      the chosen experts, as in gpt-oss and Mixtral.
    router_bias: whether the router's logits have a bias (gpt-oss).
    num_groups: number of groups of experts, for `sigmoid`.
    num_groups_kept: number of groups to choose experts from: those with the
      highest sum of their two best experts.
    scale: factor of all weights (`routed_scaling_factor`).
    router_norm_eps: for Gemma 4's router, which RMS-normalizes its own input,
      multiplies it by a `scale` parameter and D^-1/2, and multiplies weights by
      a parameter per expert. None for other routers.
    activation: "silu", "gelu" (exact), "gelu_tanh" or "relu".
    limit: for gpt-oss's activation instead, `min(g, limit) * sigmoid(slope * g)
      * (clip(u, -limit, limit) + 1)` of gate g and up projection u.
    slope: slope of its sigmoid.
    expert_bias: whether experts' projections have biases (gpt-oss).
    shared_dim: width of the shared expert; 0 for none.
    shared_gate: whether that has a sigmoid gate (Qwen2-MoE).
  """

  num_experts: int
  num_chosen: int
  embed_dim: int
  expert_dim: int
  router: str = "softmax"
  renormalized: bool = True
  router_bias: bool = False
  num_groups: int = 1
  num_groups_kept: int = 1
  scale: float = 1.0
  router_norm_eps: float | None = None
  activation: str = "silu"
  limit: float | None = None
  slope: float = 1.702
  expert_bias: bool = False
  shared_dim: int = 0
  shared_gate: bool = False

  def __post_init__(self):
    most = self.num_groups_kept * (self.num_experts // self.num_groups)
    if not 1 <= self.num_chosen <= most:
      raise ValueError(
        f"num_chosen must be in 1..{most}, the eligible experts, got "
        f"{self.num_chosen}"
      )

  @property
  def num_expert_params(self) -> int:
    """Number of parameters of one expert."""
    biases = 2 * self.expert_dim + self.embed_dim if self.expert_bias else 0
    return 3 * self.embed_dim * self.expert_dim + biases


def activate(mixture: Mixture, gate: Array, up: Array) -> Array:
  """Input of an expert's down projection, from its gate and up projections."""
  if mixture.limit is None:
    return ACTIVATIONS[mixture.activation](gate) * up
  gate = jnp.minimum(gate, mixture.limit)
  up = jnp.clip(up, -mixture.limit, mixture.limit)
  return gate * jax.nn.sigmoid(mixture.slope * gate) * (up + 1)


def _param(shape, dtype, rngs: nnx.Rngs) -> nnx.Param:
  init = nnx.initializers.normal(0.02)
  return nnx.Param(init(rngs.params(), shape, dtype))


class Router(nnx.Module):
  """Chooses experts, in float32 (float64 for float64 inputs)."""

  def __init__(self, mixture: Mixture, dtype, *, rngs: nnx.Rngs):
    m = self.mixture = mixture
    self.weight = _param((m.num_experts, m.embed_dim), dtype, rngs)
    if m.router_bias:
      self.bias = nnx.Param(jnp.zeros(m.num_experts, dtype))
    if m.router == "sigmoid":  # float32 in every checkpoint
      self.correction = nnx.Param(jnp.zeros(m.num_experts, jnp.float32))
    if m.router_norm_eps is not None:
      self.scale = nnx.Param(jnp.ones(m.embed_dim, dtype))
      self.expert_scale = nnx.Param(jnp.ones(m.num_experts, dtype))

  def __call__(self, x: Array) -> tuple[Array, Array]:
    """Chosen experts and their weights, `[N, D] -> i32[N, k], f32[N, k]`.

    The best expert comes first; ties go to the lower index.
    """
    m = self.mixture
    wide = jnp.promote_types(x.dtype, jnp.float32)
    x = x.astype(wide)
    if m.router_norm_eps is not None:
      mean = jnp.mean(x * x, axis=-1, keepdims=True)
      x = x * lax.rsqrt(mean + m.router_norm_eps)
      x = x * self.scale[...].astype(wide) * m.embed_dim**-0.5
    logits = jnp.einsum(
      "nd,ed->ne",
      x,
      self.weight[...].astype(wide),
      precision=lax.Precision.HIGHEST,
    )
    if m.router_bias:
      logits += self.bias[...].astype(wide)
    if m.router == "sigmoid":
      scores = jax.nn.sigmoid(logits)
      _, chosen = lax.top_k(self._allowed(scores), m.num_chosen)
      weights = jnp.take_along_axis(scores, chosen, axis=-1)
      if m.renormalized:
        weights /= weights.sum(-1, keepdims=True) + 1e-20
    else:
      best, chosen = lax.top_k(logits, m.num_chosen)
      over = best if m.renormalized else logits
      total = jax.nn.logsumexp(over, axis=-1, keepdims=True)
      weights = jnp.exp(best - total)
    if m.router_norm_eps is not None:
      weights *= self.expert_scale[...].astype(wide)[chosen]
    return chosen, weights * m.scale

  def _allowed(self, scores: Array) -> Array:
    """Scores for choosing experts, -inf outside the kept groups."""
    m = self.mixture
    by = scores + self.correction[...].astype(scores.dtype)
    if m.num_groups == 1:
      return by
    grouped = by.reshape(len(by), m.num_groups, -1)
    worth = lax.top_k(grouped, 2)[0].sum(-1)
    _, kept = lax.top_k(worth, m.num_groups_kept)
    keep = jnp.zeros(worth.shape, bool)
    keep = jax.vmap(lambda row, at: row.at[at].set(True))(keep, kept)
    return jnp.where(keep[..., None], grouped, -jnp.inf).reshape(by.shape)


class Experts(nnx.Module):
  """The projections of E experts, each `[E, in, out]`.

  In this layout ragged products read them in place; from `[E, out, in]` XLA:TPU
  copies all experts in every pass. They may be `QuantizedTensor`s.

  Args:
    mixture: shapes and switches.
    dtype: dtype of parameters.
    axes: mesh axes that the experts are distributed over, if split by expert.
    rngs: for the initial weights.
  """

  form: str | None = None  # of `expert_forms.FORMS`; None: by backend

  def __init__(
    self, mixture: Mixture, dtype, *, axes: tuple[str, ...] = (), rngs: nnx.Rngs
  ):
    m = self.mixture = mixture
    self.axes = axes
    count, outer, inner = m.num_experts, m.embed_dim, m.expert_dim
    self.gate = _param((count, outer, inner), dtype, rngs)
    self.up = _param((count, outer, inner), dtype, rngs)
    self.down = _param((count, inner, outer), dtype, rngs)
    if m.expert_bias:
      self.gate_bias = nnx.Param(jnp.zeros((count, inner), dtype))
      self.up_bias = nnx.Param(jnp.zeros((count, inner), dtype))
      self.down_bias = nnx.Param(jnp.zeros((count, outer), dtype))

  def __call__(
    self, x: Array, chosen: Array, weights: Array, layer: Array | None = None
  ) -> Array:
    """The weighted sum of the outputs of each token's experts.

    Args:
      x: `[N, D]`.
      chosen, weights: from the router.
      layer: `i32[]`, index of the layer, if the parameters are those of all
        layers, with a leading axis.

    Returns:
      `[N, D]`, in x's dtype, summed in float32 in the router's order.
    """
    arrays = {
      name + of: getattr(self, name + of)[...]
      for of in ("", "_bias")
      for name in ("gate", "up", "down")
      if hasattr(self, name + of)
    }
    outputs = functools.partial(
      expert_forms.outputs, functools.partial(activate, self.mixture),
      self.mixture.num_experts, form=self.form,
    )  # fmt: skip
    if not self.axes or jax.sharding.get_abstract_mesh().empty:
      return outputs(arrays, x, chosen, weights, 0, layer).astype(x.dtype)

    def part(arrays, x, chosen, weights, layer):
      first = lax.axis_index(self.axes) * arrays["gate"].shape[-3]
      mine = outputs(arrays, x, chosen, weights, first, layer)
      return lax.psum(mine, self.axes)

    total = jax.shard_map(
      part,
      in_specs=(
        P(self.axes) if layer is None else P(None, self.axes),
        *4 * (P(),),
      ),
      out_specs=P(),
      axis_names={*self.axes},
      check_vma=False,
    )(arrays, x, chosen, weights, layer)
    return total.astype(x.dtype)


class SharedExpert(nnx.Module):
  """The expert that all tokens use; projections are `[out, in]`."""

  def __init__(self, mixture: Mixture, dtype, *, rngs: nnx.Rngs):
    m = self.mixture = mixture
    self.gate = _param((m.shared_dim, m.embed_dim), dtype, rngs)
    self.up = _param((m.shared_dim, m.embed_dim), dtype, rngs)
    self.down = _param((m.embed_dim, m.shared_dim), dtype, rngs)
    if m.shared_gate:
      self.weigh = _param((1, m.embed_dim), dtype, rngs)

  def __call__(self, x: Array) -> Array:
    """`[N, D] -> [N, D]`."""
    project = lambda x, w: jnp.einsum("nk,mk->nm", x, w[...])
    inner = activate(self.mixture, project(x, self.gate), project(x, self.up))
    out = project(inner, self.down)
    if self.mixture.shared_gate:
      out = jax.nn.sigmoid(project(x, self.weigh)) * out
    return out


class MixtureMlp(nnx.Module):
  """Router, experts and shared expert, instead of an MLP.

  Args:
    mixture: shapes and switches.
    dtype: dtype of parameters and activations.
    axes: mesh axes that the experts are distributed over, if split by expert
      (`cut_by`); ignored without a mesh.
    rngs: for the initial weights.
  """

  def __init__(
    self, mixture: Mixture, dtype, *, axes: tuple[str, ...] = (), rngs: nnx.Rngs
  ):
    self.mixture = mixture
    self.router = Router(mixture, dtype, rngs=rngs)
    self.experts = Experts(mixture, dtype, axes=axes, rngs=rngs)
    if mixture.shared_dim:
      self.shared = SharedExpert(mixture, dtype, rngs=rngs)

  def __call__(
    self,
    x: Array,
    *,
    routed_by: Array | None = None,
    layer: Array | None = None,
  ) -> Array:
    """`[B, T, D] -> [B, T, D]`.

    Args:
      x: the experts' input.
      routed_by: `[B, T, D]`, the router's input, if different (Gemma 4's
        residual stream).
      layer: `i32[]`, index of the layer, if `experts` has the parameters of all
        layers, with a leading axis (unlike router and shared expert).
    """
    flat = x.reshape(-1, x.shape[-1])
    read = flat if routed_by is None else routed_by.reshape(flat.shape)
    out = self.experts(flat, *self.router(read), layer)
    if self.mixture.shared_dim:
      out = out + self.shared(flat)
    return out.reshape(x.shape)


def cut_by(mixture: Mixture, devices: int) -> str:
  """How to split experts over devices: by "width" or by "expert".

  By width, each device has a share of every expert, and all have the same work
  however tokens are routed. This is used if shares are multiples of a TPU's 128
  lanes; otherwise XLA:TPU copies all experts in every pass. By expert, each
  device has some whole experts, and the one with the most pairs determines the
  time. Raises ValueError if neither divides evenly.
  """
  if devices == 1 or mixture.expert_dim % (_LANES * devices) == 0:
    return "width"
  if mixture.num_experts % devices == 0:
    return "expert"
  if mixture.expert_dim % devices == 0:
    return "width"
  raise ValueError(
    f"{mixture.num_experts} experts of width {mixture.expert_dim} cannot be "
    f"cut over {devices} devices: use fewer for the model"
  )


def partition_specs(
  by: str, axes: tuple[str, ...] = ("model",)
) -> dict[str, P]:
  """Partition specs of the parameters of a `MixtureMlp`, by name.

  Parameters without a spec are replicated. If split by expert, give the module
  the same `axes`: otherwise the partitioner gathers all experts before every
  product.

  Args:
    by: "width" or "expert", see `cut_by`. The shared expert is split by width.
    axes: the mesh axes to split over.
  """
  cut = axes or None
  names = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
  if by == "expert":
    experts = {name: P(cut) for name in names}
  else:
    inner, wide = P(None, None, cut), P(None, cut)
    experts = {"gate": inner, "up": inner, "down": P(None, cut, None)}
    experts |= {"gate_bias": wide, "up_bias": wide}
  return {f"experts.{name}": spec for name, spec in experts.items()} | {
    "shared.gate": P(cut, None),
    "shared.up": P(cut, None),
    "shared.down": P(None, cut),
  }
