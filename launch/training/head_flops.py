"""Floating point operations that a step of a head's training takes.

Counted as `launch.training.flops` counts a model's, so that a head and a draft
model can be trained at equal compute: two for each weight of a matrix product
and pass, three passes of what is trained, and the causal half of attention.
The target's pass, of which features and laws are read, is counted like that of
a teacher; where its features are stored, its law alone.
"""

from flax import nnx

from launch.training import flops
from models import head_shapes
from models.networks.dflash import Parallel
from models.networks.eagle import Eagle, Eagle3
from models.networks.mtp import Mtp
from models.networks.transformer import Transformer


def step_flops(
  config,
  target: Transformer,
  module: nnx.Module,
  trained: nnx.State,
  *,
  num_words: int,
  stored: bool = False,
) -> float:
  """Operations of a step: the target's pass, its law, and the head's passes.

  Three passes of each matrix of the head for every time that it is read; of a
  projection that is the target's, two.

  Args:
    config: configs/train_head.py.
    target: whose features are read.
    module: the head.
    trained: its parameters that change.
    num_words: tokens that it can say. Of a draft of some of the vocabulary the
      target's law is made of those alone.
    stored: whether features are read from a file, with no pass of the target.
  """
  c, depth = target.config, config.head.depth
  length = config.sequence_length
  law, whole = c.embed_dim * num_words, c.embed_dim * c.vocab_size
  blocks = config.head.get("anchors", 0) / length
  per_token = 2.0 * law
  if not stored:
    per_token += flops.forward_flops(c, length) - 2 * whole
  for path, value in nnx.to_flat_state(trained):
    if value.ndim == 2:
      per_token += 6 * value.size * _times(module, path, depth, blocks)
  if head_shapes.says_by_target(module):
    of_blocks = isinstance(module, Parallel)
    times = _times(module, ("lm_head",), depth, blocks) if of_blocks else depth
    per_token += 4 * whole * times
  per_token += 3 * _attention(module, length, depth, blocks)
  return per_token * config.batch_size * length


def _times(module, path: tuple, depth: int, blocks: float) -> float:
  """How often a matrix of a head is read, for each token of the text.

  EAGLE and MTP read their layer at every depth. Of blocks every token reads the
  layers; keys and values are also of all features.

  Args:
    module: the head.
    path: of the parameter.
    depth: tokens of a draft.
    blocks: for each token of the text.
  """
  if path[0] == "fc" and not isinstance(module, Eagle | Mtp):
    return 1
  if isinstance(module, Eagle | Eagle3 | Mtp):
    return depth
  if not isinstance(module, Parallel):
    return 1
  if path[0] == "lm_head":
    return depth * blocks
  return (depth + 1) * blocks + (path[-2] in ("k", "v"))


def _attention(module, length: int, depth: int, blocks: float) -> float:
  """Operations of a pass of attention's products, for each token of the text.

  A step of EAGLE's draft sees the text so far, half of the row in the mean; so
  does each token of a block, and the whole block.
  """
  if isinstance(module, Eagle | Eagle3 | Mtp):
    layer = module.config.layer
    width = layer.num_layers * layer.num_heads * layer.head_dim
    return depth * 2 * width * length
  if isinstance(module, Parallel):
    c, size = module.config.layers, depth + 1
    seen = length / 2 + size
    heads = c.num_layers * c.num_heads * c.head_dim
    return blocks * size * 4 * heads * seen
  return 0.0
