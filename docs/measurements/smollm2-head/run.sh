#!/bin/sh
# What docs/evaluation.md says of heads for SmolLM2: text that it makes up by itself, the
# features of it, a head trained on all of it, what that does for the questions at
# temperatures 0 and 1 (`cold`, `warm`), which drafts pay (`shapes`, and `ranked` before it), and a study of what
# bounds a head (`bounds`; `less` with parts of the text). Wants the machine for itself:
# half an hour of two cores for the text, minutes for the features, an hour for
# the head, most of an hour for the questions. COMPUTE=bfloat16 trains in it, where
# products of it are fast. What is there is not made again, and a stopped run goes on.
# QUESTIONS is Spec-Bench's question.jsonl.
#
#   docs/measurements/smollm2-head/run.sh FOLDER QUESTIONS \
#     text features head cold shapes warm bounds less
cd "$(dirname "$0")/../../.." || exit 1
python=${PYTHON:-.venv/bin/python}
out=$1
questions=$2
shift 2
mkdir -p "$out" || exit 1
conversations=${CONVERSATIONS:-1500}
"$python" -m launch.tools.fetch_smollm2 >&2 || exit 1
model=$("$python" -c 'from configs import smollm2; print(smollm2.path())') || exit 1

text() {
  [ -e "$out/text/about.json" ] || "$python" -m launch.tools.self_data \
    --config=configs/smollm2.py --config.drafter=plain --output="$out/text" \
    --count="$conversations" --rows=64 --temperatures=0.6,0.8,1.0 \
    --answer_temperatures=0,1 --keep_out="$questions" \
    --system_prompts=launch/training/users.txt || exit 1
}

features() { # more flags; what is there of the text is not made again
  "$python" -m launch.tools.features --config=configs/train_head.py:eagle3 \
    --config.target="$model" --config.dataset="$out/text" \
    --config.sequence_length=512 --config.batch_size=2 --output="$out/features" "$@" ||
    exit 1
}

study() { # name, config
  "$python" -m launch.studies.drafts --config="configs/draft_study.py:$2" \
    --config.train.teacher="$model" --config.decode.target="$model" \
    --config.train.dataset="$out/text" --config.train.features="$out/features" \
    --config.questions="$questions" --workdir="$out/study-$1" --output="$out/$1.jsonl" ||
    exit 1
}

bounds() {
  study bounds bounds
}

# The head as it is, trained on the first part of the text alone.
less() {
  for tokens in 40000 80000 160000 320000; do
    features --first_tokens="$tokens"
    study "less-$tokens" text
  done
  features
}

training() { # name, unrolled steps, steps, rate, more flags
  name=$1
  depth=$2
  steps=$3
  rate=$4
  shift 4
  [ -e "$out/$name" ] || "$python" -m launch.train \
    --config=configs/train_head.py:eagle3 --config.target="$model" \
    --config.dataset="$out/text" --config.features="$out/features" \
    --config.sequence_length=512 --config.batch_size=4 --config.validate_every=100 \
    --config.sample_every=0 --config.head.draft_vocab_size=8192 \
    --config.compute_dtype="${COMPUTE:-float32}" --config.head.depth="$depth" \
    --config.num_steps="$steps" --config.learning_rate="$rate" \
    --workdir="$out/train-$name" --export="$out/$name" "$@" || exit 1
}

head() { # one unrolled step is cheap: twice, each with a falling rate; then two steps
  training first 1 1100 1.5e-3
  training second 1 3000 1.5e-3 --config.init_from="$out/first" --config.data_seed=2
  training head 2 250 1e-3 --config.init_from="$out/second" --config.data_seed=1
}

ask() { # name, more flags
  name=$1
  shift
  "$python" -m launch.evaluate --config=configs/smollm2.py \
    --questions="$questions" --batch_sizes=1 --output="$out/$name.json" "$@" || exit 1
}

own() { # the head, with arguments
  echo "eagle3(\"$out/head\", $1)"
}

certain() { # the same where its tokens are certain
  echo "with_rule($(own "$1"), match)"
}

both="repeats($(own tokens=1), tokens=7)"

cold() { # what pays, on the 120 questions of the first section
  ask cold --config.max_new_tokens=128 --subset=120 --temperatures=0 \
    --systems="ngram(tokens=4), $both"
}

# The best static trees of the head, by ranks counted along other questions.
ranked() {
  [ -e "$out/ranked.jsonl" ] || "$python" - "$questions" "$out/ranked.jsonl" <<'END' || exit 1
import json, sys
from launch.evaluation import questions
every = questions.read(sys.argv[1])
asked = questions.subset(every, 13, seed=0)
with open(sys.argv[2], "w") as file:
  for one in questions.subset(every, 26, seed=0):
    if one not in asked:
      turn = {"role": "user", "content": one.turns[0]}
      print(json.dumps({"messages": [turn]}), file=file)
END
  [ -e "$out/ranked.json" ] || "$python" -m launch.tools.best_tree \
    --config=configs/smollm2.py --config.drafter="$(own siblings=top_k)" \
    --config.rule=match --config.max_new_tokens=64 --prompts="$out/ranked.jsonl" \
    --output="$out/ranked.json" || exit 1
}

static() { # the best tree of so many nodes
  "$python" -c 'import json, sys
trees = json.load(open(sys.argv[1]))["trees"]
print(", ".join(map(str, trees[int(sys.argv[2])]["parents"])))' "$out/ranked.json" "$1"
}

shapes() { # which draft pays, where nothing is looked up
  ranked
  two=$(static 2) && six=$(static 6) || exit 1
  static="$(certain "tree=($two), siblings=top_k"), $(certain "tree=($six), siblings=top_k")"
  dynamic=$(certain "tokens=3, tree=dynamic(6, top_k=4)")
  ask shapes --config.max_new_tokens=64 --subset=13 --temperatures=0 \
    --systems="$(own tokens=1), $(own tokens=2), $static, $dynamic"
}

warm() {
  ask warm --config.max_new_tokens=64 --subset=26 --temperatures=1 \
    --systems="$both"
}

for part; do $part; done
