r"""Decodes with any supported checkpoint on this machine, or from the Hub.

  python -m launch.decode \
    --config=configs/huggingface.py:target=DIR,draft=DIR --prompts=IN.jsonl

Without `draft=`, drafts are n-grams from the text so far; `--config.drafter`
selects another drafter that needs no model.

DIR is a directory (config.json, safetensors, tokenizer files) of a family in
docs/families.md, a GGUF file, or a name on the Hugging Face Hub: ORG/NAME,
ORG/NAME@REVISION or ORG/NAME/FILE.gguf.
"""

import ml_collections

from configs import common


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The experiment; `arg` is "target=DIR" or "target=DIR,draft=DIR"."""
  given = dict.fromkeys(("target", "draft"), "")
  for item in filter(None, arg.split(",")):
    key, _, value = item.partition("=")
    if key not in given or not value:
      raise ValueError(
        f"expected configs/huggingface.py:target=DIR[,draft=DIR], got {item!r}"
      )
    given[key] = value
  if not given["target"]:
    raise ValueError("expected configs/huggingface.py:target=DIR[,draft=DIR]")
  config = common.get_config()
  config.target, config.checkpoints.draft = given["target"], given["draft"]
  if not given["draft"]:
    config.drafter = "ngram"
  return config
