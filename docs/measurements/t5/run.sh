#!/bin/sh
# What docs/encoder_decoder.md says of a trained pair: decodes the test with every
# draft and rule, and scores the answers. What is there is not decoded again.
#
#   docs/measurements/t5/run.sh FOLDER     of configs/train_t5.py, trained
cd "$(dirname "$0")/../../.." || exit 1
python=${PYTHON:-.venv/bin/python}
w=$1 out=$1/measured answers='' summaries=''
mkdir -p "$out" || exit 1

decode() { # NAME DRAFT FLAG...
  name=$1 draft=$2
  shift 2
  [ -e "$out/$name.json" ] || "$python" -m launch.decode \
    --config="configs/t5.py:target=$w/verifier,draft=$w/$draft" \
    --config.batch_size=60 --config.max_new_tokens=40 --nobaseline \
    --prompts="$w/test.jsonl" --output="$out/$name.jsonl" \
    --summary="$out/$name.json" "$@" >"$out/$name.log" 2>&1 ||
    { tail -n 3 "$out/$name.log" >&2; exit 1; }
  answers=$answers,$out/$name.jsonl summaries=$summaries,$out/$name.json
}

for temperature in 0 1; do
  t=--config.temperature=$temperature
  decode plain-$temperature draft $t --config.num_speculative_tokens=0
  for rule in token block; do
    decode draft-$rule-$temperature draft $t --config.rule=$rule
    decode block-$rule-$temperature block $t --config.rule=$rule
  done
done
for limits in 1,3 2,1 2,3 3,1 3,3 5,1 5,3 5,6; do
  beta=${limits%,*} tau=${limits#*,}
  for draft in block draft; do
    siblings=given
    # A model that drafts draws: with top-k of 1 it says its likeliest tokens.
    [ $draft = block ] || siblings=top_k
    decode "$draft-$beta-$tau" $draft --config.temperature=1 \
      --config.siblings=$siblings --config.rule="top_beta(beta=$beta, tau=$tau)"
  done
done
"$python" -m launch.tools.score_answers --prompts="$w/test.jsonl" \
  --answers="${answers#,}" --summaries="${summaries#,}" \
  --output="$out/scores.json" >"$out/scores.log" &&
  "$python" -m launch.tables answers "$out/scores.json"
