r"""Compares drafts for the embedded target: shapes, objectives or heads.

  python -m launch.studies.drafts --config=configs/draft_study.py:shapes \
    --workdir=W --output=shapes.jsonl
  python -m launch.studies.drafts --config=configs/draft_study.py:objectives \
    --workdir=W --output=objectives.jsonl
  python -m launch.studies.drafts --config=configs/draft_study.py:heads \
    --workdir=W --output=heads.jsonl

Every draft is trained with the same number of floating point operations: of
every shape from random weights; for every objective from the embedded draft, as
DistillSpec and online speculative decoding go on from a trained one (a random
draft's own samples teach nothing). The row `before` of that study is the draft
before. Heads on the target's features begin as configs/train_head.py says, and
the draft model beside them with random weights; at this rate a step is one of
1,024 tokens, so that there are enough of them. The table is drawn by
`python -m launch.tables drafts FILE.jsonl`.

What bounds an EAGLE-3 head of any chat model, on text of its own and questions
that are asked it (one unrolled step, 200 steps of training; one row has 400):

  python -m launch.studies.drafts --config=configs/draft_study.py:bounds \
    --config.train.teacher=MODEL --config.decode.target=MODEL \
    --config.train.dataset=FOLDER --config.train.features=FEATURES \
    --config.questions=FILE --workdir=W --output=bounds.jsonl

FOLDER is of `launch.tools.self_data`, FEATURES of `launch.tools.features`.
`:text` is its first row alone, for FEATURES that were made of less of the text
(`--first_tokens`).
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
_HEADS = {"Medusa": "medusa", "EAGLE-1": "eagle", "EAGLE-3": "eagle3"}
_OBJECTIVES = {
  "before": dict(num_steps=0),
  "next_token, data": dict(objective="next_token", contexts="data"),
} | {
  f"{objective}, {contexts}": dict(objective=objective, contexts=contexts)
  for objective in ("forward_kl", "reverse_kl", "total_variation", "acceptance")
  for contexts in ("data", "target", "draft")
}
# Of SmolLM2's size: what is wider, or has other words, than its usual head.
_BOUNDS = {
  "as it is": {},
  "another seed": dict(seed=1),
  "400 steps": dict(num_steps=400),
  "MLP of 3,072": dict(head=dict(mlp_dim=3072)),
  "random weights": dict(head=dict(start="random")),
  "reverse KL": dict(objective="reverse_kl"),
  "total variation": dict(objective="total_variation"),
  "next token": dict(objective="next_token"),
  "2,048 words": dict(head=dict(draft_vocab_size=2048)),
  "32,768 words": dict(head=dict(draft_vocab_size=32768)),
}
_BOUNDS_HEAD = dict(depth=1, draft_vocab_size=8192)


def get_config(arg: str = "shapes") -> ml_collections.ConfigDict:
  """The study, see above; tests have tiny ones."""
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
  elif arg == "heads":
    drafts = {"draft model": {}} | {
      name: dict(kind=kind) for name, kind in _HEADS.items()
    }
    drafts["EAGLE-3"]["head"] = dict(draft_vocab_size=2048)
    base.batch_size, base.warmup_steps = 4, 20
    base.validation_batches, base.checkpoint_every = 8, 25
  elif arg in ("bounds", "text"):
    shared = dict(kind="eagle3", num_steps=200)
    drafts = {
      name: shared | changes | {"head": _BOUNDS_HEAD | changes.get("head", {})}
      for name, changes in _BOUNDS.items()
      if arg == "bounds" or not changes
    }
    base.features, base.compute_dtype = "", ""
    base.batch_size, base.sequence_length = 2, 512
    base.validation_batches, base.checkpoint_every = 8, 100
  elif arg in ("tiny", "tiny_heads"):
    tiny = train_embedded.get_config("tiny")
    tiny.tokenizer = base.tokenizer
    tiny.teacher = base.teacher
    base = tiny
    drafts = {
      "a": dict(objective="forward_kl"),
      "b": dict(objective="acceptance", contexts="draft", prompt_length=8),
    }
    if arg == "tiny_heads":
      drafts = {"Medusa": dict(kind="medusa")}
  else:
    raise ValueError(
      f"expected shapes, objectives, heads, bounds, text or tiny, got {arg!r}"
    )
  config.train = base
  # Names to what is changed in `train`.
  config.drafts = ml_collections.ConfigDict(drafts)
  # Floating point operations that each draft is trained with.
  config.flops = {"shapes": 2e13, "tiny": 4e9, "tiny_heads": 2e10}.get(
    arg, 8e12
  )
  # What each is then asked to decode, at both temperatures: validation prompts,
  # or the first turns of questions of Spec-Bench's form, of each category its
  # share, in the model's chat template.
  config.questions = ""
  config.decode = embedded.get_config()
  config.tokens = 5
  config.num_prompts = 32
  config.prompt_tokens = 96
  config.temperatures = (0.0, 1.0)
  # Timings of every batch; 0 for none, but for acceptance by position. What a
  # pass costs is not changed by objectives.
  config.rounds = 3 if arg == "shapes" else 1
  if arg in ("heads", "bounds", "text", "tiny_heads"):
    config.rounds = 0
    config.tokens = 4
    config.decode.batch_size = 8
    config.num_prompts = 64
  if arg in ("bounds", "text"):
    config.tokens = 2
    config.decode.max_new_tokens = 64
    config.prompt_tokens = 512
  if arg.startswith("tiny"):
    config.num_prompts = 2
    config.decode.max_new_tokens = 8
  if arg == "tiny":
    config.tokens = 2
  return config
