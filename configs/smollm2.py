r"""Decodes with SmolLM2-135M-Instruct, a small chat model.

  python -m launch.tools.fetch_smollm2
  python -m launch.chat --config=configs/smollm2.py
  python -m launch.decode --config=configs/smollm2.py --prompts=IN.jsonl
  python -m launch.evaluate --config=configs/smollm2.py --output=E.json

IN.jsonl has lines {"messages": [{"role": "user", "content": "..."}]}; a
"prompt" is continued without the chat template and often ends at once.

Repetitions are drafted from the text itself, everything else by an int8 head,
three tokens at a time (models/pretrained/README.md): the fastest choice on two
cores over all of Spec-Bench, for one row at temperature 0; on factual and
mathematical questions the head alone was as fast (docs/results.md).
`configs/smollm2.py:sampled`, the head alone with `block`, is the fastest at
temperature 1, and `configs/smollm2.py:batch`, one token of the head, for
batches of 4; at 8 it may lose to `--config.drafter=plain`.
`--config.drafter=ngram` drafts from the text alone, and `layer_skip` skips the
one attention that costs the least acceptance according to launch.layer_search.
The target's weights are stored in four bits; computation is in float32.

`configs/smollm2.py:gpu` is meant for GPUs, where a pass over more tokens takes
hardly any longer: bfloat16, and a dynamic tree of 60 nodes. It has not been
measured yet; docs/measurements/gpu.sh compares it with others.
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


_DRAFTERS = {  # the fastest on two cores, except "gpu"
  "greedy": "repeats(eagle3(tokens=3, weights=int8), tokens=7)",
  "sampled": "with_rule(eagle3(tokens=3, weights=int8), block)",
  "batch": "eagle3(tokens=1, weights=int8)",
  "gpu": "with_rule(eagle3(tokens=5, tree=dynamic(60)), match)",
}


def get_config(arg: str = "greedy") -> ml_collections.ConfigDict:
  """The experiment; `arg` is "greedy", "sampled", "batch" or "gpu"."""
  if arg not in _DRAFTERS:
    raise ValueError(f"expected one of {[*_DRAFTERS]}, got {arg!r}")
  if not path().is_file():
    raise ValueError(
      f"there is no {path()}: fetch it (98 MB) with "
      "`python -m launch.tools.fetch_smollm2`"
    )
  config = common.get_config()
  config.target = str(path())
  config.checkpoints.eagle3 = "models/pretrained/smollm2-eagle3"
  # No set of skipped layers gives a speed-up (docs/results.md).
  config.checkpoints.layer_skip = "models/pretrained/smollm2-layers.json"
  config.drafter = _DRAFTERS[arg]
  config.dtype = "bfloat16" if arg == "gpu" else "float32"
  config.temperature = float(arg == "sampled")
  config.max_new_tokens = 256
  config.max_length = 8192
  return config
