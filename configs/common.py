"""Fields of every decoding experiment, with their defaults."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """The settings of every decoding command."""
  config = ml_collections.ConfigDict()
  # Directories, or GGUF files.
  config.target = ""
  # Drafters' default checkpoints by name, as `eagle3`; all others use `draft`.
  config.checkpoints = ml_collections.ConfigDict({"draft": ""})
  # A call: 'model(tokens=6)', 'ngram', 'plain' (no draft),
  # 'repeats(eagle3(tokens=1), tokens=7)'; --help=drafters lists them all.
  config.drafter = "model"
  config.rule = "token"  # of docs/rules.md, "typical(epsilon=0.1)", mine.RULE
  config.dtype = "float32"
  # Storage of the target's weights: int8, int4(group=64), fp8; "": as dtype,
  # or as published if they are quantized (docs/precision.md).
  config.weights = ""
  # Its keys and values: int8 or fp8, with a scale per head and slot.
  config.cache = ""
  # Sampling. Temperature 0 is greedy; 0, 1.0 and 0.0 below truncate nothing.
  config.temperature = 0.0
  config.top_k = 0
  config.top_p = 1.0
  config.min_p = 0.0
  config.seed = 0
  # When rows end, besides the tokenizer's end-of-text token.
  config.max_new_tokens = 128
  config.stop_token_ids = ()
  # Longer prompts with completions are rejected.
  config.max_length = 2048
  config.batch_size = 1
  # Several devices: in "data:2,model:4" rows are split over 'data' and models
  # over 'model'; "" is one device. A draft is split over draft_devices of them,
  # 0 for as many as its heads allow.
  config.mesh = ""
  config.draft_devices = 0
  return config
