r"""Stores a target's features of a text, for training heads on them.

  python -m launch.tools.features --config=configs/train_head.py:eagle3 \
    --config.target=MODEL --config.dataset=TEXT --output=FOLDER

The target runs over the dataset once for all heads and epochs, as in
SpecForge's offline mode. It stores the states that the config's head reads and
the final one, in bfloat16. They depend on the dataset, the target,
sequence_length and head.layers.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from flax import nnx

from launch import cli, results
from launch.training import data, features, head_loss, step
from models import checkpoints

cli.reads(cli.CONFIG, cli.OUTPUT, cli.OVERWRITE)


def run(_) -> int:
  """The command."""
  config = cli.CONFIG.value
  if "features" not in config or config.features:
    raise cli.UserError("--config must be from configs/train_head.py")
  folder = pathlib.Path(cli.OUTPUT.value)
  results.check(folder / features.NAME)
  tokenizer = checkpoints.load_tokenizer(config.target)
  target, mesh = checkpoints.load_module(config.target), step.make_mesh(config)
  settings = features.settings_of(config, target.config.num_layers)
  layers = tuple(settings["layers"])
  params = nnx.state(target)
  params = jax.device_put(params, step.shardings(params, mesh))
  watch = head_loss.make_pass(target, layers[:-1] or layers)

  @jax.jit
  def see(params, batch):
    seen = watch(params, batch)
    states = [seen.features, seen.final] if len(layers) > 1 else [seen.final]
    return jnp.concatenate(states, axis=-1).astype(features.STATES)

  folder.mkdir(parents=True, exist_ok=True)
  (folder / features.NAME).unlink(missing_ok=True)
  counts = {}
  for split in ("train", "validation") if config.validate_every else ("train",):
    counts[split] = 0
    with (
      (folder / f"{split}.states").open("wb") as states,
      (folder / f"{split}.rows").open("wb") as rows,
    ):
      batches = data.batches_of(config, tokenizer)(split, seed=None)
      for batch in tqdm.tqdm(batches, unit=" batches", file=sys.stderr):
        seen = see(params, step.place_batch(batch, mesh))
        states.write(np.asarray(seen).tobytes())
        rows.write(
          np.stack([batch[name] for name in features.ROWS], axis=1).tobytes()
        )
        counts[split] += len(batch["tokens"])
  results.write_json(folder / features.NAME, settings | {"rows": counts})
  print(f"{counts} rows of {config.sequence_length} tokens: {folder}")
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
