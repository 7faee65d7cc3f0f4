r"""A draft that learns while the domain of its prompts changes.

  python -m launch.studies.online --config=configs/online_study.py \
    --output=docs/online/study.json
"""

import ml_collections

from configs import common, embedded


def get_config() -> ml_collections.ConfigDict:
  """The experiment, of the embedded pair."""
  config = common.get_config()
  pair = embedded.get_config()
  config.target, config.draft = pair.target, pair.draft
  config.temperature = 1.0
  config.num_speculative_tokens = 4
  config.max_new_tokens = 64
  config.batch_size = 4
  config.prompt_tokens = 48
  config.online_rounds = 4
  config.online_entries = 256
  config.online_rate = 1e-3
  # Streams by name: the domains of their blocks, and emitted tokens of each.
  config.streams = ml_collections.ConfigDict(
    {
      "source and prose": {
        "domains": ("python", "prose", "python"),
        "tokens": 5120,
      },
      "tasks": {
        "domains": (
          "conversation", "code", "mathematics", "summarisation",
          "answering from context", "conversation",
        ),
        "tokens": 3072,
      },
    }
  )  # fmt: skip
  # Emitted tokens of its domain that the offline draft is trained on.
  config.offline_tokens = 3072
  # Emitted tokens of a block that come before what is compared.
  config.after = 2000
  return config
