#!/bin/sh
# Measures what docs/results.md says of a GPU, in at most ten minutes of one
# H200 that does nothing else: passes of an 8B shape and of SmolLM2, with what
# bounds them, and SmolLM2's decoding. Wants the packages of setup.py's `cuda`
# and the file of `launch.tools.fetch_smollm2`; writes to build/gpu.
#
#   docs/measurements/gpu.sh
#   SHAPE=pythia-70m LAYERS=1 ALL=2 SMALL=pythia-70m TOKENS=8 ROWS=2 \
#     docs/measurements/gpu.sh      whether all of it runs, on any machine
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-.venv/bin/python}
out=build/gpu
mkdir -p "$out" || exit 1
shape=${SHAPE:-llama-3.1-8b} small=${SMALL:-smollm2-135m}
layers=${LAYERS:-8} all=${ALL:-32} tokens=${TOKENS:-256} rows=${ROWS:-64}

echo "a copy, and the products of $layers layers of $shape alone"
"$python" - "$shape" "$layers" <<'PYTHON' || exit 1
import statistics
import sys
import time

import jax
import jax.numpy as jnp

from configs import shapes

shape, layers = shapes.SHAPES[sys.argv[1]], int(sys.argv[2])
wide, hidden = shape["hidden_size"], shape["intermediate_size"]
heads = shape["num_attention_heads"]
keys = wide // heads * shape.get("num_key_value_heads", heads)
sizes = [
  (wide, wide), (wide, keys), (wide, keys), (wide, wide),
  (wide, hidden), (wide, hidden), (hidden, wide),
] * layers  # fmt: skip


def milliseconds(function, *arguments, times=20):
  """Median of some timings of a loop of so many calls, one call's."""

  @jax.jit
  def loop(*arguments):
    return jax.lax.fori_loop(
      0, times, lambda _, x: function(x, *arguments[1:]), arguments[0]
    )

  taken = []
  for _ in range(6):
    start = time.perf_counter()
    jax.block_until_ready(loop(*arguments))
    taken.append(1e3 * (time.perf_counter() - start) / times)
  return statistics.median(taken[1:])


large = jnp.ones(sum(a * b for a, b in sizes), jnp.bfloat16)
took = milliseconds(lambda x: x + 1, large)
print(f"  copy: {took:.3f} ms, {4 * large.size / took / 1e6:.0f} GB/s")
del large
weights = [jnp.full(size, 0.01, jnp.bfloat16) for size in sizes]


def chain(*before):
  """All products, each of as many channels of the last as it reads."""

  def products(x, weights):
    rows = len(x)
    for weight in weights:
      x = jnp.resize(x, (rows, len(weight)))
      for step in before:
        x = step(x)
      x = (x @ weight)[:rows]
    return jnp.resize(x, (rows, wide))

  return products


def normed(x):
  """As before a layer's products, in float32."""
  y = x.astype(jnp.float32)
  mean = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
  return (y * jax.lax.rsqrt(mean + 1e-5)).astype(x.dtype)


barrier = jax.lax.optimization_barrier
to_eight = lambda x: barrier(jnp.pad(x, ((0, -len(x) % 8), (0, 0))))
for rows, what, *before in (
  (1, "tokens"), (8, "tokens"), (64, "tokens"), (1, "padded to 8", to_eight),
  (1, "normed", normed), (1, "normed, a barrier", normed, barrier),
  (1, "normed, padded to 8", normed, to_eight),
):  # fmt: skip
  x = jnp.ones((rows, wide), jnp.bfloat16)
  took = milliseconds(chain(*before), x, weights)
  read = 2 * sum(weight.size for weight in weights) / took / 1e6
  print(f"  {rows:2} {what}: {took:.3f} ms, {read:.0f} GB/s")
PYTHON

passes() { # NAME FLAG...
  name=$1
  shift
  echo "passes: $name"
  "$python" -m launch.tools.passes --output="$out/$name.json" --overwrite "$@" \
    2>"$out/$name.log" || {
    tail -n 3 "$out/$name.log" >&2
    exit 1
  }
}

passes separate --target="$shape" --layers="$layers" --batch_sizes=1,8 \
  --widths=1,8 --profile="$out/trace"
passes stacked --target="$shape" --layers="$layers" --batch_sizes=1,8 \
  --widths=1,8 --stacked
passes whole --target="$shape" --layers="$all" --widths=1,8,32
passes whole-stacked --target="$shape" --layers="$all" --widths=1,32 --stacked
passes small --target="$small" --widths=1,4,8 --profile="$out/trace-small"

"$python" - "$rows" >"$out/prompts.jsonl" <<'PYTHON' || exit 1
import json
import sys

ASKED = (
  "Explain how a bicycle stays upright.", "Write a letter to a landlord.",
  "Why is the sky blue?", "Plan a week of dinners for two.",
  "Describe the water cycle.", "Tell a story of a lighthouse.",
  "What is a binary tree?", "Compare trains with planes.",
)  # fmt: skip
for i in range(int(sys.argv[1])):
  content = f"{ASKED[i % 8]} Begin with point {i // 8 + 1}."
  print(json.dumps({"messages": [{"role": "user", "content": content}]}))
PYTHON
head -n 8 "$out/prompts.jsonl" >"$out/few.jsonl"

systems='plain, eagle3(tokens=3), repeats(eagle3(tokens=3), tokens=7)'
for tree in 'tokens=4, tree=dynamic(24)' 'tokens=5, tree=dynamic(60)'; do
  systems="$systems, with_rule(eagle3($tree), match)"
done

decoding() { # NAME PROMPTS ROWS
  echo "decoding SmolLM2: $1"
  "$python" -m launch.evaluate --config=configs/smollm2.py:gpu \
    --prompts="$out/$2.jsonl" --systems="$systems" \
    --config.max_new_tokens="$tokens" --batch_sizes="$3" --timing=none \
    --overwrite --output="$out/$1.json" >"$out/$1.log" 2>&1 || {
    tail -n 3 "$out/$1.log" >&2
    exit 1
  }
  grep '^|' "$out/$1.md" | head -n 12
}

decoding one few 1
decoding many prompts "$rows"
