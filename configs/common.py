"""Fields of every decoding experiment, with their defaults."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """The fields that every decoding command reads."""
  config = ml_collections.ConfigDict()
  # Directories, or GGUF files.
  config.target = ""
  # What drafters read whose call names no checkpoint: by their names, as
  # `eagle3`, and `draft` for those that have none of their own name.
  config.checkpoints = ml_collections.ConfigDict({"draft": ""})
  # What proposes: a call, as 'model(tokens=6)', 'ngram', 'plain' (nothing),
  # 'repeats(eagle3(tokens=1), tokens=7)'; --help=drafters lists them all.
  config.drafter = "model"
  config.rule = "token"  # of docs/rules.md, "typical(epsilon=0.1)", mine.RULE
  config.dtype = "float32"
  # How the target's weights are stored: int8, int4(group=64), fp8; "" as dtype,
  # or as they are published in few bits (docs/precision.md).
  config.weights = ""
  # And its keys and values: int8 or fp8, with a scale a head and slot.
  config.cache = ""
  # What is sampled. Temperature 0 is greedy; 0, 1.0 and 0.0 truncate nothing.
  config.temperature = 0.0
  config.top_k = 0
  config.top_p = 1.0
  config.min_p = 0.0
  config.seed = 0
  # When rows end, beside the tokenizer's end-of-text token.
  config.max_new_tokens = 128
  config.stop_token_ids = ()
  # Prompts and completions longer than this are refused.
  config.max_length = 2048
  config.batch_size = 1
  # Several devices: as in "data:2,model:4", rows cut over 'data' and models
  # over 'model'; "" is one device. And how many of 'model' each copy of the
  # draft is cut over; 0 is as many as its heads allow.
  config.mesh = ""
  config.draft_devices = 0
  return config
