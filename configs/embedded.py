r"""Decodes with the embedded pair: small Llama-format models of Python code.

  python -m launch.decode --config=configs/embedded.py
  python -m launch.decode --config=configs/embedded.py \
    --config.temperature=1.0 --config.rule=match \
    --config.drafter='model(tree=paths(4))' \
    --prompts=IN.jsonl --output=OUT.jsonl --summary=S.json
  python -m launch.evaluate --config=configs/embedded.py --output=E.json
  python -m launch.decode --config=configs/embedded.py --config.drafter=eagle3
  python -m launch.decode --config=configs/embedded.py --config.drafter=medusa
"""

import ml_collections

from configs import common


def get_config() -> ml_collections.ConfigDict:
  """The experiment."""
  config = common.get_config()
  config.target = "models/pretrained/target"
  config.checkpoints.draft = "models/pretrained/draft"
  config.checkpoints.eagle3 = "models/pretrained/eagle3"
  config.checkpoints.medusa = "models/pretrained/medusa"
  config.checkpoints.layer_skip = "models/pretrained/layers.json"
  config.drafter = "model(tokens=6)"
  return config
