"""Study of targets in few bits: their distance from the target on real text.

  python -m launch.studies.precision --config=configs/smollm2.py \
    --output=OUT.json
  python -m launch.studies.precision --config=configs/embedded.py \
    --precisions='stored(int8), stored(int4(group=64), cache=int8)' \
    --output=OUT.json

Texts are Python that the embedded pair was not trained on, or --prompts, cut to
--tokens_of_text; shorter ones are left out. At every token both models have
read the same text. OUT.json has for each precision, beside the bytes of its
weights: the Kullback-Leibler divergence from the target's law (nats) and the
total variation; the share of tokens of the same greedy choice; the perplexity;
and, if the config's drafter is a model, the chance of its tokens to be accepted
(Leviathan et al., 2023, theorem 3.5: one minus the total variation).

As the draft of that target (`quantised_self`) a precision's own acceptance is
one minus its total variation, at temperature 0 the greedy agreement. From those
follow the tokens a call of chains of four, as if what is drafted were the text,
and by the roofline the tokens a second on v5e-8, one row on each chip:
predictions, of bfloat16 where it is not in few bits. 95% intervals are over
texts. `launch.tables precision` draws the table.
"""

import dataclasses
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from launch import cli, hardware, prompts, provenance, report, results
from launch.assembly import precision, registry
from launch.planning import networks, roofline
from launch.training import corpus
from models import checkpoints
from models.networks import lowbits
from models.networks.lowbits import Format
from specjax import calls, intervals, low_cache
from specjax.calls import Grammar
from specjax.types import LanguageModel

cli.reads(cli.CONFIG, cli.PROMPTS, cli.OUTPUT)
_PRECISIONS = flags.DEFINE_string(
  "precisions",
  "stored(int8), stored(int8(group=32)), stored(fp8), stored(int4), "
  "stored(int4(group=64)), stored(cache=int8), stored(cache=fp8), "
  "stored(int8, cache=int8)",
  "What is compared with the target, calls of stored(weights, cache).",
)
_TEXTS = flags.DEFINE_integer("texts", 16, "Texts, of --prompts all.")
_TOKENS = flags.DEFINE_integer("tokens_of_text", 256, "Tokens of a text.")
_ROWS = 2  # texts of a pass
_DRAFTED = 4  # tokens of a chain
# By name, what each can be.
_PER_TEXT = {
  "kl": (0.0, math.inf),
  "total_variation": (0.0, 1.0),
  "greedy_agreement": (0.0, 1.0),
  "log_perplexity": (0.0, math.inf),
  "block_efficiency": (1.0, _DRAFTED + 1.0),
  "greedy_block_efficiency": (1.0, _DRAFTED + 1.0),
}
_TOPOLOGY = "v5e-8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
  """The storage of a target's weights and cache; None for its dtype."""

  weights: Format | None
  cache: str | None


def stored(weights: Format | None = None, *, cache: str = "") -> Stored:
  """A precision, of weights and of the cache."""
  low_cache.check(cache or None)
  return Stored(weights=weights, cache=cache or None)


PRECISIONS = Grammar(
  kind="precision",
  entries={"stored": stored},
  nested={Format: precision.FORMATS},
)


def logits_of(model: LanguageModel):
  """`(params, i32[B, T]) -> f32[B, T - 1, V]`, of all tokens but the first."""

  def forward(params, tokens):
    batch, length = tokens.shape
    cache = model.init_cache(batch, length)
    return model.apply(params, tokens, cache)[0].logits[:, :-1]

  return jax.jit(forward)


@jax.jit
def compare(target, other, tokens) -> dict[str, jax.Array]:
  """Means over a text, by name `f32[B]`.

  Args:
    target, other: logits, `f32[B, T - 1, V]`.
    tokens: `i32[B, T]`.
  """
  p, q = (jax.nn.log_softmax(x, axis=-1) for x in (target, other))
  said = jnp.take_along_axis(q, tokens[:, 1:, None], axis=-1)[..., 0]
  variation = jnp.sum(jnp.abs(jnp.exp(p) - jnp.exp(q)), axis=-1) / 2
  agree = jnp.argmax(p, -1) == jnp.argmax(q, -1)
  per_token = {
    "kl": jnp.sum(jnp.exp(p) * (p - q), axis=-1),
    "total_variation": variation,
    "greedy_agreement": agree,
    "log_perplexity": -said,
    "block_efficiency": _of_chains(1 - variation),
    "greedy_block_efficiency": _of_chains(agree),
  }
  return {name: jnp.mean(x, axis=1) for name, x in per_token.items()}


