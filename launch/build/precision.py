"""Grammar of what weights and caches are stored in: `int8`, `int4(group=64)`.

`config.weights` is a call of `WEIGHTS`, and so is the argument `weights` of a
drafter that reads a model. Empty, it is the config's dtype.
"""

from models.networks.lowbits import Format
from specjax.calls import Grammar


def int8(
  *, group: int | None = None, output: bool = True, embedding: bool = False
) -> Format:
  """Whole numbers of eight bits, with a scale for every output or group."""
  return Format(kind="int8", group=group, output=output, embedding=embedding)


def int4(
  *, group: int | None = 32, output: bool = True, embedding: bool = False
) -> Format:
  """Whole numbers of four bits, with a scale for every group of inputs."""
  return Format(kind="int4", group=group, output=output, embedding=embedding)


def fp8(
  *, group: int | None = None, output: bool = True, embedding: bool = False
) -> Format:
  """Floats of eight bits (e4m3), with a scale for every output or group."""
  return Format(kind="fp8", group=group, output=output, embedding=embedding)


WEIGHTS = Grammar(
  kind="weights",
  entries={one.__name__: one for one in (int8, int4, fp8)},
)


def weights(text: str) -> Format | None:
  """How weights are stored; None for "", their dtype.

  Raises:
    ValueError: for what is no such call.
  """
  return WEIGHTS.make(text) if text else None
