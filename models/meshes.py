"""Meshes for decoding, with data-parallel rows and tensor-parallel models.

`data:2,model:4` means two groups of devices with their own rows, each of which
splits the target over four devices. A copy of the draft may be split over
fewer, down to one (replicated).
"""

import dataclasses
import re

import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from models.networks.description import AttentionSpec, TransformerConfig
from models.networks.t5_config import T5Config
from models.sharding import Sharding, check_cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """Sizes of a mesh.

  Attributes:
    data: groups of devices; each decodes its own rows.
    model: devices of a group, which split the target.
    draft: devices that split each copy of the draft; must divide `model`.
  """

  data: int
  model: int
  draft: int

  def __post_init__(self):
    if min(self.data, self.model, self.draft) < 1 or self.model % self.draft:
      raise ValueError(
        f"the draft's devices ({self.draft}) must divide the target's "
        f"({self.model}), and all must be positive"
      )

  @property
  def num_devices(self) -> int:
    """Number of devices in the mesh."""
    return self.data * self.model

  @property
  def _own_axis(self) -> bool:
    return 1 < self.draft < self.model

  def mesh(self, devices: list) -> Mesh:
    """The mesh: axes 'data', 'model' and, for a draft of its own size, 'draft'.

    `devices` are `num_devices` devices in jax's order.
    """
    shape, names = [self.data, self.model], ["data", "model"]
    if self._own_axis:
      shape[1:] = self.model // self.draft, self.draft
      names.append("draft")
    types = (AxisType.Auto,) * len(names)
    return Mesh(np.array(devices).reshape(shape), names, axis_types=types)

  def shardings(self) -> tuple[Sharding, Sharding]:
    """The target's and the draft's rules (`for_experts` adds a mixture's)."""
    if self._own_axis:
      return Sharding(("model", "draft")), Sharding(("draft",))
    target = Sharding(("model",))
    return target, target if self.draft == self.model else Sharding(())

  def cache_specs(self) -> tuple[P, P]:
    """Specs of the target's and the draft's caches, without rows."""
    target, draft = self.shardings()
    return target.cache_lbksc, draft.cache_lbksc


def parse(
  text: str,
  num_devices: int,
  *,
  draft: TransformerConfig | tuple[int, ...] | None,
  draft_devices: int | None = None,
) -> Layout:
  """A layout of all devices.

  Args:
    text: such as `data:2,model:4`; "" for all devices on 'model'.
    num_devices: how many there are.
    draft: the draft model or None; for a head, the sizes that devices must
      divide (`models.networks.heads.HeadConfig.even_sizes`).
    draft_devices: devices of a copy of the draft; by default as many as
      possible.

  Raises:
    ValueError: for a malformed text or another number of devices.
  """
  data, model = 1, num_devices
  if text:
    axes = ",".join(sorted(text.split(",")))
    match = re.fullmatch(r"data:([1-9]\d*),model:([1-9]\d*)", axes)
    if match is None:
      raise ValueError(f"a mesh must be data:N,model:N, got {text!r}")
    data, model = map(int, match.groups())
  if data * model != num_devices:
    raise ValueError(
      f"mesh {text} needs {data * model} devices, but there are {num_devices}"
    )
  size = draft_devices or most_devices(draft, model)
  return Layout(data=data, model=model, draft=size)


def most_devices(
  draft: TransformerConfig | T5Config | tuple[int, ...] | None, model: int
) -> int:
  """The largest divisor of `model` that a draft can be split over.

  Its key/value heads are not repeated.
  """
  if draft is None:
    return 1
  sizes = draft if isinstance(draft, tuple) else tuple(
    layer.attention.num_kv_heads
    for layer in draft.layers
    if isinstance(layer.attention, AttentionSpec)
  )  # fmt: skip

  def cuts(n: int) -> bool:
    if not isinstance(draft, tuple):
      try:
        check_cut(draft, n)
      except ValueError:
        return False
    return model % n == 0 and all(size % n == 0 for size in sizes)

  return max(n for n in range(1, model + 1) if cuts(n))