def _of_chains(accepted) -> jax.Array:
  """Expected tokens a call of chains that begin at each token.

  Args:
    accepted: chance of each token of a text to be accepted, `f32[B, n]`.

  Returns:
    `f32[B, n - _DRAFTED + 1]`.
  """
  starts = accepted.shape[1] - _DRAFTED + 1
  each = [accepted[:, k : k + starts] for k in range(_DRAFTED)]
  return 1 + jnp.sum(jnp.cumprod(jnp.stack(each).astype(jnp.float32), 0), 0)


@jax.jit
def acceptance(target, draft) -> jax.Array:
  """Mean chance of a draft's token to be accepted, `f32[B]`, of logits."""
  size = min(target.shape[-1], draft.shape[-1])
  p, q = (jax.nn.softmax(x[..., :size], axis=-1) for x in (target, draft))
  return jnp.mean(jnp.sum(jnp.minimum(p, q), axis=-1), axis=1)


def predicted(
  config: Any, how: Stored, slots: int, efficiency: dict[str, float]
) -> dict:
  """Tokens a second on v5e-8 by the roofline, one row on each chip.

  Args:
    config: of the target.
    how: its precision.
    slots: of a row's cache.
    efficiency: tokens a call of its weights as the target's own draft, by name.

  Returns:
    "plain" of the target that is stored so, and, if only weights are in few
    bits, of the target in bfloat16 with that draft by the same names.
  """
  topology = hardware.topology(_TOPOLOGY)

  def seconds(tokens: int, how: Stored) -> float:
    placed = roofline.Placement(
      config=config, num_params=networks.num_params(config), size=1, rows=1,
      slots=slots, weights=how.weights, cache=how.cache,
    )  # fmt: skip
    return roofline.forward(placed, tokens).seconds(topology.chip)

  whole = Stored(weights=None, cache=None)
  joined = {"plain": topology.num_devices / seconds(1, how)}
  if how.weights is not None and how.cache is None:
    cost = _DRAFTED * seconds(1, how) + seconds(_DRAFTED + 1, whole)
    joined |= {
      name: topology.num_devices * tokens / cost
      for name, tokens in efficiency.items()
    }
  return joined


def summarize(of_texts: dict[str, np.ndarray]) -> dict:
  """Means over texts with their intervals, of what `compare` gives a text."""
  row: dict = {}
  for name, limits in _PER_TEXT.items():
    values = of_texts[name]
    ones = np.ones(len(values))
    row |= intervals.ratio(name, [values], [ones], limits=limits)
  row["perplexity"] = float(np.exp(row["log_perplexity"]))
  return row


def measure(
  target: str, dtype, written: list, texts: np.ndarray, *, draft: str = ""
) -> list[dict]:
  """A row for the target, and one for each precision.

  Args:
    target: path of its checkpoint.
    dtype: that it is computed in.
    written: precisions, as calls.
    texts: `i32[n, T]`.
    draft: path of a draft model; "" for none.
  """
  plain = Stored(weights=None, cache=None)
  asked = [("target", plain)]
  asked += [(PRECISIONS.canonical(x), PRECISIONS.make(x)) for x in written]
  load = lambda cache: checkpoints.load(
    target, dtype=dtype, mesh=None, sharding=None, stored=cache
  )
  loaded = {cache: load(cache) for cache in {how.cache for _, how in asked}}
  batches = np.split(texts, range(_ROWS, len(texts), _ROWS))
  whole = loaded[None]
  forward = logits_of(whole.whole())
  expected = [np.asarray(forward(whole.params, batch)) for batch in batches]
  drafted = []
  if draft:
    other = checkpoints.load(draft, dtype=dtype, mesh=None, sharding=None)
    forward = logits_of(other.whole())
    drafted = [np.asarray(forward(other.params, batch)) for batch in batches]
  rows = []
  for name, how in asked:
    network = loaded[how.cache]
    if how.weights is not None:
      network = network.lowered(how.weights)
    forward = logits_of(network.whole())
    logits = [np.asarray(forward(network.params, x)) for x in batches]
    parts = [
      compare(*three) for three in zip(expected, logits, batches, strict=True)
    ]
    joined = {n: np.concatenate([x[n] for x in parts]) for n in _PER_TEXT}
    num_bytes = sum(map(lowbits.num_bytes, jax.tree.leaves(network.params)))
    row = {"precision": name, "weight_bytes": num_bytes} | summarize(joined)
    gains = {n: row[n] for n in ("block_efficiency", "greedy_block_efficiency")}
    row[_TOPOLOGY] = predicted(network.config, how, texts.shape[1], gains)
    if drafted:
      pairs = zip(logits, drafted, strict=True)
      row["draft_acceptance"] = float(
        np.mean(np.concatenate([acceptance(*pair) for pair in pairs]))
      )
    rows.append(row)
  return rows


