"""How far is a target in few bits from the target, along real text?

  python -m launch.studies.precision --config=configs/smollm2.py \
    --output=OUT.json
  python -m launch.studies.precision --config=configs/embedded.py \
    --precisions='stored(int8), stored(int4(group=64), cache=int8)' \
    --output=OUT.json

Texts are Python that the embedded pair was not trained on, or --prompts, cut to
--tokens_of_text; shorter ones are left out. At every token both models have
read the same text. OUT.json has for each precision, beside the bytes of its
weights: the Kullback-Leibler divergence from the target's law (nats) and the
total variation; the share of tokens of the same greedy choice; the perplexity.
As the draft of that target, its chance to be accepted is one minus the total
variation (Leviathan et al., 2023, theorem 3.5), and at temperature 0 the greedy
agreement. 95% intervals are over texts. `launch.tables precision` draws the
table.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from launch import cli, prompts, provenance, report, results
from launch.build import precision
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
_PER_TEXT = ("kl", "total_variation", "greedy_agreement", "log_perplexity")


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
  per_token = {
    "kl": jnp.sum(jnp.exp(p) * (p - q), axis=-1),
    "total_variation": jnp.sum(jnp.abs(jnp.exp(p) - jnp.exp(q)), axis=-1) / 2,
    "greedy_agreement": jnp.argmax(p, -1) == jnp.argmax(q, -1),
    "log_perplexity": -said,
  }
  return {name: jnp.mean(x, axis=1) for name, x in per_token.items()}


def summarize(of_texts: dict[str, np.ndarray]) -> dict:
  """Means over texts with their intervals, of what `compare` gives a text."""
  row: dict = {}
  for name in _PER_TEXT:
    values = of_texts[name]
    row[name] = float(np.mean(values))
    ends = intervals.ratio_interval(list(values), [1.0] * len(values))
    row[f"{name}_ci"] = None if ends is None else list(map(float, ends))
  row["perplexity"] = float(np.exp(row["log_perplexity"]))
  return row


def measure(target: str, dtype, written: list, texts: np.ndarray) -> list[dict]:
  """A row for the target, and one for each precision.

  Args:
    target: path of its checkpoint.
    dtype: that it is computed in.
    written: precisions, as calls.
    texts: `i32[n, T]`.
  """
  plain = Stored(weights=None, cache=None)
  asked = [("target", plain)]
  asked += [(PRECISIONS.canonical(x), PRECISIONS.make(x)) for x in written]
  load = lambda cache: checkpoints.load(
    target, dtype=dtype, mesh=None, sharding=None, stored=cache
  )
  networks = {cache: load(cache) for cache in {how.cache for _, how in asked}}
  batches = np.split(texts, range(_ROWS, len(texts), _ROWS))
  whole = networks[None]
  forward = logits_of(whole.whole())
  expected = [np.asarray(forward(whole.params, batch)) for batch in batches]
  rows = []
  for name, how in asked:
    network = networks[how.cache]
    if how.weights is not None:
      network = network.lowered(how.weights)
    forward = logits_of(network.whole())
    parts = [
      compare(one, forward(network.params, batch), batch)
      for one, batch in zip(expected, batches, strict=True)
    ]
    found = {n: np.concatenate([x[n] for x in parts]) for n in _PER_TEXT}
    num_bytes = sum(map(lowbits.num_bytes, jax.tree.leaves(network.params)))
    rows.append(
      {"precision": name, "weight_bytes": num_bytes} | summarize(found)
    )
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
    },
  )


def run(_) -> int:
  """The command."""
  config, tokens = cli.CONFIG.value, _TOKENS.value
  if tokens < 2 or _TEXTS.value < 1:
    raise cli.UserError("texts of two tokens at least are needed")
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
  rows = measure(config.target, jnp.dtype(config.dtype), written, np.array(ids))
  made_by = provenance.record(
    models=provenance.checkpoints({"target": config.target}),
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
