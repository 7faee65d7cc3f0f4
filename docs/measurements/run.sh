#!/bin/sh
# Measures anew what README, docs/theory.md and docs/reports show, and copies it
# there. What is in build/measured is not measured again: a stopped run goes on.
#
#   docs/measurements/run.sh [PART...]     all | timed | counted | NAME
#
# The parts of `timed` want the machine for themselves: about 30 minutes of two
# cores, and three hours more with QUESTIONS. Those of `counted` do not (about two
# hours). The studies of docs/drafts.md, which train, and
# docs/measurements/rules/costs.json have commands of their own.
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
      all | "$kind" | "$name") known="$known $name" ;;
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
    launch.studies.theory | launch.studies.depth)
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
    [ ! -e "$out/$1/depth.md" ] || cp "$out/$1/depth.md" "$2"
  else
    mkdir -p "$(dirname "$2")" && cp "$out/$1" "$2"
  fi
}

evaluate() { # NAME MINUTES WHERE FLAG...
  name=$1 minutes=$2 where=$3
  shift 3
  for wanted in $parts; do
    case $wanted in
      all | timed | "$name") known="$known $name" ;;
      *) continue ;;
    esac
    echo "$name, about $minutes minutes from $(date +%T)" >&2
    mkdir -p "$where"
    "$python" -m launch.evaluate "$@" \
      --output="$out/$name.json" >"$out/$name.log" 2>&1 || {
      tail -n 3 "$out/$name.log" >&2
      exit 1
    }
    cp "$out/$name.json" "$where"
    [ ! -e "$out/$name-explained.md" ] ||
      cp "$out/$name-explained.md" "$out/$name-throughput.svg" "$where"
    [ "$where" != docs/evaluation ] || cp "$out/$name.md" "$out/$name.svg" "$where"
    return
  done
}

measured() { # NAME MINUTES FLAG...: a row of docs/measured.md
  name=$1 minutes=$2
  shift 2
  evaluate "$name" "$minutes" docs/measurements --prompts=built-in \
    --timing=passes "$@"
}

explained() { # NAME FLAG...
  name=$1
  shift
  evaluate "$name" 3 docs/reports --prompts=built-in \
    --config=configs/embedded.py --rounds=4 --explain \
    --config.max_new_tokens=256 "$@"
}

parts=${*:-all}
known=' all timed counted'
pair=--config=configs/embedded.py

part timed held-out.jsonl 1 - launch.tools.held_out_prompts --count=64
part timed neox 1 - launch.tools.random_checkpoint --shape=pythia-160m

beside="model(tokens=6), hf, hf_assisted(tokens=6)"
measured embedded-greedy 3 $pair --rounds=5 --systems="$beside"
measured embedded-temperature-1 3 $pair --rounds=5 --temperatures=1 \
  --systems="$beside"
measured embedded-greedy-ngram 2 $pair --rounds=5 --systems='ngram(tokens=6)'
measured embedded-greedy-layer-skip 2 $pair --rounds=5 \
  --systems='layer_skip(tokens=6)'
measured embedded-greedy-batch-6 2 $pair --rounds=5 --config.batch_size=6
measured held-out-greedy 4 $pair --prompts=$out/held-out.jsonl
measured held-out-temperature-1 4 $pair --temperatures=1 \
  --prompts=$out/held-out.jsonl
measured pythia-160m-shape 2 --config=configs/huggingface.py:target=$out/neox \
  --systems=plain,hf --config.max_new_tokens=32 --rounds=3
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
part timed request-costs.json 3 docs/measurements/slots/request-costs.json \
  launch.tools.request_costs $smollm2 --config.drafter='ngram(tokens=3)' \
  --batches=1,8 --text_tokens=100
[ -z "$LLAMA_CPP" ] ||
  evaluate llama-cpp 5 docs/measurements/slots --prompts=built-in $smollm2 \
    --rounds=3 \
    --systems="llama_cpp(\"$LLAMA_CPP\")" --config.max_new_tokens=64 \
    --config.max_length=1024
