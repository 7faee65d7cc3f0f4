#!/bin/sh
# What docs/adaptive.md says of the loop under depth policies: static depths and
# policies answer the same held-out prompts in turn, at each batch size. Wants the
# machine for itself, about 20 minutes of two cores. What is there is not made again,
# and a stopped run goes on.
#
#   docs/measurements/depth/run.sh FOLDER
cd "$(dirname "$0")/../../.." || exit 1
python=${PYTHON:-.venv/bin/python}
out=$1
mkdir -p "$out" || exit 1
prompts=$out/held-out.jsonl
[ -e "$prompts" ] ||
  "$python" -m launch.tools.held_out_prompts --count=64 --output="$prompts" || exit 1
"$python" - "$prompts" "$out/asked.jsonl" <<'END' || exit 1
import json, sys
with open(sys.argv[2], "w") as asked:
  for line in open(sys.argv[1]):
    one = json.loads(line)
    question = {"question_id": one["id"], "category": "python", "task": "python"}
    asked.write(json.dumps(question | {"turns": [one["prompt"]]}) + "\n")
END

# `optimal` is told what a level costs, its pass of the draft and one more token to
# verify, where a round that drafts nothing is 1.
for at in 1:0.22 4:0.4 8:0.5 16:0.6; do
  rows=${at%:*} cost=${at#*:}
  systems=plain
  for k in 1 2 3 4 6; do systems=$systems,model:num_speculative_tokens=$k; done
  for policy in "survival(threshold=0.2)" "confidence(threshold=0.4)" \
    "optimal(cost=$cost,rows=$rows)"; do
    systems="$systems,model:depth=$policy,widths=1,2,3,4"
  done
  systems="$systems,model:depth=survival(threshold=0.2)"
  [ -e "$out/batch-$rows.json" ] || "$python" -m launch.evaluate \
    --config=configs/embedded.py --config.max_new_tokens=64 \
    --questions="$out/asked.jsonl" --temperatures=0,1 --batch_sizes="$rows" \
    --systems="$systems" --output="$out/batch-$rows.json" \
    >"$out/batch-$rows.log" 2>&1 || exit 1
done
"$python" -m launch.tables evaluation "$out"/batch-*.json
