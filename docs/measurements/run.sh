#!/bin/sh
# Measures anew what README, docs/theory.md and docs/reports show, and copies it
# there. What is in build/measured is not measured again: a stopped run goes on.
#
#   docs/measurements/run.sh [PART...]     all | timed | counted | NAME
#
# The parts of `timed` want the machine for themselves: about 30 minutes of two
# cores. Those of `counted` do not (about 40 more). The studies of docs/drafts.md,
# which train, and docs/measurements/rules/costs.json have commands of their own.
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-.venv/bin/python}
out=build/measured
mkdir -p "$out" || exit 1

# Runs a command that writes to $target unless that is there, atomically.
part() { # KIND NAME MINUTES WHERE COMMAND...
  kind=$1 name=$2 minutes=$3 where=$4
  shift 4
  for wanted in $parts; do
    case $wanted in
      all | "$kind" | "$name") ;;
      *) continue ;;
    esac
    if [ ! -e "$out/$name" ]; then
      echo "$name, about $minutes minutes from $(date +%T)" >&2
      rm -rf "$out/$name.new"
      target=$out/$name.new
      "$python" -m "$@" "$(flag "$1")=$target" >"$out/$name.log" 2>&1 || {
        tail -n 3 "$out/$name.log" >&2
        exit 1
      }
      mv "$target" "$out/$name"
    fi
    copy "$name" "$where"
    return
  done
}

flag() { # which flag of a command names where it writes
  case $1 in
    launch.studies.report | launch.studies.theory | launch.studies.depth)
      echo --workdir
      ;;
    launch.train) echo --export ;;
    *) echo --output ;;
  esac
}

