r"""Trains the head of a depth policy, which predicts acceptance.

  python -m launch.train --config=configs/train_depth.py \
    --workdir=/tmp/specjax/depth --export=HEAD
  python -m launch.decode --config=configs/embedded.py \
    --config.drafter='model(tokens=8, policy=predicted("HEAD"))'

It learns from rounds that the pair decodes by itself (`launch.training.depth`):
SpecDec++'s head (Huang et al., COLM 2025), its depth and its weight of
rejections. Another pair, or another way to draft of it:

  python -m launch.train --config=configs/train_depth.py \
    --config.pair.target=TARGET \
    --config.pair.drafter='model("DRAFT", tokens=8)' ..
"""

import ml_collections

from configs import embedded, train_embedded


def get_config() -> ml_collections.ConfigDict:
  """The experiment."""
  config = train_embedded.get_config("draft")
  for name in (
    "model", "tokenizer", "teacher", "acceptance_block", "sample_prompts",
    "prompt_length", "contexts", "init_from",
  ):  # fmt: skip
    del config[name]
  config.objective = "weighted_cross_entropy"  # the only one here
  # What decodes, as configs/embedded.py. It is not changed; what it says of
  # depth, temperature and batches is not read.
  config.pair = embedded.get_config()
  config.pair.drafter = "model(tokens=8)"  # of a round
  config.num_blocks = 3  # residual blocks
  config.rejection_weight = 6.0  # what a rejected token weighs in the loss
  config.temperatures = (0.0, 1.0)  # of the sampling, row by row
  config.sequence_length = 64  # tokens of a prompt
  config.rounds = 16  # that follow it
  config.batch_size = 16
  config.num_steps = 300
  config.learning_rate = 1e-3
  config.warmup_steps = 20
  config.validation_batches = 8
  config.sample_every = 0
  return config
