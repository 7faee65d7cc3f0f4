#!/bin/sh
# What docs/serving.md says of policies under load: a server after the other, each asked
# the forty questions that ship, at rising rates. Wants the machine for itself. What is
# there is not made again.
#
#   docs/measurements/serving/run.sh FOLDER
cd "$(dirname "$0")/../../.." || exit 1
python=${PYTHON:-.venv/bin/python}
out=$1 port=${PORT:-8123}
mkdir -p "$out" || exit 1

"$python" - "$out/asked.jsonl" <<'END' || exit 1
import json, sys
from launch.evaluation import questions
with open(sys.argv[1], "w") as asked:
  for line in open(questions.OWN):
    message = {"role": "user", "content": json.loads(line)["turns"][0]}
    asked.write(json.dumps({"messages": [message]}) + "\n")
END

load() { # NAME SEND DRAFTER FLAG..., the server's
  name=$1 send=$2 drafter=$3
  shift 3
  [ -e "$out/$name.json" ] && return
  "$python" -m launch.serve --config=configs/smollm2.py --port="$port" --slots=8 \
    --config.drafter="$drafter" \
    --max_prompt=512 --config.max_new_tokens=64 "$@" >"$out/$name-serve.log" 2>&1 &
  server=$!
  until curl -sf "localhost:$port/health" >/dev/null; do
    kill -0 $server || exit 1
    sleep 1
  done
  "$python" -m launch.load_test --url="http://127.0.0.1:$port" --rates=1,2,4 \
    --num_requests=40 --max_tokens=48 --prompts="$out/asked.jsonl" --tpot_ms=80 \
    "$send" --output="$out/$name.json" >"$out/$name.log" 2>&1 ||
    { kill $server; exit 1; }
  kill $server
  wait $server
}

load none --nosend_objective plain
for k in 1 2 3 4; do
  load "static-$k" --nosend_objective "ngram(tokens=$k)"
done
most='ngram(tokens=4)'
load smartspec --nosend_objective "$most" --depth_policy=smartspec
load adaspec --nosend_objective "$most" --depth_policy=adaspec
load objectives --send_objective "$most" --depth_policy=objectives
all=''
for name in none static-1 static-2 static-3 static-4 smartspec adaspec objectives; do
  all="$all $out/$name.json"
done
# shellcheck disable=SC2086
"$python" -m launch.tables load $all
