r"""Which draft for the embedded target: its shape, or what it is trained for.

  python -m launch.studies.drafts --config=configs/draft_study.py:shapes \
    --workdir=W --output=shapes.jsonl
  python -m launch.studies.drafts --config=configs/draft_study.py:objectives \
    --workdir=W --output=objectives.jsonl

Every draft is trained with the same number of floating point operations: of
every shape from random weights; for every objective from the embedded draft, as
DistillSpec and online speculative decoding go on from a trained one (a random
draft's own samples teach nothing). The row `before` of that study is the draft
before. The table is drawn by `python -m launch.tables drafts FILE.jsonl`.
"""

import ml_collections

from configs import embedded, train_embedded

# About equal in size, embeddings included: wide and shallow to deep and narrow.
_SHAPES = {
  "192x1": dict(embed_dim=192, num_layers=1, num_heads=6, mlp_dim=512),
  "160x2": dict(embed_dim=160, num_layers=2, num_heads=5, mlp_dim=448),
  "144x4": dict(embed_dim=144, num_layers=4, num_heads=4, mlp_dim=384),
  "112x8": dict(embed_dim=112, num_layers=8, num_heads=4, mlp_dim=288),
}
_OBJECTIVES = {
  "before": dict(num_steps=0),
  "next_token, data": dict(objective="next_token", contexts="data"),
} | {
  f"{objective}, {contexts}": dict(objective=objective, contexts=contexts)
  for objective in ("forward_kl", "reverse_kl", "total_variation", "acceptance")
  for contexts in ("data", "target", "draft")
}


def get_config(arg: str = "shapes") -> ml_collections.ConfigDict:
  """The study; `arg` is "shapes", "objectives" or "tiny" (a test's)."""
  config = ml_collections.ConfigDict()
  base = train_embedded.get_config("draft")
  if arg == "shapes":
    drafts = {
      name: dict(
        model=shape
        | dict(
          num_kv_heads=shape["num_heads"],
          head_dim=shape["embed_dim"] // shape["num_heads"],
        )
      )
      for name, shape in _SHAPES.items()
    }
  elif arg == "objectives":
    drafts = _OBJECTIVES
    base.init_from = "models/pretrained/draft"
    base.learning_rate, base.warmup_steps = 5e-4, 20
    base.data_seed = 1  # not once more the batches it began with
  elif arg == "tiny":
    tiny = train_embedded.get_config("tiny")
    tiny.tokenizer = base.tokenizer
    tiny.teacher = base.teacher
    base = tiny
    drafts = {
      "a": dict(objective="forward_kl"),
      "b": dict(objective="acceptance", contexts="draft", prompt_length=8),
    }
  else:
    raise ValueError(f"expected shapes, objectives or tiny, got {arg!r}")
  config.train = base
  # Names to what is changed in `train`.
  config.drafts = ml_collections.ConfigDict(drafts)
  # Floating point operations that each draft is trained with.
  config.flops = {"shapes": 2e13, "objectives": 8e12, "tiny": 4e9}[arg]
  # What each is then asked to decode: validation prompts, at both temperatures.
  config.decode = embedded.get_config()
  config.decode.num_speculative_tokens = 5
  config.num_prompts = 32 if arg != "tiny" else 2
  config.prompt_tokens = 96
  config.temperatures = (0.0, 1.0)
  # Objectives do not change what a pass costs.
  config.rounds = 3 if arg == "shapes" else 1
  if arg == "tiny":
    config.decode.max_new_tokens = 8
    config.decode.num_speculative_tokens = 2
  return config
