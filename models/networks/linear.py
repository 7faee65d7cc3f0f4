"""Linear projections with weights `[outputs, inputs]`, as files have them."""

import math

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

_FEW = 64  # rows of x


def project(x: Array, weight: Array, result=None) -> Array:
  """Products of x and every row of a weight, `[..., D], [N, D] -> [..., N]`.

  Both are contracted as they lie, over their last axes. On XLA:CPU several rows
  of x are multiplied in fours from the right: with the weight as first operand,
  and a barrier that keeps the simplifier from turning it round, a product of
  two to eight rows takes about two thirds of the time. With hundreds of rows
  and a vocabulary it takes up to twice the time, so these are left as they lie.
  An embedding that is transposed first (`nnx.Embed.attend`) is read in a loop
  that computes x's norm anew for every row, whenever x is one token.

  Args:
    x: what is projected.
    weight: of the same type.
    result: type of the products, in which they are added up; by default x's.
  """

  def x_first(x, weight):
    return lax.dot_general(
      x,
      weight,
      (((x.ndim - 1,), (1,)), ((), ())),
      preferred_element_type=result,
    )

  def weight_first(x, weight):
    rows = x.reshape(-1, x.shape[-1])
    fours = jnp.pad(rows, ((0, -len(rows) % 4), (0, 0)))
    y = lax.optimization_barrier(x_first(weight, fours))
    return y.T[: len(rows)].reshape(*x.shape[:-1], len(weight))

  if not 1 < math.prod(x.shape[:-1]) <= _FEW:
    return x_first(x, weight)
  return lax.platform_dependent(x, weight, cpu=weight_first, default=x_first)


class Linear(nnx.Module):
  """A projection whose weight lies as files have it, a row for each output.

  Attributes:
    weight: `[n_out, n_in]`, or the other way round where `inputs_first`.
    inputs_first: see `turn`.

  Args:
    n_in, n_out: channels.
    bias: whether there is one, zero at first.
    dtype: of parameters and result.
    rngs: for the initial weight.
    std: the standard deviation of its normal law.
  """

  def __init__(
    self, n_in: int, n_out: int, bias: bool, dtype, rngs: nnx.Rngs, std=0.02
  ):
    self.dtype = jnp.dtype(dtype)
    init = nnx.initializers.normal(std)
    self.weight = nnx.Param(init(rngs.params(), (n_out, n_in), self.dtype))
    self.bias = nnx.Param(jnp.zeros(n_out, self.dtype)) if bias else None
    self.inputs_first = False

  @property
  def rows(self) -> Array:
    """The weight as files have it."""
    weight = self.weight[...]
    return weight.T if self.inputs_first else weight

  def __call__(self, x: Array) -> Array:
    """`[..., n_in] -> [..., n_out]`."""
    x, weight = x.astype(self.dtype), self.weight[...].astype(self.dtype)
    y = x @ weight if self.inputs_first else project(x, weight)
    return y if self.bias is None else y + self.bias[...].astype(self.dtype)


def turn(module: nnx.Module) -> None:
  """Lays the weights of a module's projections inputs first, in place.

  For XLA:CPU: a product of five rows, as SmolLM2 has them, takes 0.8 to 0.9 of
  the time that `project` does, and of one row 2 to 5% more.
  """
  for _, node in list(nnx.iter_modules(module)):
    for name, child in vars(node).items():
      if name == "kv_b":  # of latents, whose halves queries and sums read
        continue
      if isinstance(child, Linear) and not child.inputs_first:
        child.weight = nnx.Param(child.weight[...].T)
        child.inputs_first = True
