#!/bin/sh
# Compares heads of the embedded target after equal training: EAGLE-3, P-EAGLE,
# DFlash 1 and 2, JetSpec and DSpark, as chains and as trees. Each trains for
# SECONDS of a core, compiling not counted, two at a time. Writes to
# build/heads; what is there is not made again.
#
#   docs/measurements/heads.sh [SECONDS]
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-.venv/bin/python}
seconds=${1:-90}
out=build/heads
mkdir -p "$out" || exit 1
export PYTHONPATH=. JAX_COMPILATION_CACHE_DIR="$PWD/$out/cache"

run() { # NAME MODULE FLAG...
  name=$1
  shift
  [ ! -e "$out/$name.done" ] || return 0
  echo "$name, from $(date +%T)" >&2
  "$python" -m "$@" >"$out/$name.log" 2>&1 || {
    tail -n 3 "$out/$name.log" >&2
    exit 1
  }
  touch "$out/$name.done"
}

# ----------------------------------------------------------------- training

[ -d "$out/text" ] || "$python" - "$out/text" <<'PYTHON' || exit 1
import pathlib
import sys

from launch.training import corpus

for split, every in ("train", 12), ("validation", 1):
  folder = pathlib.Path(sys.argv[1]) / split
  folder.mkdir(parents=True)
  for i, file in enumerate(corpus.python_files(split=split)[::every]):
    (folder / f"{i}.py").write_text(file.text, "utf-8")
PYTHON
run features launch.tools.features --config=configs/train_head.py:eagle3 \
  --config.dataset="$out/text" "--config.head.layers=(1,3,5)" \
  --output="$out/features"

# All read the same layers. EAGLE-3 has one of its own, the others two. All learn
# the target's distribution, also DFlash 1 and 2, whose authors train on the text.
train() { # CORE KIND...
  core=$1
  shift
  for kind in "$@"; do
    [ ! -d "$out/$kind/head" ] || continue
    config=$kind more=
    case $kind in
      p_eagle) more='--config.head.depth=7 --config.head.num_layers=2' ;;
      jetspec) config=dflash
        more='--config.head.causal --config.head.depth_decay=1' ;;
      dflash2) more='--config.objective=forward_kl' ;;
    esac
    taskset -c "$core" "$python" docs/measurements/heads.py "$out/$kind" \
      "$seconds" --config=configs/train_head.py:"$config" \
      "--config.head.layers=(1,3,5)" --config.dataset="$out/text" \
      --config.features="$out/features" --config.batch_size=4 \
      --config.warmup_steps=10 --config.validate_every=0 \
      --config.checkpoint_every=20 --config.compute_dtype=bfloat16 $more \
      2>"$out/$kind.log" || tail -n 3 "$out/$kind.log" >&2
  done
}
train 0 eagle3 jetspec p_eagle &
train 1 dflash dspark dflash2
wait

# --------------------------------------------------------------- evaluation

run prompts launch.tools.held_out_prompts --count=32 \
  --output="$out/all.jsonl"
# Those of 65 to 128 tokens, for which programs compile once.
[ -e "$out/prompts.jsonl" ] ||
  "$python" - "$out/all.jsonl" >"$out/prompts.jsonl" <<'PYTHON' || exit 1
import json
import sys

from models import checkpoints

tokenizer = checkpoints.load_tokenizer("models/pretrained/target")
for line in open(sys.argv[1], encoding="utf-8"):
  if 64 < len(tokenizer.encode(json.loads(line)["prompt"])) <= 128:
    print(line, end="")
PYTHON

# Each head as chains of 3 and 5 and trees of 6 and 16 nodes, in a process of
# its own: a process holds few programs.
compare() { # WHAT TEMPERATURE FLAG...
  what=$1 temperature=$2
  shift 2
  for kind in eagle3 p_eagle dflash jetspec dflash2 dspark; do
    call=$kind families=
    [ "$kind" != jetspec ] || call=dflash families=', families=True'
    head="$call('$out/$kind/head'"
    systems="with_rule($head, tokens=3), block), with_rule($head, tokens=5), block)"
    case $temperature in
      0) rule=match small="tokens=3, tree=dynamic(6, top_k=3$families)"
        large="tokens=5, tree=dynamic(16, top_k=4$families)" ;;
      1) rule=block_transport small='tree=k_ary(2, 1, 1)'
        large='tree=k_ary(4, 1, 1, 1)' ;;
    esac
    for tree in "$small" "$large"; do
      systems="$systems, with_rule($head, $tree), $rule)"
    done
    run "$kind-$what-$temperature" launch.evaluate --config=configs/embedded.py \
      --config.temperature="$temperature" --config.max_new_tokens=64 \
      --prompts="$out/prompts.jsonl" --systems="$systems" --overwrite \
      --output="$out/$kind-$what-$temperature.json" "$@"
  done
}
compare counts 0 --timing=none &
compare counts 1 --timing=none &
wait
# On a quiet machine: what a round costs, at T=0.
compare rounds 0 --timing=rounds --subset=2
grep -h '^| [01] ' "$out"/*-counts-?.md "$out"/*-rounds-?.md