def table(results: dict[str, dict]) -> str:
  """Results by their files, as a Markdown table."""
  return report.columns(
    [
      {"target": pathlib.Path(path).stem} | row
      for path, result in results.items()
      for row in result["rows"]
    ],
    {
      "target": lambda x: x["target"],
      "stored as": lambda x: f"`{x['precision']}`",
      "weights, MB": lambda x: f"{x['weight_bytes'] / 1e6:.1f}",
      "KL, nats a token": lambda x: (
        report.estimate(x, "kl", ".2g") if x["kl"] > 1e-6 else "0"
      ),
      "total variation": lambda x: f"{x['total_variation']:.4f}",
      "greedy agreement": lambda x: f"{x['greedy_agreement']:.4f}",
      "perplexity": lambda x: f"{x['perplexity']:.3f}",
      "its draft accepted": lambda x: (
        f"{x['draft_acceptance']:.3f}" if "draft_acceptance" in x else ""
      ),
      "v5e-8, tok/s": lambda x: _speed(x, "plain"),
      "four drafted": lambda x: _own(x, "block_efficiency"),
      "greedy": lambda x: _own(x, "greedy_block_efficiency"),
    },
  )


def _speed(row: dict, name: str) -> str:
  """Predicted tokens a second; "" where none are."""
  rates = row.get(_TOPOLOGY, {})
  return f"{rates[name]:,.0f}" if name in rates else ""


def _own(row: dict, name: str) -> str:
  """Tokens a call as the target's own draft, and tokens a second."""
  speed = _speed(row, name)
  return speed and f"{row[name]:.2f}, {speed}"


def run(_) -> int:
  """The command."""
  config, tokens = cli.CONFIG.value, _TOKENS.value
  if tokens < _DRAFTED + 1 or _TEXTS.value < 1:
    raise cli.UserError(f"texts of {_DRAFTED + 1} tokens at least are needed")
  results.check({"--output": cli.OUTPUT.value})
  written = calls.parse_list(_PRECISIONS.value)
  for one in written:
    PRECISIONS.make(one)
  tokenizer = checkpoints.load_tokenizer(config.target)
  if cli.PROMPTS.value:
    items = prompts.all_of(
      cli.PROMPTS.value, tokenizer, max_tokens=config.max_length
    )
    ids = [item.token_ids[:tokens] for item in items]
  else:
    texts = corpus.held_out_prompts(_TEXTS.value, num_lines=tokens // 4)
    ids = [tokenizer.encode(text)[:tokens] for text in texts]
  ids = [text for text in ids if len(text) == tokens]
  if not ids:
    raise cli.UserError(f"no text has {tokens} tokens")
  drafting = registry.of(config)
  draft = drafting.checkpoint if drafting.reads == "model" else ""
  rows = measure(
    config.target, jnp.dtype(config.dtype), written, np.array(ids), draft=draft
  )
  models = {"target": config.target} | ({"draft": draft} if draft else {})
  made_by = provenance.record(
    models=provenance.hashes(models),
    prompts=cli.PROMPTS.value,
    texts=[str(text) for text in ids],
  )
  result = {
    "rows": rows, "num_texts": len(ids), "tokens_of_text": tokens,
    "dtype": config.dtype, **made_by,
  }  # fmt: skip
  results.write_json(cli.OUTPUT.value, result)
  print(table({cli.OUTPUT.value: result}))
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
