r"""Trace of a draft head along greedy texts, for comparison with its source.

  python -m launch.tools.head_trace --output=TRACE.json --prompts=IN.jsonl \
    --config=configs/huggingface.py:target=DIR --config.drafter='eagle3("HEAD")'

The formats of heads are tested on files made for it; who has a real checkpoint
settles with this whether it is read as it was meant. TRACE.json holds, of every
prompt, its token ids, its greedy completion, and for the first rounds of a
chain what the head says at each drafted position when it is fed its own
likeliest tokens: the --top tokens and their log-probabilities (temperature 1,
nothing truncated), and how many of the chain the target accepts; and of the
features that the head reads at the last token but one of the prompt, a norm and
a few numbers of each part. The same of the authors' code on the same token ids
must agree to the rounding of the two: another layer's feature, one before a
norm in place of one after, or one token's beside another's, is seen at once.

"block_efficiency" is that of the config's own drafter (tokens a target call, at
temperature 0, all prompts), and "literature" what was published for such heads:
a port that is well below it is wrong somewhere. Published numbers are of whole
benchmarks, mostly MT-bench, so give its first turns as --prompts ("messages",
for a chat model).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from launch import cli, prompts, provenance, results
from launch.assembly import pair, registry
from launch.assembly.pair import Pair
from launch.prompts import Prompt
from models.formats.head_checkpoints import Head
from specjax import random
from specjax.runtime import engine
from specjax.runtime.requests import make_batches
from specjax.warp import make_sampling

cli.reads(cli.CONFIG, cli.PROMPTS, cli.OUTPUT)
_ROUNDS = flags.DEFINE_integer(
  "trace_rounds", 8, "Rounds of each prompt to write.", lower_bound=1
)
_TOP = flags.DEFINE_integer(
  "top", 5, "Tokens to write of each law.", lower_bound=1
)

_OTHER = "no number is known here: see the head's own page"
# Mean tokens a target call, the bonus counted, by kind of head.
LITERATURE: dict[str, list[tuple[str, float | None]]] = {
  "eagle3": [
    ("Llama-3.1-8B-Instruct, MT-bench, T=0, tree (the paper)", 6.13),
    ("the same, tree, 8 steps (SGLang, pull request 4247)", 5.36),
    ("the same, tree, 5 steps (SGLang, pull request 4247)", 4.68),
    ("the same, chain of 7 (vLLM, issue 26191)", 3.53),
    ("Qwen3-8B, MT-bench, few draft tokens (AngelSlim in vLLM)", 1.97),
    ("Vicuna-13B, Spec-Bench, T=0, tree", 5.71),
  ],
  "eagle": [
    ("Vicuna-7B, Spec-Bench, T=0, EAGLE-2's tree", 4.34),
    ("Vicuna-7B, Spec-Bench, T=0, EAGLE-1's tree", 3.58),
    ("Llama-3-8B, chain of 4 (vLLM, pull request 16035)", 2.08),
    ("Llama-3-8B, chain of 2 (vLLM, pull request 16035)", 1.89),
  ],
  "medusa": [
    ("Vicuna-7B, Spec-Bench, T=0, tree", 2.31),
    ("Vicuna-13B, Spec-Bench, T=0, tree", 2.39),
  ],
  "dflash": [(_OTHER, None)],
  "blockwise": [(_OTHER, None)],
  "assistant": [(_OTHER, None)],
  "mtp": [(_OTHER, None)],
}


def rounds_of(
  built: Pair, prompt: Prompt, *, count: int, top: int, max_new_tokens: int
) -> list[dict[str, Any]]:
  """The head's drafts in the first rounds of a prompt's greedy text.

  Args:
    built: with a chain for its drafter.
    prompt: one prompt.
    count: rounds at most.
    top: tokens of each law.
    max_new_tokens: of the text.

  Returns:
    For each round `position` (tokens before it), `newest` (the last of them),
    `drafted` (for each depth its token, the likeliest, and `top`, pairs of a
    token and its log-probability) and `accepted`, how many the target accepts.
  """
  decoder = built.decoder
  length = len(prompt.token_ids)
  sampling = make_sampling(1, temperature=0.0)
  state = jax.jit(decoder.init, static_argnames="buffer_length")(
    built.params, jnp.asarray([prompt.token_ids]), jnp.array([length]),
    random.row_keys(jax.random.key(0), jnp.zeros(1, jnp.int32)),
    buffer_length=length + max_new_tokens, max_new_tokens=max_new_tokens,
    sampling=sampling, stop_tokens=jnp.asarray(built.stop_tokens, jnp.int32),
  )  # fmt: skip

  def likeliest(params, state):
    """A draft of the likeliest tokens, from laws that are not sharpened."""
    warm = dataclasses.replace(state, sampling=make_sampling(1))
    pick = lambda numbers, nodes, laws: jnp.argmax(laws, -1).astype(jnp.int32)
    draft, _, _ = decoder.propose(params, warm, pick)
    values, tokens = jax.lax.top_k(draft.log_probs[0, 1:], top)
    return draft.tokens[0], values, tokens

  likeliest, step = jax.jit(likeliest), jax.jit(decoder.step)
  rounds: list[dict[str, Any]] = []
  while len(rounds) < count and not state.done[0]:
    drafted, values, tokens = jax.device_get(likeliest(built.params, state))
    before = int(state.length[0])
    state, info = step(built.params, state)
    rounds.append(
      {
        "position": before,
        "newest": int(drafted[0]),
        "drafted": [
          {"token": int(token), "top": _pairs(tokens[i], values[i])}
          for i, token in enumerate(drafted[1:])
        ],
        "accepted": int(info.node[0]),
      }
    )
  return rounds


def _pairs(tokens: np.ndarray, values: np.ndarray) -> list[list]:
  """Tokens with their log-probabilities; those without any mass left out."""
  return [
    [int(t), float(v)]
    for t, v in zip(tokens, values, strict=True)
    if np.isfinite(v)
  ]


def features_of(built: Pair, head: Head, prompt: Prompt) -> list[dict]:
  """The head's inputs at the prompt's last token but one, part by part."""
  if len(prompt.token_ids) < 2:
    return []
  tokens = jnp.asarray([prompt.token_ids[:-1]])
  target = built.decoder.target
  output, _ = jax.jit(target.apply)(
    built.params.target, tokens, target.init_cache(1, tokens.shape[1])
  )
  parts = np.split(
    np.asarray(output.features[0, -1], np.float32), len(head.features)
  )
  return [
    {
      "layer": layer,
      "norm": float(np.linalg.norm(part)),
      "first": part[:4].tolist(),
    }
    for layer, part in zip(head.features, parts, strict=True)
  ]


def run(_) -> int:
  """The command."""
  results.check({"--output": cli.OUTPUT.value}, stdout=True)
  config = cli.CONFIG.value
  if config.mesh:
    raise cli.UserError("a trace is made on one device: give no config.mesh")
  config.temperature = 0.0
  models = pair.load(config)
  head = models.draft
  if not isinstance(head, Head):
    raise cli.UserError(f"no draft head drafts: {config.drafter!r}")
  built = pair.assemble(config, models)
  drawn = registry.chain(
    head.kind, built.drafting.checkpoint, built.drafting.tree.max_depth
  )
  drawn = dataclasses.replace(drawn, rule="token")
  chain = pair.assemble(config, models, drafting=drawn)
  room = built.room(config.max_new_tokens)
  items = prompts.all_of(cli.PROMPTS.value, built.tokenizer, max_tokens=room)
  decoding = pair.engine_of(config, built)
  done: dict[str, engine.Completion] = {}
  for batch in make_batches(
    items, batch_size=config.batch_size, max_width=room
  ):
    decoding.compile(batch)
    completions, _ = decoding.run(batch)
    done |= dict(zip([p.key for p in batch.prompts], completions, strict=True))
  tokens = sum(len(c.token_ids) for c in done.values())
  calls = sum(c.num_target_calls for c in done.values())
  result = {
    "head": {"kind": head.kind, "features": list(head.features)},
    "block_efficiency": tokens / calls,
    "num_tokens": tokens,
    "num_target_calls": calls,
    "literature": [
      {"of": what, "block_efficiency": value}
      for what, value in LITERATURE[head.kind]
    ],
    "prompts": [
      {
        "id": item.id,
        "token_ids": list(item.token_ids),
        "greedy": done[item.key].token_ids,
        "features": features_of(chain, head, item),
        "rounds": rounds_of(
          chain, item, count=_ROUNDS.value, top=_TOP.value,
          max_new_tokens=config.max_new_tokens,
        ),
      }
      for item in items
    ],
    **provenance.of_config(config, texts=[item.text for item in items]),
  }  # fmt: skip
  results.write_json(cli.OUTPUT.value, result)
  if cli.OUTPUT.value != results.STDOUT:
    print(
      f"{tokens / calls:.2f} tokens a target call over {len(items)} prompts; "
      "the literature has for such heads"
    )
    for what, value in LITERATURE[head.kind]:
      print(f"  {what}" + ("" if value is None else f": {value}"))
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
