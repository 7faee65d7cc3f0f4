#!/bin/sh
# What docs/adaptive.md says of the loop under depth policies: static depths and
# policies answer the same held-out prompts in turn, at each batch size; and static
# depths and the ladder, in runs of their own. Wants the machine for itself, about 40
# minutes of two cores. What is there is not made again, and a stopped run goes on.
#
#   docs/measurements/depth/run.sh FOLDER [policies] [ladder]
cd "$(dirname "$0")/../../.." || exit 1
python=${PYTHON:-.venv/bin/python}
out=$1
shift
[ $# -gt 0 ] || set -- policies ladder
mkdir -p "$out" || exit 1

asked() { # number of prompts
  prompts=$out/held-out-$1.jsonl
  [ -e "$prompts" ] || "$python" -m launch.tools.held_out_prompts --count="$1" \
    --output="$prompts" || exit 1
  "$python" - "$prompts" "$out/asked-$1.jsonl" <<'END' || exit 1
import json, sys
with open(sys.argv[2], "w") as asked:
  for line in open(sys.argv[1]):
    one = json.loads(line)
    question = {"question_id": one["id"], "category": "python", "task": "python"}
    asked.write(json.dumps(question | {"turns": [one["prompt"]]}) + "\n")
END
}

run() { # name, prompts, rows, systems
  [ -e "$out/$1.json" ] || "$python" -m launch.evaluate \
    --config=configs/embedded.py --config.max_new_tokens=64 \
    --questions="$out/asked-$2.jsonl" --temperatures=0,1 --batch_sizes="$3" \
    --systems="$4" --output="$out/$1.json" >"$out/$1.log" 2>&1 || exit 1
}

static=plain
for k in 1 2 3 4 6; do static="$static, model(tokens=$k)"; done

policies() {
  asked 64
  # `optimal` is told what a level costs, its pass of the draft and one more token to
  # verify, where a round that drafts nothing is 1.
  for at in 1:0.22 4:0.4 8:0.5 16:0.6; do
    rows=${at%:*} cost=${at#*:}
    systems=$static
    for policy in "survival(threshold=0.2)" "confidence(threshold=0.4)" \
      "optimal(cost=$cost, rows=$rows)"; do
      systems="$systems, with_widths(model(tokens=6, policy=$policy), 1, 2, 3, 4)"
    done
    run "batch-$rows" 64 "$rows" "$systems, model(tokens=6, policy=survival(threshold=0.2))"
  done
}

# What a rung of the ladder runs is a chain of three in the form that can catch up.
ladder() {
  asked 128
  rung="model(tokens=3, policy=3)"
  for rows in 1 2 4 8 16; do
    run "ladder-$rows" 128 "$rows" \
      "$static, $rung, ladder(model, lengths=(0, 1, 2, 3, 4, 6))"
  done
}

for part; do $part; done
"$python" -m launch.tables evaluation "$out"/*.json
