#!/bin/sh
# Trains heads for SmolLM2 on its own text, and measures them, on one GPU. Not
# yet run on one. train and measure go on where they were stopped, with what is
# in build/smollm2. QUESTIONS.jsonl is Spec-Bench's file.
#
#   docs/measurements/smollm2-heads.sh text 1 QUESTIONS.jsonl
#     ... and 2 to 5: parts of 6 million tokens
#   docs/measurements/smollm2-heads.sh train KIND PARTS [FLAG...]
#     KIND as in configs/train_head.py; the first PARTS of the text, in one pass;
#     for the curve of acceptance, 1, 2 and 5; repeat until it exits with 0
#   docs/measurements/smollm2-heads.sh measure KIND PARTS QUESTIONS.jsonl
#
# Of small size, on any machine: COUNT=64 ROWS=16 STEPS=4 SUBSET=6 ROUNDS=1
# TOKENS=40 DTYPE= before each, and to train the flags --config.batch_size=2
# --config.warmup_steps=1 --config.validate_every=0.
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-.venv/bin/python}
out=build/smollm2 dtype=${DTYPE-bfloat16} rows=${ROWS:-4096}
each=$((6200000 / 16384)) # steps for a part, in batches of 32 rows of 512
mkdir -p "$out" || exit 1
target=$("$python" -m launch.tools.fetch_smollm2) || exit 1
decode="--config=configs/smollm2.py --config.dtype=${dtype:-float32}"

case $1 in
  text)
    exec "$python" -m launch.tools.self_data $decode --config.seed="$2" \
      --output="$out/part-$2" --overwrite --config.drafter=plain --num_rows="$rows" \
      --config.max_length=576 --config.max_new_tokens="${TOKENS:-192}" \
      --count="${COUNT:-26775}" --temperatures=0.6,0.8,1.0 \
      --answer_temperatures=0,1 --keep_out="$3" \
      --system_prompts=launch/training/users.txt
    ;;
  train)
    kind=$2 parts=$3 run="$out/$2-$3" text="$out/text-$3"
    shift 3
    mkdir -p "$text/train" "$text/validation"
    for part in $(seq "$parts"); do
      cat "$out/part-$part/conversations.jsonl"
    done | awk -v text="$text" '{
      print > (text (NR % 50 == 1 ? "/validation" : "/train") "/all.jsonl")
    }'
    steps=${STEPS:-$((each * parts))}
    [ "$kind" != eagle3 ] || set -- --config.head.depth=5 "$@"
    exec timeout "${SECONDS_A_CALL:-560}" "$python" -m launch.train \
      --config="configs/train_head.py:$kind" --config.target="$target" \
      --config.dataset="$text" --config.head.draft_vocab_size=8192 \
      --config.sequence_length=512 --config.batch_size=32 \
      --config.num_steps="$steps" --config.warmup_steps=100 \
      --config.decay_share=0.9 --config.learning_rate=2e-3 \
      --config.compute_dtype="$dtype" --workdir="$run" --export="$run.head" "$@"
    ;;
  measure)
    head="$out/$2-$3.head"
    systems=
    for tokens in 2 3 5; do
      systems="$systems $2('$head', tokens=$tokens),"
    done
    systems="$systems repeats($2('$head', tokens=3), tokens=7),"
    for nodes in 8 16 32 64; do
      systems="$systems with_rule($2('$head', tokens=5, tree=dynamic($nodes)), match),"
    done
    exec "$python" -m launch.evaluate $decode --questions="$4" \
      --subset="${SUBSET:-120}" --config.max_new_tokens="${TOKENS:-128}" \
      --rounds="${ROUNDS:-2}" --timing=passes --temperatures=0,1 \
      --systems="${systems%,}" --output="$out/$2-$3.json"
    ;;
  *) sed -n '2,18s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
