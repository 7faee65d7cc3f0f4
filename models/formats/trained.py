"""The model of a training run, from its checkpoints, for decoding.

WORKDIR of `launch.train` can be given wherever a checkpoint directory can:

  python -m launch.decode --config=configs/huggingface.py:target=WORKDIR

The parameters of the newest checkpoint are read straight to where they are to
lie, on whatever mesh the run was.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from models import sharding as sharding_lib
from models.networks import stacked
from models.networks.description import TransformerConfig, llama_config
from models.networks.transformer import Transformer
from models.sharding import Sharding


def is_run(directory: str) -> bool:
  """True if a directory is the folder of a training run."""
  return (pathlib.Path(directory) / "checkpoints").is_dir()


def tokenizer_dir(directory: str) -> str:
  """The directory of the run's tokenizer."""
  return str(pathlib.Path(directory) / "tokenizer")


def newest(directory: str) -> pathlib.Path:
  """The folder of a run's newest checkpoint; FileNotFoundError if none is."""
  folder = pathlib.Path(directory).absolute() / "checkpoints"
  steps = [path for path in folder.iterdir() if path.name.isdecimal()]
  if not steps:
    raise FileNotFoundError(f"{folder} has no finished checkpoint")
  return max(steps, key=lambda path: int(path.name))


def read_config(directory: str) -> TransformerConfig:
  """The configuration of a run's model; ValueError if it trains a head."""
  path = pathlib.Path(directory) / "config.json"
  content = json.loads(path.read_text("utf-8"))
  if "head" in content:
    raise ValueError(f"{path} trains a head, which --export writes")
  return llama_config(**content["model"])


def load(directory: str, *, dtype=jnp.float32) -> Transformer:
  """Reads a run's model to one device in some dtype.

  Raises:
    FileNotFoundError: if there is no checkpoint.
    ValueError: if it cannot be read.
  """
  graphdef, shapes = _abstract(read_config(directory), dtype)
  here = SingleDeviceSharding(jax.local_devices()[0])
  return nnx.merge(
    graphdef, _restore(directory, shapes, jax.tree.map(lambda _: here, shapes))
  )


def load_stacked(
  directory: str, *, mesh: Mesh, sharding: Sharding, dtype=jnp.bfloat16
) -> tuple[TransformerConfig, stacked.StackedParams]:
  """Reads a run's model to a mesh, as `models.formats.loading.load_stacked`.

  Raises as `load`, and ValueError for a model that cannot be cut so.
  """
  saved = read_config(directory)
  config = sharding_lib.kv_heads_for(
    saved, sharding_lib.num_parts(sharding, mesh)
  )
  graphdef, shapes = _abstract(saved, dtype)
  specs = sharding_lib.param_specs(shapes, sharding)
  if config != saved:  # heads that are yet to be repeated are read whole
    specs = jax.tree_util.tree_map_with_path(
      lambda path, _, spec: (
        P() if sharding_lib.names(path)[-2] in ("k", "v") else spec
      ),
      shapes,
      specs,
    )
  layers = _restore(directory, shapes, sharding_lib.named(mesh, specs))

  def stack(layers):
    params = stacked.stack(nnx.merge(graphdef, layers), apart=sharding.apart)
    return sharding_lib.repeat_kv_heads(params, saved, config)

  result = stacked.abstract_params(config, dtype=dtype, apart=sharding.apart)
  where = sharding_lib.named(mesh, sharding_lib.param_specs(result, sharding))
  return config, jax.jit(stack, out_shardings=where)(layers)


def _abstract(config: TransformerConfig, dtype):
  """A model's definition, and the shapes of its parameters."""
  return nnx.split(
    nnx.eval_shape(lambda: Transformer(config, dtype=dtype, rngs=nnx.Rngs(0)))
  )


def _restore(directory: str, shapes: nnx.State, where) -> nnx.State:
  """The parameters of the newest checkpoint, with `where`'s shardings."""
  import orbax.checkpoint as ocp  # slow, and not for other models

  verbosity = logging.get_verbosity()
  wanted = jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    {"params": shapes},
    {"params": where},
  )
  # The chief's choice is that of all.
  chosen = int(newest(directory).name) if jax.process_index() == 0 else 0
  chosen = str(multihost_utils.broadcast_one_to_all(np.int32(chosen)))
  path = pathlib.Path(directory).absolute() / "checkpoints" / chosen / "state"
  logging.set_verbosity(logging.WARNING)  # Orbax tells every step
  try:
    with ocp.PyTreeCheckpointer() as checkpointer:
      return checkpointer.restore(
        path,
        args=ocp.args.PyTreeRestore(
          item=wanted,
          restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
          partial_restore=True,
        ),
      )["params"]
  except Exception as error:  # what damage raises depends on the damage
    raise ValueError(
      f"the checkpoint {path} cannot be read: {type(error).__name__}: {error}"
    ) from None
  finally:
    logging.set_verbosity(verbosity)
