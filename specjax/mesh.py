"""The decoding loop on a mesh: every device group decodes its own rows.

Rows do not depend on each other, so the whole loop is mapped over the row axis
of the mesh: a device sees its rows alone, and what one row accepts moves no
other row's data. Over all other axes the partitioner cuts the models as their
parameters lie. The one thing that the groups tell each other is whether any of
them still has work, once a round, so that all run the same number of rounds.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax import arguments
from specjax import cache as cache_lib
from specjax import sampling as sampling_lib
from specjax import warp as warp_lib
from specjax.decode import Decoder
from specjax.types import DecodeState, Params, Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshDecoder:
  """A `Decoder` whose rows lie over one axis of a mesh.

  Attributes:
    decoder: what is decoded; its models may constrain activations to other axes
      of the mesh.
    mesh: the devices.
    row_axis: the mesh axis that rows are cut over. A batch must be a multiple
      of its size.
  """

  decoder: Decoder
  mesh: Mesh
  row_axis: str = "data"

  def __post_init__(self):
    if self.row_axis not in self.mesh.shape:
      raise ValueError(
        f"the mesh must have an axis {self.row_axis!r}, got "
        f"{dict(self.mesh.shape)}"
      )

  def init(
    self,
    params: Params,
    prompts: Array,
    lengths: Array,
    rng_key: Array,
    *,
    buffer_length: int,
    max_new_tokens: Array | int,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] | Array = (),
  ) -> DecodeState:
    """As `Decoder.init`; every group fills the caches of its rows.

    Raises:
      ValueError: as `Decoder.init`, or if the rows cannot be cut evenly.
    """
    prompts, lengths = jnp.asarray(prompts), jnp.asarray(lengths, jnp.int32)
    max_new_tokens = jnp.asarray(max_new_tokens, jnp.int32)
    self.decoder.check(
      params, prompts, lengths, rng_key, buffer_length=buffer_length,
      max_new_tokens=max_new_tokens, sampling=sampling,
    )  # fmt: skip
    batch, groups = prompts.shape[0], self.mesh.shape[self.row_axis]
    if batch % groups:
      raise ValueError(
        f"{batch} rows cannot be cut evenly over {groups} groups of devices "
        f"({self.row_axis!r})"
      )
    if rng_key.ndim == 0:
      rng_key = sampling_lib.row_keys(rng_key, jnp.arange(batch))

    def local(params, prompts, lengths, keys, budgets, sampling, stop_tokens):
      return self.decoder.init(
        params, prompts, lengths, keys, buffer_length=buffer_length,
        max_new_tokens=budgets, sampling=sampling, stop_tokens=stop_tokens,
      )  # fmt: skip

    given = (
      params, prompts, lengths, rng_key,
      jnp.broadcast_to(max_new_tokens, (batch,)),
      sampling or warp_lib.make_sampling(batch),
      jnp.asarray(stop_tokens, jnp.int32).reshape(-1),
    )  # fmt: skip
    rows = P(self.row_axis)
    in_specs = (P(), rows, rows, rows, rows, rows, P())
    shapes = jax.eval_shape(
      lambda *a: self.decoder.init(
        *a[:4], buffer_length=buffer_length, max_new_tokens=a[4],
        sampling=a[5], stop_tokens=a[6],
      ),
      *given,
    )  # fmt: skip
    return self._map(local, in_specs, self.specs(shapes))(*given)

  def generate(self, params: Params, state: DecodeState) -> DecodeState:
    """As `Decoder.generate`, until the rows of every group are done."""

    def local(params, state):
      return self._loop(params, state, lambda s: True)

    return self._run(local, params, state)

  def steps(
    self, params: Params, state: DecodeState, num_steps: Array | int
  ) -> DecodeState:
    """As `Decoder.steps`."""

    def local(params, state, num_steps):
      last = state.num_steps + num_steps
      return self._loop(params, state, lambda s: s.num_steps < last)

    return self._run(local, params, state, jnp.asarray(num_steps, jnp.int32))

  def specs(self, state: DecodeState):
    """The `PartitionSpec`s of a state over the row axis, one for every leaf.

    Raises:
      ValueError: if the drafter does not say which axes of its state are rows
        (`Drafter.row_axes`), or says what cannot be.
    """
    rows, drafter = len(state.length), self.decoder.drafter
    axes = dataclasses.replace(
      jax.tree.map(lambda x: 0, state),
      stop_tokens=None,
      num_steps=None,
      target_cache=cache_lib.row_axes(state.target_cache),
      drafter_state=drafter.row_axes(state.drafter_state),
    )

    def spec(x, axis):
      if axis is None:
        return P()
      if x.shape[axis : axis + 1] != (rows,):
        raise ValueError(
          f"axis {axis} must be the {rows} rows, got an array of shape "
          f"{x.shape} (row_axes of drafter {drafter.name!r})"
        )
      return P(*[None] * axis, self.row_axis)

    return jax.tree.map(spec, state, axes)

  def shardings(self, state: DecodeState):
    """`NamedSharding`s of a state: rows over their axis, all else whole."""
    return jax.tree.map(
      lambda spec: NamedSharding(self.mesh, spec), self.specs(state),
      is_leaf=lambda x: isinstance(x, P),
    )  # fmt: skip

  def _run(self, local, params, state, *more):
    arguments.check_params(params)
    specs = self.specs(state)
    in_specs = (P(), specs, *(P() for _ in more))
    return self._map(local, in_specs, specs)(params, state, *more)

  def _map(self, function, in_specs, out_specs):
    return jax.shard_map(
      function,
      mesh=self.mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      axis_names={self.row_axis},
      check_vma=False,
    )

  def _loop(self, params, state, goes_on):
    """Rounds until no group has work, which they ask each other after each."""

    def any_left(state):
      mine = ~jnp.all(state.done) & goes_on(state)
      return lax.pmax(mine.astype(jnp.int32), self.row_axis) > 0

    def body(carry):
      state = self.decoder.step(params, carry[0])[0]
      return state, any_left(state)

    return lax.while_loop(lambda c: c[1], body, (state, any_left(state)))[0]
