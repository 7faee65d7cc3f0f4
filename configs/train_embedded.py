r"""Trains the embedded pair on Python source.

First the tokenizer and the target, then the draft, distilled from the target:

  python -m launch.train --config=configs/train_embedded.py:target \
    --workdir=/tmp/specjax/target --export=models/pretrained/target --overwrite
  python -m launch.train --config=configs/train_embedded.py:draft \
    --workdir=/tmp/specjax/draft --export=models/pretrained/draft --overwrite

`:tiny` trains a toy in seconds (for tests). models/pretrained/README.md says
how the shipped pair was trained.
"""

import ml_collections

_SHAPES = {
  "target": dict(
    embed_dim=384, num_layers=6, num_heads=6, num_kv_heads=6, head_dim=64,
    mlp_dim=1024,
  ),
  "draft": dict(
    embed_dim=160, num_layers=2, num_heads=5, num_kv_heads=5, head_dim=32,
    mlp_dim=448,
  ),
  "tiny": dict(
    embed_dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
    mlp_dim=64,
  ),
}  # fmt: skip


def get_config(arg: str = "target") -> ml_collections.ConfigDict:
  """The experiment; `arg` is "target", "draft" or "tiny"."""
  if arg not in _SHAPES:
    raise ValueError(f"expected one of {sorted(_SHAPES)}, got {arg!r}")
  config = ml_collections.ConfigDict()
  config.model = ml_collections.ConfigDict(
    dict(_SHAPES[arg], vocab_size=4096, max_positions=2048)
  )
  # See launch/training/data.py.
  config.dataset = "python_source"
  config.text_features = ()  # of a TFDS dataset; () for the defaults
  # The tokenizer's folder; if it is empty, one is trained on the data and saved
  # there, so use a different folder for different data.
  config.tokenizer = "models/pretrained/target"
  # Directory of a model to start from; "" for random weights.
  config.init_from = ""
  # The objective (specjax.training.losses), the source of the training text
  # (launch.training.model), and the directory of the teacher.
  config.objective = "forward_kl" if arg == "draft" else "next_token"
  config.acceptance_block = 5  # draft length, for "acceptance"
  config.contexts = "data"  # or "target", "draft": their samples
  config.prompt_length = 64  # tokens of each row before its sample
  config.teacher = "models/pretrained/target" if arg == "draft" else ""
  config.sequence_length = 256
  config.batch_size = 8
  config.num_steps = {"target": 3000, "draft": 1500, "tiny": 20}[arg]
  config.learning_rate = {"target": 1.5e-3, "draft": 4e-3, "tiny": 1e-2}[arg]
  config.warmup_steps = 100 if arg != "tiny" else 1
  config.decay_share = 0.3
  config.weight_decay = 0.05
  config.seed = 0  # of weights and samples
  config.data_seed = 0
  config.mesh = (-1, 1)  # devices on 'data' (-1: all others) and on 'model'
  config.log_every = 25  # 0 means never, also below
  config.validate_every = 100
  config.validation_batches = 0  # only the first ones; 0 for the whole split
  config.checkpoint_every = 100
  config.export_dtype = "bfloat16"
  if arg == "tiny":
    config.sequence_length = 32
    config.batch_size = 4
    config.validation_batches = 2
    config.log_every = config.checkpoint_every = config.validate_every = 5
  return config
