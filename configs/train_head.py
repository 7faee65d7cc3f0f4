r"""Trains a head that drafts from the features of a frozen target.

The heads of the embedded target:

  python -m launch.train --config=configs/train_head.py:eagle3 \
    --config.head.draft_vocab_size=2048 \
    --workdir=/tmp/specjax/eagle3 --export=models/pretrained/eagle3
  python -m launch.train --config=configs/train_head.py:medusa \
    --workdir=/tmp/specjax/medusa --export=models/pretrained/medusa

`:eagle`, `:mtp` (multi-token prediction), `:blockwise` and `:dflash` (DFlash's
blocks) are the other kinds.
Any target that decodes can have one; this is SmolLM2's, first on plain text,
then on its own conversations:

  SMOLLM2=$(python -m launch.tools.fetch_smollm2)
  python -m launch.train --config=configs/train_head.py:eagle3 \
    --config.target=$SMOLLM2 --config.head.draft_vocab_size=8192 \
    --config.batch_size=4 --workdir=W --export=HEAD
  python -m launch.tools.self_data --config=configs/smollm2.py --output=FOLDER
  python -m launch.train --config=configs/train_head.py:eagle3 \
    --config.target=$SMOLLM2 --config.init_from=HEAD \
    --config.dataset=FOLDER --workdir=W2 --export=HEAD2

What is read more than once is better read by the target once
(`launch.tools.features`): then --config.features=FEATURES, beside the
dataset.
"""

import ml_collections

from configs import train_embedded

_KINDS = ("eagle", "eagle3", "mtp", "medusa", "blockwise", "dflash")


def get_config(arg: str = "eagle3") -> ml_collections.ConfigDict:
  """The experiment; `arg` is the kind of the head."""
  if arg not in _KINDS:
    raise ValueError(f"expected one of {list(_KINDS)}, got {arg!r}")
  config = train_embedded.get_config("draft")
  for name in ("model", "tokenizer", "teacher", "acceptance_block"):
    del config[name]
  # The model to draft for: a folder or file that decodes. It is not changed.
  config.target = "models/pretrained/target"
  head = config.head = ml_collections.ConfigDict()
  head.kind = arg
  # Tokens of a draft that are trained: steps of EAGLE's or MTP's unrolled
  # draft, Medusa's and blockwise heads, masks of a block. What the loss of each
  # weighs beside that of the one before it: EAGLE-3 has 0.8.
  head.depth = 4
  head.depth_decay = 0.8
  if arg in ("eagle3", "dflash", "medusa"):
    # Its vocabulary, the most frequent tokens of the training data; 0 for all
    # of the target's, as DFlash's and Medusa's authors have it.
    head.draft_vocab_size = 0
  if arg == "eagle3":
    # Layers whose inputs are fused; () for EAGLE-3's: 2, N / 2 and N - 3.
    head.layers = ()
    head.mlp_dim = 0  # of its MLP's hidden layer; 0 for the target's width
  if arg == "dflash":
    # Masks of a block, and DFlash's weights of one of 8: exp(-1 / 4) a place.
    head.depth = 7
    head.depth_decay = 0.7788
    head.num_layers = 2  # of the head
    # Layers whose inputs are fused; () for as many as the head has, evenly.
    head.layers = ()
    # Blocks of each row of text, at places that are drawn anew in every step.
    head.anchors = 32
  if arg == "mtp":
    # FastMTP's three tokens, and its weights.
    head.depth = 3
    head.depth_decay = 0.6
  if arg == "eagle":
    # Of the distance to the target's next feature, beside the loss of the law.
    head.feature_weight = 1.0
  if arg == "blockwise":
    head.hidden_dim = 0  # of each head's hidden layer; 0 for the target's width
  # A head to begin with, in place of one made of the target's last layer; it
  # keeps its draft vocabulary where the size of another is not given.
  config.init_from = ""
  # "forward_kl", "reverse_kl", "total_variation", "next_token", or "acceptance"
  # of a draft of `head.depth` tokens: see specjax.training.losses.
  config.objective = "forward_kl"
  config.contexts = "data"  # or "target": its samples after each row's prompt
  # What the head computes in while it is trained: "bfloat16" where products of
  # it are fast, "" for float32, which its parameters, sums of the loss, and
  # validation always are.
  config.compute_dtype = ""
  # A folder of the target's features of the dataset, made by
  # `python -m launch.tools.features`; "" computes them in every step.
  config.features = ""
  config.num_steps = 1500
  config.learning_rate = 1e-3
  config.warmup_steps = 50
  return config
