r"""Decodes with T5 checkpoint directories on this machine.

  python -m launch.decode --config=configs/t5.py:target=DIR,draft=DIR \
    --prompts=IN.jsonl --output=OUT.jsonl

A line of IN.jsonl is {"id": ..., "input": "translate English to German: ..."}.
T5 1.0, T5 1.1 and Flan-T5 are supported in Hugging Face's format (config.json,
safetensors, tokenizer.json). Without `draft=`, drafts are n-grams.
"""

import ml_collections

from configs import huggingface


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The experiment; `arg` is "target=DIR" or "target=DIR,draft=DIR"."""
  config = huggingface.get_config(arg)
  if config.checkpoints.draft:
    config.drafter = "model(tokens=7)"  # the best in Leviathan et al., Table 2
  config.max_length = 512  # for the input, and for the decoder's text
  return config
