"""Fields of every decoding experiment, with their defaults."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """The default settings of decoding commands."""
  config = ml_collections.ConfigDict()
  # A directory, a GGUF file or a name on the Hub.
  config.target = ""
  # Default checkpoint of each drafter, such as `eagle3`; others use `draft`.
  config.checkpoints = ml_collections.ConfigDict({"draft": ""})
  # For example, 'model(tokens=6)', 'ngram', 'plain' (no drafting) or
  # 'repeats(eagle3(tokens=1), tokens=7)'; --help=drafters lists all.
  config.drafter = "model"
  # See docs/rules.md; "typical(epsilon=0.1)" and "mine.RULE" work as well.
  config.rule = "token"
  config.dtype = "float32"
  # How the target's weights are stored: int8, int4(group=64), fp8; "" for dtype
  # or, if they are quantized, as published (docs/precision.md).
  config.weights = ""
  # The target's KV cache: int8 or fp8, with a scale per head and slot.
  config.cache = ""
  # Sampling. Temperature 0 is greedy; the defaults below do not truncate.
  config.temperature = 0.0
  config.top_k = 0
  config.top_p = 1.0
  config.min_p = 0.0
  config.seed = 0
  # Rows end here, or at the tokenizer's end-of-text token.
  config.max_new_tokens = 128
  config.stop_token_ids = ()
  # Maximum tokens of prompt and completion together.
  config.max_length = 2048
  config.batch_size = 1
  # Several devices: "data:2,model:4" shards rows over 'data' and models over
  # 'model'; "" means one device. A draft is sharded over draft_devices of them;
  # 0 means as many as possible.
  config.mesh = ""
  config.draft_devices = 0
  return config
