"""A small target, and a head of every kind that begins as it."""

import json

import files
import numpy as np
from flax import nnx

from models import head_starts
from models.formats import head_saving, huggingface, loading

VOCAB, WORDS = 4096, 512


def write_all(path):
  """Writes folders named as the heads' kinds, and `target`.

  The target has two layers and 256 positions, of which heads that have any know
  200; EAGLE-3's head says 512 tokens, all others three tokens ahead.

  Args:
    path: an empty folder.
  """
  saved = files.make_checkpoint(path / "target")
  target = loading.load(huggingface.source(saved))
  rng, rngs = np.random.default_rng(0), nnx.Rngs(1)
  words = np.sort(rng.choice(VOCAB, WORDS, replace=False))
  heads = {
    "eagle3": head_starts.eagle3(
      target, layers=(0, 1), draft_vocab=words, rngs=rngs
    ),
    "medusa": head_starts.medusa(target, num_heads=3, rngs=rngs),
    "dflash": head_starts.parallel(
      target, num_layers=1, layers=(1,), block_size=4, mask_token=7,
      draft_vocab=None, rngs=rngs,
    ),
  }  # fmt: skip
  for name, head in heads.items():
    features = {"eagle3": (0, 1), "dflash": (1,)}.get(name, ())
    head_saving.save(head, str(path / name), features=features)
    file = path / name / "config.json"
    settings = json.loads(file.read_text())
    if "max_position_embeddings" in settings:
      file.write_text(json.dumps(settings | {"max_position_embeddings": 200}))
