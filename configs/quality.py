r"""Decoding-OPT against Decoding-UNO (Yin et al., NeurIPS 2024, section 5).

  python -m launch.studies.quality --config=configs/quality.py \
    --prompts=P.jsonl --output=OUT.json

Both rules over-accept equally; after a rejection OPT draws from the residual
that loses least, UNO from the target. A score compares completions of the same
prompts. The paper's setting, if you have the files (Pythia 70M and 2.8B and a
reward model, as directories):

  python -m launch.studies.quality \
    --config=configs/quality.py:target=PYTHIA_2.8B,draft=PYTHIA_70M \
    --config.score=reward --config.scorer=REWARD_MODEL --prompts=ALPACA.jsonl \
    --config.num_comparisons=500 --output=OUT.json
"""

import ml_collections

from configs import common, embedded, huggingface


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The experiment; `arg` is "" (the embedded pair) or target=DIR,draft=DIR."""
  if arg:
    config = huggingface.get_config(arg)
  else:
    config = common.get_config()
    pair = embedded.get_config()
    config.target, config.checkpoints = pair.target, pair.checkpoints
  config.temperature = 1.0
  config.drafter = "model(tokens=4)"
  config.max_new_tokens = 48 if not arg else 128
  config.epsilons = (0.01, 0.03, 0.1, 0.3)
  # Completions of each prompt by each rule, compared one with one.
  config.num_comparisons = 50 if not arg else 500
  config.batch_size = 50  # completions decoded together
  # "log_likelihood" under a causal model, per token, or "reward" of a
  # sequence-classification model; `scorer` is its directory (the target's own).
  config.score = "log_likelihood"
  config.scorer = ""
  return config
