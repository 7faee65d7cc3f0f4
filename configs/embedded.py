r"""Decodes with the embedded pair: two small Llama-format models of Python.

  python -m launch.decode --config=configs/embedded.py
  python -m launch.decode --config=configs/embedded.py \
    --config.temperature=1.0 --config.rule=match --config.num_drafts=4 \
    --prompts=IN.jsonl --output=OUT.jsonl --summary=S.json
  python -m launch.benchmark --config=configs/embedded.py --output=B.json
  python -m launch.decode --config=configs/embedded.py --config.drafter=eagle3
  python -m launch.decode --config=configs/embedded.py \
    --config.drafter=medusa --config.num_speculative_tokens=4
"""

import ml_collections

from configs import common


def get_config() -> ml_collections.ConfigDict:
  """The experiment."""
  config = common.get_config()
  config.target = "models/pretrained/target"
  config.draft = "models/pretrained/draft"
  config.heads.eagle3 = "models/pretrained/eagle3"
  config.heads.medusa = "models/pretrained/medusa"
  config.num_speculative_tokens = 6
  config.skip_attention = (2, 3, 4)
  config.skip_mlp = (3, 4)
  return config
