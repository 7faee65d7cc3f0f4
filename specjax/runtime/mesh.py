"""The decoding loop on a mesh: every device group decodes its own rows.

Rows are independent, so the whole loop is mapped over the row axis of the mesh:
a device sees only its rows, and acceptance in one row moves no other row's
data. Over all other axes the partitioner splits the models as their parameters
are sharded. Once a round the groups exchange two things: whether any still has
work, so that all run the same number of rounds, and their changes to drafter
state that all rows share.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specjax import cache as cache_lib
from specjax import checks, rows
from specjax.decode import Decoder
from specjax.prefill import Prompts
from specjax.state import DecodeState
from specjax.types import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshDecoder(Decoder):
  """A `Decoder` with rows sharded over one axis of a mesh.

  Every group of devices runs `Decoder`'s methods on its own rows. When a row is
  refilled or extended all groups run the passes, and one keeps the result.

  Attributes:
    mesh: the devices; models may constrain activations to its other axes.
    row_axis: the mesh axis of the rows. Batch sizes are multiples of its size,
      and `admit` reuses rows of the same group only.
  """

  mesh: Mesh
  row_axis: str = "data"

  @classmethod
  def of(cls, decoder: Decoder, mesh: Mesh, **options: Any) -> "MeshDecoder":
    """The decoder on a mesh."""
    return cls(**vars(decoder), mesh=mesh, **options)

  def __post_init__(self):
    super().__post_init__()
    if self.row_axis not in self.mesh.shape:
      raise ValueError(
        f"the mesh must have an axis {self.row_axis!r}, got "
        f"{dict(self.mesh.shape)}"
      )

  def _begin(
    self, params: Params, given: Prompts, buffer_length: int, blank: Any = None
  ) -> DecodeState:
    del blank  # of fresh rows
    batch, groups = len(given.lengths), self.mesh.shape[self.row_axis]
    if batch % groups:
      raise ValueError(
        f"{batch} rows cannot be split evenly over {groups} groups of devices "
        f"({self.row_axis!r})"
      )
    begin = super()._begin

    def local(params, given):
      state = begin(params, given, buffer_length)
      empty = self._blank(params, given, buffer_length)
      return self._sum_changes(empty, state)

    cut = jax.tree.map(lambda _: P(self.row_axis), given)
    cut = dataclasses.replace(cut, stop_tokens=P())
    state = jax.eval_shape(
      lambda params, given: begin(params, given, buffer_length), params, given
    )
    return self._map(local, (P(), cut), self.specs(state))(params, given)

  def _admitted(
    self, params: Params, state: DecodeState, row, given: Prompts, source, keep,
    slots: int | None,
  ) -> DecodeState:  # fmt: skip
    one = super()._admitted
    return self._of_row(
      lambda params, state, first, row, given, source, keep: one(
        params, state, row - first, given,
        None if source is None else source - first, keep, slots,
      ),
      params, state, row, given, source, keep,
    )  # fmt: skip

  def _extended(
    self, params: Params, state: DecodeState, row: Array, *more: Any
  ) -> DecodeState:
    one = super()._extended
    return self._of_row(
      lambda params, state, first, row, *more: one(
        params, state, row - first, *more
      ),
      params, state, row, *more,
    )  # fmt: skip

  def steps(
    self,
    params: Params,
    state: DecodeState,
    num_steps: Array | int | None,
    *,
    num_idle: Array | int | None = None,
    slots: int | None = None,
  ) -> DecodeState:
    """Like `Decoder.steps`; `num_idle` counts the rows of all groups."""

    def local(params, state, num_steps, num_idle):
      mine = self._condition(state, num_steps, num_idle, slots)
      any_work = lambda state: (
        lax.pmax(mine(state).astype(jnp.int32), self.row_axis) > 0
      )

      def body(carry):
        before = carry[0].drafter_state
        state = self._sum_changes(before, self.step(params, carry[0])[0])
        return state, any_work(state)

      first = cache_lib.with_read_slots(state, slots), any_work(state)
      last, _ = lax.while_loop(lambda c: c[1], body, first)
      return cache_lib.with_read_slots(last, None)

    return self._run(local, params, state, num_steps, num_idle)

  def _num_done(self, state: DecodeState) -> Array:
    return lax.psum(super()._num_done(state), self.row_axis)

  def _longest(self, state: DecodeState) -> Array:
    return lax.pmax(super()._longest(state), self.row_axis)

  def specs(self, state: DecodeState):
    """The `PartitionSpec` of every leaf of a state over the row axis.

    Raises:
      ValueError: if `Drafter.row_axes` names an axis other than the rows'.
    """
    count = len(state.length)

    def spec(axis, x):
      if axis is None:
        return P()
      if x.shape[axis : axis + 1] != (count,):
        raise ValueError(
          f"axis {axis} must be the {count} rows, got an array of shape "
          f"{x.shape} (row_axes of drafter {self.drafter.name!r})"
        )
      return P(*[None] * axis, self.row_axis)

    return rows.over_leaves(spec, self.row_axes(state), state)

  def _of_row(
    self, run: Callable[..., DecodeState], params, state, row, *more
  ) -> DecodeState:
    """Runs an operation on one row, in every group; one keeps the result."""
    share = len(state.length) // self.mesh.shape[self.row_axis]

    def local(params, before, row, *more):
      first = lax.axis_index(self.row_axis) * share
      after = run(params, before, first, row, *more)
      mine = (row >= first) & (row < first + share)
      learned = rows.over_leaves(
        lambda axis, old, new: (
          jnp.where(mine, new, old) if axis is None else new
        ),
        self.drafter.row_axes(before.drafter_state), before.drafter_state,
        after.drafter_state,
      )  # fmt: skip
      after = dataclasses.replace(after, drafter_state=learned)
      return self._sum_changes(before.drafter_state, after)

    return self._run(local, params, state, row, *more)

  def _run(self, local, params, state, *more):
    checks.params(params)
    specs = self.specs(state)
    in_specs = (P(), specs, *(P() for _ in more))
    more = jax.tree.map(jnp.asarray, more)
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

  def _sum_changes(self, before: Any, state: DecodeState) -> DecodeState:
    """Sums all groups' changes since `before` to leaves that rows share."""

    def of(axis, old, new):
      if axis is not None or old is new:
        return new
      added = jnp.where(new == old, 0, new - old)  # -inf - -inf is NaN
      return old + lax.psum(added, self.row_axis)

    axes = self.drafter.row_axes(before)
    summed = rows.over_leaves(of, axes, before, state.drafter_state)
    return dataclasses.replace(state, drafter_state=summed)
