#!/bin/sh
# Heads for SmolLM2, as docs/evaluation.md measures one and models/pretrained/README.md
# describes it: text that the model makes up by itself or answers (`text`, and `more`
# before anything is trained), the curve of acceptance against distinct tokens of it
# (`curve`), other drafts (`others`), the head (`head`), and which drafts pay
# (`ranked`, `shapes`). What is there is not made again, and a stopped run goes on.
# QUESTIONS is Spec-Bench's question.jsonl.
#
#   docs/measurements/smollm2-head/run.sh FOLDER QUESTIONS text more curve head shapes
#
# For a device that decodes thousands of rows, and multiplies bfloat16 fast:
#
#   COMPUTE=bfloat16 MAKE="--in_groups --rows=4096 --config.dtype=bfloat16"
#
# For two cores, which compute the target's features of the text once (4.6 kB a
# token), of its first FIRST tokens (so the curve and `others` beside this were made):
#
#   STORED=yes FIRST=600000 BATCH=4 CURVE_STEPS=500 POINTS="100000 300000"
cd "$(dirname "$0")/../../.." || exit 1
python=${PYTHON:-.venv/bin/python}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
here=docs/measurements/smollm2-head
out=$1
questions=$2
kind=eagle3
shift 2
mkdir -p "$out" || exit 1
"$python" -m launch.tools.fetch_smollm2 >&2 || exit 1
model=$("$python" -c 'from configs import smollm2; print(smollm2.path())') || exit 1

made() { # name, conversations, prompts, more flags
  name=$1 count=$2 prompts=$3
  shift 3
  # shellcheck disable=SC2086 # MAKE is several flags
  [ -e "$out/$name/about.json" ] || "$python" -m launch.tools.self_data \
    --config=configs/smollm2.py --config.drafter=plain \
    --output="$out/$name" --count="$count" --prompts="$prompts" \
    --temperatures=0.6,0.8,1.0 --answer_temperatures=0,1 --keep_out="$questions" \
    --system_prompts=launch/training/users.txt ${MAKE:---rows=64} "$@" || exit 1
}

prompts() { # so many of this machine's text, into the file of that name
  "$python" "$here/prompts.py" "$1" >"$out/$2.new" || exit 1
  mv "$out/$2.new" "$out/$2"
}

text() {
  count=${COUNT:-16000}
  [ -e "$out/prompts.jsonl" ] || prompts $((count / 2)) prompts.jsonl
  made text "$count" "$out/prompts.jsonl" --turns=2 --config.max_length=1024
}

# After these shorter conversations, of other prompts and other users.
more() {
  if [ ! -e "$out/more.jsonl" ]; then
    prompts 20900 every.jsonl
    grep -vxFf "$out/prompts.jsonl" "$out/every.jsonl" >"$out/more.jsonl" || exit 1
  fi
  made more "${MORE:-26775}" "$out/more.jsonl" --config.seed=1 \
    --config.max_length=576 --config.max_new_tokens=192
}

all=1000000000 # more tokens than there are

# So many tokens of the text; the same two conversations in a hundred validate all.
part() {
  [ -e "$out/text-$1" ] || "$python" - "$out" "$1" "$model" <<'END' || exit 1
import hashlib, json, pathlib, sys
from launch.training import corpus, data
from models import checkpoints
out, most, model = sys.argv[1:]
tokenizer = checkpoints.load_tokenizer(model)
files = [pathlib.Path(out, x, "conversations.jsonl") for x in ("text", "more")]
rows = [x for f in files if f.exists() for x in f.read_text().splitlines()]
rows = sorted(rows, key=lambda row: hashlib.sha256(row.encode()).digest())
splits, tokens = {"train": [], "validation": []}, 0
for row in rows:
  messages = json.loads(row)["messages"]
  if corpus.split_by_hash(json.dumps(messages)) == "validation":
    splits["validation"].append(row)
  elif tokens < int(most):
    splits["train"].append(row)
    tokens += len(data.token_ids(messages, tokenizer))
print(f"{tokens:,} tokens of {len(splits['train']):,} conversations")
for name, kept in splits.items():
  folder = pathlib.Path(out, f"text-{most}", name)
  folder.mkdir(parents=True)
  (folder / "conversations.jsonl").write_text("\n".join(kept) + "\n")
END
}

features() { # so many tokens' features of the text, beside those that are there
  part "$all"
  "$python" -m launch.tools.features --config=configs/train_head.py:eagle3 \
    --config.target="$model" --config.dataset="$out/text-$all" \
    --config.sequence_length=512 --config.batch_size=2 --first_tokens="$1" \
    --output="$out/features" || exit 1
}

training() { # name, tokens of text, steps of BATCH rows, more flags
  name=$1 tokens=$2 steps=$3
  shift 3
  [ -e "$out/$name" ] && return
  if [ -n "$STORED" ]; then
    features "$tokens"
    set -- --config.dataset="$out/text-$all" --config.features="$out/features" "$@"
  else
    part "$tokens"
    set -- --config.dataset="$out/text-$tokens" "$@"
  fi
  "$python" -m launch.train \
    --config=configs/train_head.py:"$kind" --config.target="$model" \
    --config.sequence_length=512 --config.batch_size="${BATCH:-32}" \
    --config.num_steps="$steps" --config.warmup_steps=100 --config.decay_share=0.5 \
    --config.validate_every=500 --config.sample_every=0 --config.checkpoint_every=500 \
    --config.compute_dtype="${COMPUTE:-float32}" \
    --workdir="$out/train-$name" --export="$out/$name" "$@" || exit 1
}

