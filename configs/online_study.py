r"""A draft that learns while the domain of its prompts changes.

  python -m launch.studies.online --config=configs/online_study.py:prose \
    --output=docs/online/prose.json
  python -m launch.studies.online --config=configs/online_study.py:tasks \
    --output=docs/online/tasks.json
"""

import ml_collections

from configs import common, embedded

# Streams by name: the domains of their blocks.
_STREAMS = {
  "prose": ("python", "prose", "python"),
  "tasks": (
    "conversation", "code", "mathematics", "summarisation",
    "answering from context", "conversation",
  ),
}  # fmt: skip


def get_config(stream: str = "prose") -> ml_collections.ConfigDict:
  """The experiment, of the embedded pair; `stream` is "prose" or "tasks".

  Raises:
    ValueError: for another stream.
  """
  if stream not in _STREAMS:
    raise ValueError(
      f"the stream must be one of {list(_STREAMS)}, got {stream!r}"
    )
  config = common.get_config()
  pair = embedded.get_config()
  config.target, config.checkpoints = pair.target, pair.checkpoints
  config.temperature = 1.0
  config.drafter = "online(model(tokens=4), entries=256)"
  config.max_new_tokens = 64
  config.batch_size = 4
  config.prompt_tokens = 48
  # The domains of each stream's blocks, and emitted tokens of each block.
  config.streams = ml_collections.ConfigDict(
    {stream: {"domains": _STREAMS[stream], "tokens": 3072}}
  )
  # Emitted tokens of its domain that the offline draft is trained on.
  config.offline_tokens = 3072
  # Emitted tokens of a block that come before what is compared.
  config.after = 2000
  return config