copy() {
  if [ "$2" = - ]; then
    return
  elif [ -d "$out/$1" ]; then
    mkdir -p "$2" && cp "$out/$1"/*.json "$out/$1"/*.svg "$2"
    for page in report depth; do
      [ ! -e "$out/$1/$page.md" ] || cp "$out/$1/$page.md" "$2"
    done
  else
    mkdir -p "$(dirname "$2")" && cp "$out/$1" "$2"
  fi
}

benchmark() { # NAME MINUTES FLAG...
  name=$1 minutes=$2
  shift 2
  part timed "$name" "$minutes" "docs/measurements/$name.json" \
    launch.benchmark "$@"
}

report() { # NAME FLAG...
  name=$1
  shift
  part timed "report-$name" 3 "docs/reports/$name" launch.studies.report \
    --config=configs/embedded.py --report_rounds=4 \
    --config.max_new_tokens=256 "$@"
}

parts=${*:-all}
pair=--config=configs/embedded.py

part timed held-out.jsonl 1 - launch.tools.held_out_prompts --count=64
part timed neox 1 - launch.tools.random_checkpoint --shape=pythia-160m

benchmark embedded-greedy 3 $pair
benchmark embedded-temperature-1 3 $pair --config.temperature=1.0
benchmark embedded-greedy-ngram 2 $pair --noreference \
  --config.drafter='ngram(tokens=6)'
benchmark embedded-greedy-layer-skip 2 $pair --noreference \
  --config.drafter='layer_skip(tokens=6)'
benchmark embedded-greedy-batch-6 2 $pair --noreference --config.batch_size=6
benchmark held-out-greedy 4 $pair --noreference --rounds=1 \
  --prompts=$out/held-out.jsonl
benchmark held-out-temperature-1 4 $pair --noreference --rounds=1 \
  --config.temperature=1.0 --prompts=$out/held-out.jsonl
benchmark pythia-160m-shape 2 --config=configs/huggingface.py:target=$out/neox \
  --config.drafter=plain --config.max_new_tokens=32 --rounds=3
# SmolLM2 (launch.tools.fetch_smollm2): what allocated slots cost, what prompts
# of others do, and llama.cpp beside us where LLAMA_CPP names a Python that has
# the package.
smollm2=--config=configs/smollm2.py
part timed allocation.json 3 docs/measurements/slots/allocation.json \
  launch.tools.allocation $smollm2 --batches=1,8 \
  --allocated=128,512,2048,4096 --text_tokens=100 --prompt_tokens=512 \
  --buffers=1024,4096
part timed waits.json 5 docs/measurements/slots/waits.json launch.tools.waits \
  $smollm2 --config.drafter=plain --arriving_tokens=1500 --arrivals=4 \
  --turn_tokens=1000
[ -z "$LLAMA_CPP" ] ||
  part timed llama-cpp.json 5 docs/measurements/slots/llama-cpp.json \
    launch.benchmark $smollm2 --config.drafter=plain \
    --config.max_new_tokens=960 --new_tokens=64 --rounds=3 --noreference \
    --llama_cpp="$LLAMA_CPP"
report greedy --config.temperature=0.0 --sweep_tokens=2,4,6,8,10
report temperature-1 --config.temperature=1.0 --sweep_tokens=2,4,6,8,10
report layer-skip --config.temperature=1.0 \
  --config.drafter='layer_skip(tokens=2)' --sweep_tokens=1,2,4
# With those above of the embedded pair and of held-out prompts five at each
# temperature: does the prediction hold every time?
for again in 1 2 3; do
  for temperature in 0.0 1.0; do
    part timed again-$temperature-$again.json 1 \
      docs/measurements/again/temperature-$temperature-$again.json \
      launch.benchmark $pair --noreference --rounds=2 \
      --config.temperature=$temperature
  done
done

part counted rules.json 15 docs/measurements/rules/embedded.json \
  launch.studies.rules.sweep $pair
part counted selection.json 10 docs/measurements/rules/selection.json \
  launch.studies.rules.sweep $pair \
  "--rules=transport,block_transport,univer,univer (greedy),traversal (without_replacement),score_block"
part counted four_by_four.json 3 docs/measurements/rules/four_by_four.json \
  launch.studies.rules.sweep $pair --rules=transport,block_transport \
  --shapes=4x4
part counted quality.json 10 docs/theory/quality.json launch.studies.quality \
  --config=configs/quality.py
part counted optimality.json 1 docs/measurements/rules/optimality.json \
  launch.studies.rules.optimality
part counted joint.json 10 docs/measurements/rules/joint.json \
  launch.studies.rules.joint
part counted front.json 5 docs/measurements/rules/front.json \
  launch.studies.rules.front $pair
part counted audit.json 1 docs/measurements/audit/audit.json \
  launch.studies.audit
part counted off_draft.json 3 docs/measurements/rules/off_draft.json \
  launch.studies.rules.off_draft
part counted held-out.jsonl 1 - launch.tools.held_out_prompts --count=64
[ ! -e $out/held-out.jsonl ] ||
  head -n 24 $out/held-out.jsonl >$out/held-out-24.jsonl
part counted depth-head 12 - launch.train --config=configs/train_depth.py \
  --workdir=$out/depth-run
for temperature in 0.0 1.0; do
  part counted depth-$temperature 2 docs/adaptive/temperature-$temperature \
    launch.studies.depth $pair --config.temperature=$temperature \
    --config.batch_size=24 --config.max_new_tokens=64 --most_tokens=8 \
    --prompts=$out/held-out-24.jsonl --head=$out/depth-head \
    --benchmarks=docs/measurements/embedded-greedy.json,docs/measurements/embedded-greedy-batch-6.json
done
part counted theory 10 docs/theory launch.studies.theory --figure=all

draw() { # FIGURE MEASUREMENT SVG
  "$python" -m launch.studies.rules.plots "$1" "docs/measurements/rules/$2" \
    "docs/figures/$3"
}

draw efficiency embedded.json rule-efficiency.svg
draw optimality optimality.json optimality.svg
draw costs costs.json rule-costs.svg
draw joint joint.json joint.svg
draw front front.json rule-front.svg
echo "then: python -m launch.tables prints what the pages show" >&2
