"""Depth policies as configs name them: the library's, and trained ones."""

import dataclasses

import jax
from flax import nnx
from jax.sharding import Mesh

from models.networks import acceptance_head
from models.networks.acceptance_head import AcceptanceHead
from specjax.adaptive import policies
from specjax.adaptive.policies import Policy, Token
from specjax.calls import Grammar
from specjax.runtime import engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted(Policy):
  """A policy with a trained head.

  Attributes:
    head: the head's folder.
  """

  head: str


def predicted(head: str, *, threshold: float = 0.7) -> Predicted:
  """Until a rejection is so likely, by a head of launch.train (SpecDec++).

  No number of the head is read; `load` reads them.

  Raises:
    ValueError: if there is no head in the folder.
    FileNotFoundError: if it is not there.
  """
  config = acceptance_head.read_config(head)
  definition = nnx.graphdef(
    nnx.eval_shape(lambda: AcceptanceHead(config, rngs=nnx.Rngs(0)))
  )

  def accepts(params, token: Token):
    module = nnx.merge(definition, params)
    return jax.nn.sigmoid(
      module(token.hidden, token.top, token.confidence, token.temperature)
    )

  made = policies.predicted(
    accepts, width=config.width, threshold=threshold, head=head
  )
  fields = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
  return Predicted(**fields, head=head)


POLICIES = Grammar(
  kind="policy",
  entries=policies.FACTORIES | {"predicted": predicted},
  literal="fixed",
)


def load(head: str, mesh: Mesh | None = None) -> nnx.State:
  """The parameters of a head, all of them on every device.

  Raises:
    FileNotFoundError, ValueError: as `acceptance_head.load`.
  """
  return engine.everywhere(mesh, nnx.state(acceptance_head.load(head)))
