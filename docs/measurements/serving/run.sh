#!/bin/sh
# Policies under load, and llama.cpp's server beside ours: one server after the other,
# each asked the forty questions that ship by guidellm (0.8.1, in an environment of its
# own: GUIDELLM names its command). LLAMA_CPP names a Python that has
# llama-cpp-python[server]; without it that part is left out. Wants the machine for
# itself. What is there is not made again.
#
#   GUIDELLM=.guide/bin/guidellm docs/measurements/serving/run.sh FOLDER
#
# A trial of a few minutes, whose numbers say nothing:
#
#   REQUESTS=4 RATES=2 CLIENTS=2 DRAFTS=2 MAX_PROMPT=128 \
#     CONFIG=configs/embedded.py FORMAT=/v1/completions \
#     GUIDELLM=... docs/measurements/serving/run.sh FOLDER
cd "$(dirname "$0")/../../.." || exit 1
python=${PYTHON:-.venv/bin/python} guidellm=${GUIDELLM:-guidellm}
config=${CONFIG:-configs/smollm2.py} format=${FORMAT:-/v1/chat/completions}
requests=${REQUESTS:-40} rates=${RATES:-1, 2} clients=${CLIENTS:-1, 4, 8}
drafts=${DRAFTS:-1 2} max_prompt=${MAX_PROMPT:-512}
slo=${SLO:-80} # milliseconds a token
out=$1 port=${PORT:-8123}
mkdir -p "$out" || exit 1
# Each of its processes would draw the same arrivals, and send them together.
export GUIDELLM__MAX_WORKER_PROCESSES=1

"$python" - "$out/asked.jsonl" <<'END' || exit 1
import json, sys
from launch.evaluation import questions
with open(sys.argv[1], "w") as asked:
  for line in open(questions.OWN):
    asked.write(json.dumps({"prompt": json.loads(line)["turns"][0]}) + "\n")
END

ended() { # ends the server
  kill "$server"
  wait "$server"
}

load() { # NAME PROFILE BODY SERVER..., a command that listens
  name=$1 profile=$2 body=$3
  shift 3
  [ -e "$out/$name.json" ] && return
  echo "$name ..." >&2
  "$@" >"$out/$name-server.log" 2>&1 &
  server=$!
  until curl -sf "localhost:$port/v1/models" >"$out/models"; do
    kill -0 $server || exit 1
    sleep 1
  done
  "$guidellm" run \
    --backend "kind=openai_http,target=http://127.0.0.1:$port,request_format=$format,max_tokens=48,validate_backend=false$body" \
    --data "kind=json_file,path=$out/asked.jsonl" \
    --profile "$profile" --constraint "kind=max_requests,count=$requests" \
    --metrics kind=generative,slo.tpot_ms=$slo,sample_size=0 --disable-progress \
    --output kind=console --output "kind=json,path=$out/$name.json" \
    >"$out/$name.log" 2>&1 || { ended; exit 1; }
  curl -s "localhost:$port/metrics" | grep '^vllm:spec_decode' \
    >"$out/$name-drafts.txt"
  ended
}

ours() { # NAME PROFILE BODY DRAFTER FLAG...
  name=$1 profile=$2 body=$3 drafter=$4
  shift 4
  load "$name" "$profile" "$body" "$python" -m launch.serve --config="$config" \
    --port="$port" --slots=8 --max_prompt="$max_prompt" --config.max_new_tokens=64 \
    --config.drafter="$drafter" "$@"
}

rising="{\"kind\": \"poisson\", \"rate\": [$rates]}"
ours none "$rising" '' plain
for k in $drafts; do
  ours "static-$k" "$rising" '' "ngram(tokens=$k)"
done
most="ngram(tokens=$k)"
ours smartspec "$rising" '' "$most" --depth_policy=smartspec
ours adaspec "$rising" '' "$most" --depth_policy=adaspec
ours objectives "$rising" ,extras.body.slo_ms_per_token=$slo "$most" \
  --depth_policy=objectives

# The same weights in float32 for both; neither drafts. Completions, as llama.cpp's
# template takes no contents in parts, and without the tokens that end them.
format=/v1/completions
endless=,extras.body.logit_bias.0=-100,extras.body.logit_bias.2=-100
closed="{\"kind\": \"concurrent\", \"streams\": [$clients]}"
ours ours-clients "$closed" "$endless" plain
if [ -n "$LLAMA_CPP" ]; then
  [ -e "$out/float32.gguf" ] ||
    "$python" -c 'import sys
from configs import smollm2
from launch.evaluation import llama_cpp_reference
llama_cpp_reference.write_float32(str(smollm2.path()), sys.argv[1])' \
      "$out/float32.gguf" || exit 1
  load llama-clients "$closed" "$endless" "$LLAMA_CPP" -m llama_cpp.server \
    --model "$out/float32.gguf" --port "$port" --n_ctx 1024 \
    --n_threads "$(nproc)" --interrupt_requests false
fi

# What the table reads of them is kept beside this file.
[ -n "$REQUESTS" ] || "$python" - "$out" <<'END'
import json, pathlib, sys
names = """request_totals requests_per_second request_goodput request_latency
prompt_token_count output_token_count output_tokens_per_second
time_to_first_token_ms inter_token_latency_ms""".split()
def few(metric):
  said = metric.get("successful")
  kept = ("count", "mean", "median", "percentiles", "std_dev")
  return {"successful": {k: said[k] for k in kept}} if type(said) is dict else metric
for path in pathlib.Path(sys.argv[1]).glob("*.json"):
  content = json.loads(path.read_text())
  content["benchmarks"] = [
    {key: one[key] for key in ("config", "start_time", "duration")}
    | {"metrics": {name: few(one["metrics"][name]) for name in names}}
    for one in content["benchmarks"]
  ]
  kept = pathlib.Path("docs/measurements/serving") / path.name
  kept.write_text(json.dumps(content) + "\n")
END
"$python" -m launch.tables loads "$out"/*.json
