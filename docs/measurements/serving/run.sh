#!/bin/sh
# Policies under load: a server after the other, each asked the forty questions that ship,
# at rising rates, by guidellm (0.8.1, in an environment of its own: GUIDELLM names its
# command). Wants the machine for itself. What is there is not made again.
#
#   GUIDELLM=.guide/bin/guidellm docs/measurements/serving/run.sh FOLDER
cd "$(dirname "$0")/../../.." || exit 1
python=${PYTHON:-.venv/bin/python} guidellm=${GUIDELLM:-guidellm}
out=$1 port=${PORT:-8123}
mkdir -p "$out" || exit 1

"$python" - "$out/asked.jsonl" <<'END' || exit 1
import json, sys
from launch.evaluation import questions
with open(sys.argv[1], "w") as asked:
  for line in open(questions.OWN):
    asked.write(json.dumps({"prompt": json.loads(line)["turns"][0]}) + "\n")
END

load() { # NAME BODY DRAFTER FLAG..., the server's
  name=$1 body=$2 drafter=$3
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
  "$guidellm" run \
    --backend "kind=openai_http,target=http://127.0.0.1:$port,max_tokens=48$body" \
    --data "kind=json_file,path=$out/asked.jsonl" \
    --profile '{"kind": "poisson", "rate": [1, 2, 4]}' \
    --constraint kind=max_requests,count=40 \
    --metrics kind=generative,slo.tpot_ms=80,sample_size=0 --disable-progress \
    --output kind=console --output "kind=json,path=$out/$name.json" \
    >"$out/$name.log" 2>&1 || { kill $server; exit 1; }
  curl -s "localhost:$port/metrics" | grep '^vllm:spec_decode' \
    >"$out/$name-drafts.txt"
  kill $server
  wait $server
}

load none '' plain
for k in 1 2 3 4; do
  load "static-$k" '' "ngram(tokens=$k)"
done
most='ngram(tokens=4)'
load smartspec '' "$most" --depth_policy=smartspec
load adaspec '' "$most" --depth_policy=adaspec
load objectives ,extras.body.slo_ms_per_token=80 "$most" --depth_policy=objectives
grep -hA9 'Server Throughput' "$out"/*.log