words=--config.head.draft_vocab_size=8192

# Equal passes over more and more text, and a wider MLP over all of it.
curve() {
  for tokens in ${POINTS:-100000 300000 1000000} "${FIRST:-$all}"; do
    training "curve-$tokens" "$tokens" "${CURVE_STEPS:-610}" $words \
      --config.head.depth=1 --config.learning_rate=2e-3
  done
  training curve-wide "${FIRST:-$all}" "${CURVE_STEPS:-610}" $words \
    --config.head.depth=1 --config.learning_rate=2e-3 --config.head.mlp_dim=3072
}

# Other drafts, each trained for the time that two cores need for 500 steps of the
# curve with the settings above.
others() {
  part "$all"
  kind=mtp
  training mtp "${FIRST:-$all}" 142 --config.head.depth=1 \
    --config.learning_rate=2e-3 --config.warmup_steps=28
  kind=medusa
  training medusa "${FIRST:-$all}" 821 $words --config.head.depth=1 \
    --config.learning_rate=2e-3 --config.warmup_steps=164
  kind=eagle3
  [ -e "$out/draft" ] || "$python" -m launch.train \
    --config=configs/train_embedded.py:draft --config.teacher="$model" \
    --config.tokenizer="$model" --config.model.vocab_size=49152 \
    --config.dataset="$out/text-$all" --config.sequence_length=512 \
    --config.batch_size="${BATCH:-32}" --config.num_steps=85 --config.warmup_steps=17 \
    --config.decay_share=0.5 --config.learning_rate=2e-3 \
    --config.validate_every=500 --config.sample_every=0 \
    --workdir="$out/train-draft" --export="$out/draft" || exit 1
}

# Goes on with the head that is shipped, and its words.
head() {
  training head "${FIRST:-$all}" "${STEPS:-2400}" --config.head.depth=2 \
    --config.learning_rate=2e-3 --config.decay_share=0.9 \
    --config.init_from=models/pretrained/smollm2-eagle3
}

tasks=translation,qa,math_reasoning # of short prompts

# The best static trees of the head, by ranks counted along other questions.
ranked() {
  [ -e "$out/ranked.jsonl" ] ||
    "$python" - "$questions" "$tasks" "$out/ranked.jsonl" <<'END' || exit 1
import json, sys
from launch.evaluation import questions
every = questions.read(sys.argv[1])
every = questions.of_categories(every, sys.argv[2].split(","))
asked = questions.subset(every, 48, seed=0)
with open(sys.argv[3], "w") as file:
  for one in questions.subset(every, 72, seed=0):
    if one not in asked:
      turn = {"role": "user", "content": one.turns[0]}
      print(json.dumps({"messages": [turn]}), file=file)
END
  [ -e "$out/ranked.json" ] || "$python" -m launch.tools.best_tree \
    --config=configs/smollm2.py --config.checkpoints.eagle3="$out/head" \
    --config.drafter='eagle3(siblings=top_k, weights=int8)' --config.rule=match \
    --config.max_new_tokens=64 --prompts="$out/ranked.jsonl" \
    --output="$out/ranked.json" || exit 1
}

static() { # the best tree of so many nodes
  "$python" -c 'import json, sys
trees = json.load(open(sys.argv[1]))["trees"]
print(", ".join(map(str, trees[int(sys.argv[2])]["parents"])))' "$out/ranked.json" "$1"
}

shapes() { # which draft pays, on full batches of questions of three kinds
  ranked
  seven=$(static 7) || exit 1
  one='weights=int8, tokens=1' two='weights=int8, tokens=2'
  three='weights=int8, tokens=3'
  [ -e "$out/shapes.json" ] || "$python" -m launch.evaluate \
    --config=configs/smollm2.py --config.checkpoints.eagle3="$out/head" \
    --questions="$questions" --output="$out/shapes.json" \
    --config.max_new_tokens=64 --batch_sizes=1,4,8 --temperatures=0,1 \
    --subset=24 --categories="$tasks" --timing=none \
    --systems="eagle3($one), with_rule(eagle3($two), block),
      with_rule(eagle3($three), block),
      with_widths(eagle3($three, policy=confidence), 1, 2),
      with_rule(eagle3(tree=($seven), siblings=top_k, weights=int8), match),
      with_rule(eagle3(tree=dynamic(7, top_k=2), weights=int8,
        tokens=4), match),
      with_rule(eagle3(tree=(-1, 0, 0, 1), siblings=without_replacement,
        weights=int8), recursive),
      with_rule(eagle3(tree=paths(2), $two), block_transport),
      repeats(eagle3($three), tokens=7)" || exit 1
}

for part; do $part; done
