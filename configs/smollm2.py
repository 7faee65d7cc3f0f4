r"""Decodes with SmolLM2-135M-Instruct, a small model that chats.

  python -m launch.tools.fetch_smollm2
  python -m launch.chat --config=configs/smollm2.py
  python -m launch.decode --config=configs/smollm2.py --prompts=IN.jsonl
  python -m launch.benchmark --config=configs/smollm2.py --output=B.json

Where a text repeats itself it is read on, and elsewhere a head drafts one token
(models/pretrained/README.md): what wins on two cores (docs/evaluation.md).
`--config.drafter=ngram` drafts from the text alone, and `layer_skip` leaves out
the one attention that launch.layer_search found to lose least; another chain or
tree of the head takes --config.repeats=0. The file is quantised to four bits a
weight and computed with in float32.
"""

import os
import pathlib

import ml_collections

from configs import common


def path() -> pathlib.Path:
  """Where `launch.tools.fetch_smollm2` puts the model."""
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
  config.drafter = "eagle3"
  config.heads.eagle3 = "models/pretrained/smollm2-eagle3"
  config.num_speculative_tokens = 7
  config.repeats, config.max_ngram = 3, 8
  config.elsewhere = 1
  config.skip_attention = (5,)  # docs/self_speculation.md: no set pays
  config.max_new_tokens = 256
  config.max_length = 8192
  return config
