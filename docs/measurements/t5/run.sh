#!/bin/sh
# What docs/encoder_decoder.md says of a trained pair: decodes the test with every
# draft and rule, scores the answers, and times both drafts. What is there is not
# made again.
#
#   docs/measurements/t5/run.sh FOLDER     of configs/train_t5.py, trained
cd "$(dirname "$0")/../../.." || exit 1
python=${PYTHON:-.venv/bin/python}
w=$1 out=$1/measured answers='' summaries=''
mkdir -p "$out" || exit 1

decode() { # NAME DRAFT DRAFTER FLAG...
  name=$1 draft=$2 drafter=$3
  shift 3
  [ -e "$out/$name.json" ] || "$python" -m launch.decode \
    --config="configs/t5.py:target=$w/verifier,draft=$w/$draft" \
    --config.drafter="$drafter" --config.batch_size=60 \
    --config.max_new_tokens=40 --nobaseline \
    --prompts="$w/test.jsonl" --output="$out/$name.jsonl" \
    --summary="$out/$name.json" "$@" >"$out/$name.log" 2>&1 ||
    { tail -n 3 "$out/$name.log" >&2; exit 1; }
  answers=$answers,$out/$name.jsonl summaries=$summaries,$out/$name.json
}

for at in 0,token 1,block; do # at temperature 0 both rules are one
  t=--config.temperature=${at%,*} rule=${at#*,}
  decode "plain-${at%,*}" draft plain "$t"
  decode "draft-$rule-${at%,*}" draft 'model(tokens=7)' "$t" --config.rule="$rule"
  decode "block-$rule-${at%,*}" block 'specdec(tokens=7)' "$t" --config.rule="$rule"
done
for limits in 1,3 3,1 3,3 5,3; do
  beta=${limits%,*} tau=${limits#*,}
  decode "block-$beta-$tau" block 'specdec(tokens=7, siblings=given)' \
    --config.temperature=1 --config.rule="top_beta(beta=$beta, tau=$tau)"
done
for limits in 1,3 5,3; do # a model's drafts that are certain: its likeliest
  beta=${limits%,*} tau=${limits#*,}
  decode "draft-$beta-$tau" draft 'model(tokens=7, siblings=top_k)' \
    --config.temperature=1 --config.rule="top_beta(beta=$beta, tau=$tau)"
done
"$python" -m launch.tools.score_answers --prompts="$w/test.jsonl" \
  --answers="${answers#,}" --summaries="${summaries#,}" \
  --output="$out/scores.json" >"$out/scores.log" &&
  "$python" -m launch.tables answers "$out/scores.json"

# How long it takes, of 24 of the inputs: wants the machine for itself.
awk 'NR % 25 == 1' "$w/test.jsonl" >"$out/some.jsonl"
times=''
for drafter in 'model(tokens=7)' 'specdec(tokens=7)'; do
  draft=block
  [ "$drafter" = 'specdec(tokens=7)' ] || draft=draft
  for at in 0,token 1,block; do
    t=${at%,*} name=$out/timed-$draft-${at%,*}
    [ -e "$name.json" ] || "$python" -m launch.evaluate \
      --config="configs/t5.py:target=$w/verifier,draft=$w/$draft" \
      --config.drafter="$drafter" --config.temperature="$t" \
      --config.rule="${at#*,}" \
      --config.max_new_tokens=40 --rounds=3 \
      --prompts="$out/some.jsonl" --output="$name.json" >"$name.log" 2>&1 ||
      { tail -n 3 "$name.log" >&2; exit 1; }
    times="$times $name.json"
  done
done
# shellcheck disable=SC2086
"$python" -m launch.tables speed $times