# On Spec-Bench, whose question.jsonl QUESTIONS names: the shipped head, look-ups
# and both, as far as they pay, and transformers.
one='eagle3(tokens=1, weights=int8)'
two='eagle3(tokens=2, weights=int8)'
three='eagle3(tokens=3, weights=int8)'
for at in 1-0 1-1 8-0; do
  case $at in
    1-0)
      own="$three, ngram(tokens=4), repeats($three, tokens=7)"
      own="$own, hf, hf_prompt_lookup"
      ;;
    1-1) own="with_rule($three, block), with_rule($two, block), $three" ;;
    8-0) own="$one, $two" ;;
  esac
  [ -z "$QUESTIONS" ] ||
    evaluate spec-bench-$at 60 docs/evaluation $smollm2 \
      --config.max_new_tokens=128 --questions="$QUESTIONS" --subset=120 \
      --systems="$own" --temperatures=${at#*-} --batch_sizes=${at%-*} --explain
done
sweep() { # drafts of so many tokens
  for n; do printf '%s' "$comma$of(tokens=$n)" && comma=', '; done
}
of=model comma=''
explained greedy --systems="$(sweep 2 4 6 8 10)"
explained temperature-1 --temperatures=1 --systems="$(sweep 2 4 6 8 10)"
of=layer_skip
explained layer-skip --temperatures=1 --systems="$(sweep 1 2 4)" \
  --config.drafter='layer_skip(tokens=2)'
# With those above of the embedded pair and of held-out prompts five at each
# temperature: does the prediction hold every time?
for again in 1 2 3; do
  for temperature in 0.0 1.0; do
    evaluate temperature-$temperature-$again 1 docs/measurements/again \
      --prompts=built-in $pair --rounds=2 --temperatures=$temperature \
      --timing=passes
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
part counted shapes.json 10 docs/measurements/rules/shapes.json \
  launch.studies.rules.sweep $pair --shapes=2x2,4x8,8x4 \
  --rules=kseq,transport,univer,block_transport
settings='block_transport,block_transport(bins=128),block_transport(types=19)'
settings="$settings,block_transport(bins=32),block_transport(bins=16)"
settings="$settings,block_transport(types=5),block_transport(types=3)"
part counted settings.json 5 docs/measurements/rules/settings.json \
  launch.studies.rules.sweep $pair --shapes=4x4 "--rules=$settings"
few='--config.max_new_tokens=128 --num_prompts=8 --contexts_per_prompt=8'
some='--rules=kseq,transport,block_transport'
part counted smollm2_itself.json 15 docs/measurements/rules/smollm2_itself.json \
  launch.studies.rules.sweep $smollm2 $few $some --shapes=1x4,2x2,2x4,4x4 \
  '--config.drafter=quantised_self(bits=4, tokens=4)'
some="$some --shapes=1x4,2x2,2x4,4x4,8x8"
part counted smollm2_head.json 15 docs/measurements/rules/smollm2_head.json \
  launch.studies.rules.sweep $smollm2 $few $some \
  '--config.drafter=eagle3(tokens=4)'
part counted quality.json 10 docs/theory/quality.json launch.studies.quality \
  --config=configs/quality.py
part counted optimality.json 1 docs/measurements/rules/optimality.json \
  launch.studies.rules.optimality
part counted joint.json 10 docs/measurements/rules/joint.json \
  launch.studies.rules.joint
part counted front.json 5 docs/measurements/rules/front.json \
  launch.studies.rules.front $pair
part counted front_smollm2.json 10 docs/measurements/rules/front_smollm2.json \
  launch.studies.rules.front $smollm2 $few '--config.drafter=eagle3(tokens=6)'
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
    --timings=docs/measurements/embedded-greedy.json,docs/measurements/embedded-greedy-batch-6.json
done
part counted theory 10 docs/theory launch.studies.theory --figure=all

for wanted in $parts; do
  case "$known " in
    *" $wanted "*) ;;
    *) echo "there is no part $wanted (some need QUESTIONS)" >&2 && exit 1 ;;
  esac
done

draw() { # FIGURE SVG MEASUREMENT...
  figure=$1 svg=$2
  shift 2
  "$python" -m launch.studies.rules.plots "$figure" "$@" "docs/figures/$svg"
}

of=docs/measurements/rules
draw efficiency rule-efficiency.svg $of/embedded.json
draw optimality optimality.svg $of/optimality.json
draw costs rule-costs.svg $of/costs.json
draw joint joint.svg $of/joint.json
draw front rule-front.svg $of/front*.json
echo "then: python -m launch.tables prints what the pages show" >&2
