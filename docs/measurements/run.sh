#!/bin/sh
# Measures anew the first table of docs/results.md and the figures of
# docs/theory.md and docs/reports. Wants the machine for itself: about half an
# hour of two cores. What is in build/measured is not measured again.
#
#   docs/measurements/run.sh [NAME...]     a row's name, theory, greedy, temperature-1
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-.venv/bin/python}
out=build/measured
mkdir -p "$out" || exit 1
names=${*:-all}

wanted() { # NAME MINUTES
  case " $names " in *" all "* | *" $1 "*) ;; *) return 1 ;; esac
  [ ! -e "$out/$1.done" ] || return 1
  echo "$1, about $2 minutes from $(date +%T)" >&2
}

run() { # NAME COMMAND...
  name=$1
  shift
  "$python" -m "$@" >"$out/$name.log" 2>&1 || {
    tail -n 3 "$out/$name.log" >&2
    exit 1
  }
  touch "$out/$name.done"
}

row() { # NAME MINUTES FLAG...
  wanted "$1" "$2" || return 0
  name=$1
  shift 2
  run "$name" launch.evaluate --prompts=built-in --timing=passes "$@" \
    --output="$out/$name.json"
  cp "$out/$name.json" docs/measurements
}

report() { # NAME FLAG...
  wanted "$1" 3 || return 0
  name=$1
  shift
  run "$name" launch.evaluate --prompts=built-in --rounds=4 --explain "$@" \
    --config=configs/embedded.py --config.max_new_tokens=256 \
    --systems="$(printf 'model(tokens=%s), ' 2 4 6 8)model(tokens=10)" \
    --output="$out/$name.json"
  cp "$out/$name.json" "$out/$name-throughput.svg" docs/reports
  cp "$out/$name.md" "docs/reports/$name-explained.md"
}

pair=--config=configs/embedded.py
beside='model(tokens=6), hf, hf_assisted(tokens=6)'
row embedded-greedy 3 $pair --rounds=5 --systems="$beside"
row embedded-temperature-1 3 $pair --rounds=5 --temperatures=1 --systems="$beside"
row embedded-greedy-ngram 2 $pair --rounds=5 --systems='ngram(tokens=6)'
row embedded-greedy-batch-6 2 $pair --rounds=5 --config.batch_size=6
case " $names " in
  *" all "* | *held-out*)
    [ -e "$out/held-out.jsonl" ] || run prompts launch.tools.held_out_prompts \
      --count=64 --output="$out/held-out.jsonl"
    ;;
esac
row held-out-greedy 4 $pair --prompts="$out/held-out.jsonl"
row held-out-temperature-1 4 $pair --temperatures=1 --prompts="$out/held-out.jsonl"
report greedy
report temperature-1 --temperatures=1
if wanted theory 6; then
  run theory launch.studies.theory --workdir="$out/theory" --overwrite
  cp "$out"/theory/*.json "$out"/theory/*.svg docs/theory
fi
