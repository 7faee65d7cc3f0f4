r"""Trains an encoder-decoder, and drafters for it, on pairs of texts.

The folder W has train.jsonl and validation.jsonl, lines {"input", "output"}.
Train the verifier, decode its outputs for the training inputs (sequence-level
distillation), and train two drafters of equal size, autoregressive and block:

  python -m launch.train --config=configs/train_t5.py:verifier,$W \
    --workdir=$W/verifier-run --export=$W/verifier
  head -n 60000 $W/train.jsonl > $W/asked.jsonl
  python -m launch.decode --config=configs/t5.py:target=$W/verifier \
    --config.drafter=plain --config.batch_size=64 \
    --config.max_new_tokens=40 --nobaseline --prompts=$W/asked.jsonl \
    --output=$W/said.jsonl
  python -m launch.train --config=configs/train_t5.py:draft,$W \
    --workdir=$W/draft-run --export=$W/draft
  python -m launch.train --config=configs/train_t5.py:block,$W \
    --workdir=$W/block-run --export=$W/block

`:block_6_6,W` has six layers on either side, as in SpecDec's released script;
`:tiny,W` and `:tiny_block,W` train toys in seconds.
"""

import ml_collections

_COMMON = dict(
  vocab_size=512, embed_dim=128, num_heads=4, head_dim=32, mlp_dim=384,
  activation="gelu_tanh", gated_mlp=True, tied_embeddings=False,
  scale_outputs=False,
)  # fmt: skip
# Encoder and decoder layers; drafters are deep and shallow, as in the paper.
_LAYERS = {
  "verifier": (4, 4), "draft": (2, 1), "block": (2, 1), "block_6_6": (6, 6),
  "tiny": (1, 1), "tiny_block": (1, 1),
}  # fmt: skip


def get_config(arg: str = "verifier,.") -> ml_collections.ConfigDict:
  """The experiment; `arg` is a name in the list above and the data's folder."""
  name, _, folder = arg.partition(",")
  if name not in _LAYERS or not folder:
    raise ValueError(
      f"expected NAME,FOLDER with a name of {sorted(_LAYERS)}, got {arg!r}"
    )
  encoder, decoder = _LAYERS[name]
  config = ml_collections.ConfigDict()
  config.kind = "t5_block" if "block" in name else "t5"
  config.model = ml_collections.ConfigDict(
    dict(_COMMON, num_encoder_layers=encoder, num_layers=decoder)
  )
  config.num_masks = 8  # tokens that a block drafter predicts at once
  drafts = name.startswith(("draft", "block"))
  # See launch/training/t5.py.
  config.dataset = f"{folder}/{'asked' if drafts else 'train'}.jsonl"
  config.validation = f"{folder}/validation.jsonl"
  config.answers = f"{folder}/said.jsonl" if drafts else ""
  # The tokenizer's folder; if it is empty, one is trained on the data and saved
  # there. Drafters use the verifier's.
  config.tokenizer = f"{folder}/tokenizer"
  config.input_length = 64  # tokens; longer inputs are cut
  config.output_length = 40
  config.batch_size = 64
  # Devices: batches are split along the first axis, weights along the second.
  config.mesh = (-1, 1)
  config.objective = "cross_entropy"  # the only one here
  config.label_smoothing = 0.1 if config.kind == "t5_block" else 0.0
  config.glance = (0.5, 0.3)  # share of a block's errors revealed to it
  config.num_steps = 6000
  config.learning_rate = 1e-3 if drafts else 7e-4
  config.warmup_steps = 300
  config.decay_share = 0.3
  config.weight_decay = 0.01
  config.seed = 0
  config.data_seed = 0
  config.log_every = 50  # 0 means never, also below
  config.validate_every = 500
  config.validation_batches = 0  # only the first ones; 0 for all
  config.checkpoint_every = 250
  config.export_dtype = "float32"
  if name.startswith("tiny"):
    config.model.update(embed_dim=16, num_heads=2, head_dim=8, mlp_dim=24)
    config.batch_size, config.num_steps, config.warmup_steps = 4, 12, 1
    config.log_every = config.validate_every = config.checkpoint_every = 4
    config.learning_rate, config.validation_batches = 1e-2, 2
    config.num_masks = 4
  return config
