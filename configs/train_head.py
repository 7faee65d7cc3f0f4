r"""Trains a draft head on the features of a frozen target.

To train the heads of the embedded target:

  python -m launch.train --config=configs/train_head.py:eagle3 \
    --config.head.draft_vocab_size=2048 \
    --workdir=/tmp/specjax/eagle3 --export=models/pretrained/eagle3
  python -m launch.train --config=configs/train_head.py:medusa \
    --workdir=/tmp/specjax/medusa --export=models/pretrained/medusa

`:eagle`, `:p_eagle`, `:mtp` (multi-token prediction), `:dflash` (JetSpec's with
--config.head.causal --config.head.depth_decay=1), `:dflash2` and `:dspark` are
the other kinds. Most targets can have a head (docs/families.md). These train
SmolLM2's, first on plain text, then on its own conversations:

  SMOLLM2=$(python -m launch.tools.fetch_smollm2)
  python -m launch.train --config=configs/train_head.py:eagle3 \
    --config.target=$SMOLLM2 --config.head.draft_vocab_size=8192 \
    --config.batch_size=4 --workdir=W --export=HEAD
  python -m launch.tools.self_data --config=configs/smollm2.py --output=FOLDER
  python -m launch.train --config=configs/train_head.py:eagle3 \
    --config.target=$SMOLLM2 --config.init_from=HEAD \
    --config.dataset=FOLDER --workdir=W2 --export=HEAD2

For several epochs or heads, compute the target's features once
(`launch.tools.features`) and add --config.features=FEATURES.
"""

import ml_collections

from configs import train_embedded

_KINDS = (
  "eagle", "eagle3", "p_eagle", "mtp", "medusa", "dflash", "dflash2", "dspark",
)  # fmt: skip


def get_config(arg: str = "eagle3") -> ml_collections.ConfigDict:
  """The experiment; `arg` is the kind of the head."""
  if arg not in _KINDS:
    raise ValueError(f"expected one of {list(_KINDS)}, got {arg!r}")
  config = train_embedded.get_config("draft")
  for name in ("model", "tokenizer", "teacher", "acceptance_block"):
    del config[name]
  # The frozen model to draft for.
  config.target = "models/pretrained/target"
  head = config.head = ml_collections.ConfigDict()
  head.kind = arg
  # Draft length to train for: unrolled steps of EAGLE or MTP, Medusa's heads,
  # masks of a block or of P-EAGLE. Each depth's loss has depth_decay times the
  # weight of the depth before; EAGLE-3 uses 0.8.
  head.depth = 4
  head.depth_decay = 0.8
  blocks = arg in ("dflash", "dflash2", "dspark")
  if arg in ("eagle3", "p_eagle", "dflash", "dspark"):
    # Size of the draft vocabulary, the most frequent tokens of the training
    # data; 0 for the target's, as in DFlash.
    head.draft_vocab_size = 0
  if arg in ("eagle3", "p_eagle"):
    # Layers whose inputs are fused; () for EAGLE-3's: 2, N / 2 and N - 3.
    head.layers = ()
    head.mlp_dim = 0  # its MLP's hidden width; 0 for the target's
  if arg == "p_eagle":
    # As many depths as `speculators` trains. Positions weigh the same at every
    # depth; a depth trains 0.7 of those before it, but at least a fifth.
    head.depth = 8
    head.depth_decay = 1.0
    head.num_layers = 4
  if blocks:
    # Drafted tokens per block, and DFlash's decay for 7: exp(-1 / 4).
    head.depth = 7
    head.depth_decay = 0.7788
    head.num_layers = 2  # of the head
    # Layers whose inputs are fused; () for as many as the head has, evenly
    # spaced.
    head.layers = ()
    # Blocks per row of text, at random positions in every step.
    head.anchors = 32
  if arg == "dflash":
    # Causal blocks, for JetSpec, whose depth_decay is 1.
    head.causal = False
  if arg == "dspark":
    # The Markov head's kind ("vanilla", "gated", "rnn"), and its rank.
    head.markov = "vanilla"
    head.rank = 256
  if arg == "dflash2":
    # Channels that share a kernel's change; channels of the selector's codes.
    head.group = 16
    head.rank = 256
  if arg == "mtp":
    # As in FastMTP.
    head.depth = 3
    head.depth_decay = 0.6
  if arg == "eagle":
    # Weight in the loss of the distance to the target's next feature.
    head.feature_weight = 1.0
  # A head to start from, instead of the target's last layer; it keeps its draft
  # vocabulary.
  config.init_from = ""
  # "forward_kl", "reverse_kl", "total_variation", "next_token", DSpark's
  # "next_token_and_tv", or "acceptance" of a draft of `head.depth` tokens: see
  # specjax.training.losses.
  published = {"dspark": "next_token_and_tv", "dflash2": "next_token"}
  config.objective = published.get(arg, "forward_kl")
  config.contexts = "data"  # or "target": its samples after each row's prompt
  # Dtype of the head's computations in training: "bfloat16" where it is fast,
  # "" for float32. Parameters, loss sums and validation are always float32.
  config.compute_dtype = ""
  # A folder of the target's features made by `launch.tools.features`; ""
  # computes them in every step.
  config.features = ""
  config.num_steps = 1500
  config.learning_rate = 1e-3
  config.warmup_steps = 50
  return config
