"""The decoding loop on a mesh: every device group decodes its own rows.

Rows do not depend on each other, so the whole loop is mapped over the row axis
of the mesh: a device sees its rows alone, and what one row accepts moves no
other row's data. Over all other axes the partitioner cuts the models as their
parameters lie. Once a round the groups tell each other whether any of them
still has work, so that all run the same number of rounds, and what they add to
those parts of a drafter's state that all rows share.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specjax import arguments, random, rows
from specjax import warp as warp_lib
from specjax.decode import Decoder
from specjax.state import DecodeState
from specjax.types import Params, Sampling


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
    ignore_stop: Array | None = None,
    inputs: Any = None,
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
      rng_key = random.row_keys(rng_key, jnp.arange(batch))

    def alone(params, stop_tokens, prompts, lengths, keys, budgets, *more):
      sampling, ignored, inputs = more
      return self.decoder.init(
        params, prompts, lengths, keys, buffer_length=buffer_length,
        max_new_tokens=budgets, sampling=sampling, stop_tokens=stop_tokens,
        ignore_stop=ignored, inputs=inputs,
      )  # fmt: skip

    def local(params, *more):
      state = alone(params, *more)
      drafter = self.decoder.drafter
      slots = buffer_length + drafter.tree.num_fed
      inputs = self.decoder.encode_inputs(params, more[-1])
      empty = drafter.init(params, len(state.length), slots, inputs)
      return self._together(empty, state)

    given = (
      params, jnp.asarray(stop_tokens, jnp.int32).reshape(-1),
      prompts, lengths, rng_key, jnp.broadcast_to(max_new_tokens, (batch,)),
      sampling or warp_lib.make_sampling(batch),
      None if ignore_stop is None else jnp.asarray(ignore_stop, bool), inputs,
    )  # fmt: skip
    in_specs = (P(), P(), *[P(self.row_axis)] * 7)
    shapes = jax.eval_shape(alone, *given)
    return self._map(local, in_specs, self.specs(shapes))(*given)

  def admit(
    self,
    params: Params,
    state: DecodeState,
    row: Array | int,
    prompt: Array,
    length: Array | int,
    rng_key: Array,
    *,
    max_new_tokens: Array | int,
    sampling: Sampling | None = None,
    ignore_stop: Array | bool = False,
    inputs: Any = None,
    source: Array | int | None = None,
    keep: Array | int = 0,
  ) -> DecodeState:
    """As `Decoder.admit`; every group reads the prompt, one keeps it.

    A `source` must be of the same group as the row: no text is sent to others.
    """
    self.decoder.check_request(
      params, state, prompt, length, rng_key, max_new_tokens=max_new_tokens,
      sampling=sampling,
    )  # fmt: skip
    share = len(state.length) // self.mesh.shape[self.row_axis]

    def local(
      params, state, row, prompt, length, key, budget, sampling, ignore, inputs,
      source, keep,
    ):  # fmt: skip
      first = lax.axis_index(self.row_axis) * share
      after = self.decoder.admit(
        params, state, row - first, prompt, length, key, max_new_tokens=budget,
        sampling=sampling, ignore_stop=ignore, inputs=inputs,
        source=None if source is None else source - first, keep=keep,
      )  # fmt: skip
      if source is None:
        return after
      return self._of_owner(state, after, row - first)

    return self._run(
      local, params, state, row, prompt, length, rng_key, max_new_tokens,
      sampling, ignore_stop, inputs, source, keep,
    )  # fmt: skip

  def extend(
    self,
    params: Params,
    state: DecodeState,
    row: Array | int,
    tokens: Array,
    count: Array | int,
    *,
    max_new_tokens: Array | int,
    sampling: Sampling | None = None,
  ) -> DecodeState:
    """As `Decoder.extend`; every group reads the tokens, one keeps them."""
    row, tokens = jnp.asarray(row, jnp.int32), jnp.asarray(tokens)
    count = jnp.asarray(count, jnp.int32)
    max_new_tokens = jnp.asarray(max_new_tokens, jnp.int32)
    self.decoder.check_extension(
      params, state, row, tokens, count, max_new_tokens=max_new_tokens
    )
    share = len(state.length) // self.mesh.shape[self.row_axis]

    def local(params, state, row, tokens, count, budget, sampling):
      at = row - lax.axis_index(self.row_axis) * share
      after = self.decoder.extend(
        params, state, at, tokens, count, max_new_tokens=budget,
        sampling=sampling,
      )  # fmt: skip
      return self._of_owner(state, after, at)

    return self._run(
      local, params, state, row, tokens, count, max_new_tokens, sampling
    )

  def generate(self, params: Params, state: DecodeState) -> DecodeState:
    """As `Decoder.generate`, until the rows of every group are done."""

    def local(params, state):
      return self._loop(params, state, lambda s: True)

    return self._run(local, params, state)

  def steps(
    self,
    params: Params,
    state: DecodeState,
    num_steps: Array | int,
    *,
    num_idle: Array | int | None = None,
  ) -> DecodeState:
    """As `Decoder.steps`; `num_idle` counts the rows of all groups."""

    def local(params, state, num_steps, num_idle):
      first = state.num_steps

      def goes_on(state):
        left = state.num_steps - first < num_steps
        if num_idle is not None:
          idle = lax.psum(jnp.sum(state.done), self.row_axis)
          left &= idle < num_idle
        return left

      return self._loop(params, state, goes_on)

    return self._run(local, params, state, num_steps, num_idle)

  def specs(self, state: DecodeState):
    """The `PartitionSpec`s of a state over the row axis, one for every leaf.

    Raises:
      ValueError: if the drafter does not say which axes of its state are rows
        (`Drafter.row_axes`), or says what cannot be.
    """
    count, drafter = len(state.length), self.decoder.drafter

    def spec(axis, x):
      if axis is None:
        return P()
      if x.shape[axis : axis + 1] != (count,):
        raise ValueError(
          f"axis {axis} must be the {count} rows, got an array of shape "
          f"{x.shape} (row_axes of drafter {drafter.name!r})"
        )
      return P(*[None] * axis, self.row_axis)

    return rows.over_leaves(spec, self.decoder.row_axes(state), state)

  def _run(self, local, params, state, *more):
    arguments.check_params(params)
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

  def _loop(self, params, state, goes_on):
    """Rounds until no group has work, which they ask each other after each."""

    def any_left(state):
      mine = ~jnp.all(state.done) & goes_on(state)
      return lax.pmax(mine.astype(jnp.int32), self.row_axis) > 0

    def body(carry):
      state = self.decoder.step(params, carry[0])[0]
      state = self._together(carry[0].drafter_state, state)
      return state, any_left(state)

    return lax.while_loop(lambda c: c[1], body, (state, any_left(state)))[0]

  def _of_owner(
    self, before: DecodeState, after: DecodeState, row: Array
  ) -> DecodeState:
    """A state after tokens were read to a row, which one group has.

    The others have read the tokens behind a text that is none.
    """
    mine = (row >= 0) & (row < len(before.length))
    learned = rows.over_leaves(
      lambda axis, old, new: jnp.where(mine, new, old) if axis is None else new,
      self.decoder.drafter.row_axes(before.drafter_state),
      before.drafter_state,
      after.drafter_state,
    )
    after = dataclasses.replace(after, drafter_state=learned)
    return self._together(before.drafter_state, after)

  def _together(self, before: Any, state: DecodeState) -> DecodeState:
    """Sums every group's changes since `before` to leaves that rows share."""

    def of(axis, old, new):
      if axis is not None or old is new:
        return new
      added = jnp.where(new == old, 0, new - old)  # of -inf too
      return old + lax.psum(added, self.row_axis)

    axes = self.decoder.drafter.row_axes(before)
    together = rows.over_leaves(of, axes, before, state.drafter_state)
    return dataclasses.replace(state, drafter_state=together)
