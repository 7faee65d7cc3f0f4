"""Depth policies as configs name them: the library's, and trained ones.

`config.depth` is what `specjax.adaptive.policies.get` knows, or
`predicted(head=DIR, threshold=0.7)`, whose head `launch.train` has trained
(configs/train_depth.py).
"""

import jax
import ml_collections
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.networks import acceptance_head
from models.networks.acceptance_head import AcceptanceHead
from specjax import named
from specjax.adaptive import policies as depth_lib
from specjax.adaptive.policies import Policy, Token

_NAME = "predicted"


def head_of(config: ml_collections.ConfigDict) -> str:
  """Where the head of `config.depth` is; "" if it has none."""
  text = str(config.get("depth", ""))
  return _parts(text)[0] if _has_head(text) else ""


def of(config: ml_collections.ConfigDict) -> Policy | None:
  """When drafts end, or None where all are as deep as their tree.

  Of a head no number is read; `load` reads them.

  Raises:
    ValueError: if `config.depth` is no policy, or its head is none.
    FileNotFoundError: if its head is not there.
  """
  text = str(config.get("depth", ""))
  if not text:
    return None
  if not _has_head(text):
    return depth_lib.get(text)
  head, rest = _parts(text)
  make = lambda threshold=0.7: predicted(head, threshold)
  return named.make("depth", f"{_NAME}({rest})", {_NAME: make})


def predicted(head: str, threshold: float = 0.7) -> Policy:
  """The policy of the head in a folder; raises as `of`."""
  config = acceptance_head.read_config(head)
  definition = nnx.graphdef(
    nnx.eval_shape(lambda: AcceptanceHead(config, rngs=nnx.Rngs(0)))
  )

  def accepts(params, token: Token):
    module = nnx.merge(definition, params)
    return jax.nn.sigmoid(
      module(token.hidden, token.top, token.confidence, token.temperature)
    )

  return depth_lib.predicted(
    accepts, width=config.width, threshold=threshold, head=head
  )


def load(head: str, mesh: Mesh | None = None) -> nnx.State:
  """The parameters of a head, all of them on every device.

  Raises:
    FileNotFoundError, ValueError: as `acceptance_head.load`.
  """
  params = nnx.state(acceptance_head.load(head))
  if mesh is None:
    return params
  whole = NamedSharding(mesh, PartitionSpec())

  def put(x):
    array = np.asarray(x)
    return jax.make_array_from_callback(array.shape, whole, lambda i: array[i])

  return jax.tree.map(put, params)


def recording(
  config: ml_collections.ConfigDict, depth: int, *, width: int = 0
) -> ml_collections.ConfigDict:
  """The config whose drafts are all so deep, and kept until the next round.

  Args:
    config: the config.
    depth: G.
    width: H, of the draft's hidden states that are kept too; 0 for none.
  """
  config = ml_collections.ConfigDict(config.to_dict())
  config.num_speculative_tokens = depth
  config.repeats = config.elsewhere = 0
  config.depth = f"recorded(width={width})"
  return config


def _has_head(text: str) -> bool:
  return text.partition("(")[0].strip() == _NAME


def _parts(text: str) -> tuple[str, str]:
  """The head, and all other parameters as they are written."""
  inside = text.partition("(")[2]
  heads, rest = [], []
  if inside.endswith(")"):
    for part in inside[:-1].split(","):
      name, _, value = part.partition("=")
      if name.strip() == "head":
        heads.append(value.strip().strip("'\""))
      else:
        rest.append(part)
  if len(heads) != 1 or not heads[0]:
    raise ValueError(
      f"depth {text!r:.80}: expected {_NAME}(head=DIR, threshold=0.7)"
    )
  return heads[0], ",".join(rest)
