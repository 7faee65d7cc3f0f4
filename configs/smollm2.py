r"""Decodes with SmolLM2-135M-Instruct, a small model that chats.

  python -m launch.tools.fetch_smollm2
  python -m launch.chat --config=configs/smollm2.py
  python -m launch.decode --config=configs/smollm2.py --prompts=IN.jsonl
  python -m launch.evaluate --config=configs/smollm2.py --output=E.json

Where a text repeats itself the repetition is drafted, and elsewhere a head
in eight bits drafts three tokens (models/pretrained/README.md), the fastest way
on two cores at temperature 0 (docs/evaluation.md); at 1 that is the head alone,
`--config.drafter='with_rule(eagle3(tokens=3, weights=int8), block)'`, and for
four rows a token of it, `eagle3(tokens=1, weights=int8)`.
`--config.drafter=ngram` drafts from the text alone, and `layer_skip` skips the
one attention that costs the least acceptance, by launch.layer_search. The
target's weights are quantised to four bits, and computed with in float32.
"""

import os
import pathlib

import ml_collections

from configs import common


def path() -> pathlib.Path:
  """The file that `launch.tools.fetch_smollm2` writes."""
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  folder = pathlib.Path(home) / "specjax" / "smollm2"
  return folder / "SmolLM2-135M-Instruct.Q4_1.gguf"


def get_config() -> ml_collections.ConfigDict:
  """The experiment."""
  if not path().is_file():
    raise ValueError(
      f"there is no {path()}: fetch it (98 MB) with "
      "`python -m launch.tools.fetch_smollm2`"
    )
  config = common.get_config()
  config.target = str(path())
  config.checkpoints.eagle3 = "models/pretrained/smollm2-eagle3"
  # docs/self_speculation.md: no set pays.
  config.checkpoints.layer_skip = "models/pretrained/smollm2-layers.json"
  config.drafter = "repeats(eagle3(tokens=3, weights=int8), tokens=7)"
  config.max_new_tokens = 256
  config.max_length = 8192
  return config
