"""Outputs of chosen experts, in two forms that compute the same function.

  ragged  sorts the (token, expert) pairs by expert and uses `lax.ragged_dot`:
          for accelerators, which then compute only the chosen experts;
  pairs   computes one pair after another: for CPUs, where XLA expands a ragged
          product into a dense one over all E experts for each pair.

A token's output has the same bits wherever it is in a pass and whatever is
beside it (tested on a CPU). In passes over any number of tokens, `pairs`
gives the same bits; `ragged`, like any matrix product, may sum in another order
for another number.

Both take the projections of E' experts, `first, first + 1, ..` out of E, and
pairs of other experts add 0: a device may hold only some experts. Projections
may be those of all layers, one of which is used: slicing out a layer would copy
all its experts in every pass.
Letters as in `models.networks.mixture`.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

from models.networks.quantized_tensor import QuantizedTensor

# "gate", "up", "down", f[E', in, out], possibly quantized; "gate_bias", ..,
# f[E', out], if any; all may have a leading axis of layers.
Arrays = Mapping[str, Array | QuantizedTensor]


def outputs(
  activate: Callable[[Array, Array], Array],
  num_experts: int,
  arrays: Arrays,
  x: Array,
  chosen: Array,
  weights: Array,
  first: Array | int = 0,
  index: Array | None = None,
  *,
  form: str | None = None,
) -> Array:
  """The weighted sum of the outputs of each token's experts, `f32[N, D]`.

  Args:
    activate: `(gate, up) -> hidden`, the input of the down projection.
    num_experts: E.
    arrays: arrays of experts `first, first + 1, ..`.
    x: `[N, D]`.
    chosen: `i32[N, k]`.
    weights: `f32[N, k]`.
    first: `i32[]`.
    index: `i32[]`, the layer, if arrays are of all layers.
    form: one of FORMS; by default `pairs` on a CPU, else `ragged`.
  """
  if index is None:
    arrays = {name: array[None] for name, array in arrays.items()}
    index = jnp.int32(0)
  given = (arrays, x, chosen, weights, first, index)
  if form is not None:
    return FORMS[form](activate, num_experts, *given)
  cpu, default = (
    functools.partial(f, activate, num_experts) for f in (_pairs, _ragged)
  )
  return lax.platform_dependent(*given, cpu=cpu, default=default)


def _projected(
  arrays: Arrays,
  name: str,
  x: Array,
  multiply: Callable[..., Array],
  rows: Callable[[Array], Array] = lambda of_experts: of_experts,
) -> Array:
  """Products with experts' projections, with biases.

  As in `models.networks.linear.project`, scales per output are applied to the
  products, group scales to the weights. `multiply` takes x, projections of any
  dtype and the result's dtype; `rows` expands each expert's scales and biases
  to the rows of the product.
  """
  weight, bias = arrays[name], arrays.get(f"{name}_bias")
  if not isinstance(weight, QuantizedTensor):
    y = multiply(x, weight)
  elif not weight.by_output:
    y = multiply(x, weight.dequantized().astype(x.dtype))
  else:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = multiply(x, weight.values, wide) * rows(weight.scales[..., 0, :])
    y = y.astype(x.dtype)
  return y if bias is None else y + rows(bias)


def _expert(activate, project, x: Array) -> Array:
  """The output of an expert, with `project(x, name)`."""
  return project(activate(project(x, "gate"), project(x, "up")), "down")


def _ragged(activate, count, arrays, x, chosen, weights, first, index):
  some = (a for a in arrays.values() if isinstance(a, QuantizedTensor))
  if not all(a.by_output for a in some):  # dequantize one layer only
    arrays = {name: array[index][None] for name, array in arrays.items()}
    index = jnp.int32(0)
  pairs = _Sorted(count, arrays, chosen, first, index)
  arrays = _of_all_layers(arrays)

  def project(x, name):
    # XLA:TPU converts within the product, without a copy of all experts.
    multiply = lambda x, weight, result=None: lax.ragged_dot(
      x, weight, pairs.sizes, preferred_element_type=result
    )
    return _projected(
      arrays, name, x, multiply, lambda each: each[pairs.expert]
    )

  out = _expert(activate, project, x[pairs.token])
  out = out.astype(weights.dtype) * weights.reshape(-1)[pairs.order][:, None]
  return pairs.add_up(out)


def _pairs(activate, count, arrays, x, chosen, weights, first, index):
  pairs = _Sorted(count, arrays, chosen, first, index)
  arrays = _of_all_layers(arrays)

  def one(pair):
    token, expert, weight = pair

    def project(x, name):
      of_expert = {
        n: a[expert] for n, a in arrays.items() if n.startswith(name)
      }
      multiply = lambda x, weight, result=None: jnp.einsum(
        "i,io->o", x, weight.astype(x.dtype), preferred_element_type=result
      )
      return _projected(of_expert, name, x, multiply)

    return _expert(activate, project, x[token]).astype(weight.dtype) * weight

  weights = weights.reshape(-1)[pairs.order]
  return pairs.add_up(lax.map(one, (pairs.token, pairs.expert, weights)))


def _of_all_layers(arrays: Arrays) -> Arrays:
  """Merges the axes of layers and experts, without a copy."""
  return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), arrays)


class _Sorted:
  """(token, expert) pairs sorted by expert, those on other devices last.

  Attributes:
    order: `i32[M]`, indices of the pairs in sorted order.
    token: `i32[M]`, the token of each, in that order.
    expert: `i32[M]`, the index in `_of_all_layers`; the layer's last for pairs
      on other devices.
    sizes: `i32[L E']`, number of pairs of each expert in L layers.
  """

  def __init__(self, num_experts, arrays, chosen, first, index):
    layers, count = arrays["gate"].shape[:2]
    relative = (chosen.reshape(-1) - first) % num_experts
    self.order = jnp.argsort(relative, stable=True)
    self.token = self.order // chosen.shape[1]
    self.expert = index * count + jnp.minimum(relative[self.order], count - 1)
    sizes = jnp.zeros(num_experts, jnp.int32).at[relative].add(1)[:count]
    self.sizes = lax.dynamic_update_slice_in_dim(
      jnp.zeros(layers * count, jnp.int32), sizes, index * count, 0
    )
    self._shape = chosen.shape

  def add_up(self, out: Array) -> Array:
    """Sums of the sorted pairs' outputs by token, `f32[M, D] -> f32[N, D]`."""
    at = jnp.arange(len(out))
    out = jnp.where((at < self.sizes.sum())[:, None], out, 0)
    back = jnp.zeros_like(self.order).at[self.order].set(at)
    return jnp.sum(out[back].reshape(*self._shape, -1), axis=1)


FORMS = {"ragged": _ragged, "pairs": _pairs}
