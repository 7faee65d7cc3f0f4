#!/bin/sh
# Makes every plan of this folder anew; one to three minutes of a core each, the
# sweep two or three.
#
#   docs/plans/run.sh [NAME...]
cd "$(dirname "$0")/../.." || exit 1

plan() {
  name=$1
  shift
  for wanted in $names; do
    if [ "$wanted" = "$name" ] || [ "$wanted" = all ]; then
      "${PYTHON:-.venv/bin/python}" -m launch.plan "$@" --overwrite \
        --output="docs/plans/$name.json" || exit 1
    fi
  done
}

names=${*:-all}
plan 2.8b-v5e-4 --topology=v5e-4 --target=pythia-2.8b --max_length=2048 \
  --drafter='model("pythia-70m", tokens=4)'
plan 8b-v5e-8 --topology=v5e-8 --target=llama-3.1-8b \
  --drafter='model("llama-3.2-1b", tokens=4)'
plan 8b-v5e-8-plain --topology=v5e-8 --target=llama-3.1-8b --batch_size=16 \
  --max_length=8192 --text_length=1000 --drafter=plain
plan 8b-v5e-8-int8 --topology=v5e-8 --target=llama-3.1-8b --drafter=plain \
  --weights=int8 --cache=int8
plan 8b-v5e-8-int4 --topology=v5e-8 --target=llama-3.1-8b --drafter=plain \
  --weights=int4 --cache=int8
plan 8b-v6e-8-fp8 --topology=v6e-8 --target=llama-3.1-8b --drafter=plain \
  --weights=fp8 --cache=fp8
# The target's own weights in eight bits draft.
plan 8b-v5e-8-own-int8 --topology=v5e-8 --target=llama-3.1-8b \
  --drafter='quantised_self(bits=8, tokens=2)'
plan 8b-v5e-8-paths --topology=v5e-8 --target=llama-3.1-8b --rule=kseq \
  --drafter='model("llama-3.2-1b", tokens=4, tree=paths(8))'
plan 8b-v5e-8-tree --topology=v5e-8 --target=llama-3.1-8b --rule=recursive \
  --drafter='model("llama-3.2-1b", tree=(-1,0,0,0,0,1,1,1,2,2,3,4,5,5,6,7,8,9,10,12,12,13,14,16,17,19,20,21,25,26,27,29,30), siblings=without_replacement)'
plan 70b-v5e-16 --topology=v5e-16 --target=llama-3.1-70b \
  --drafter='model("llama-3.2-1b", tokens=4)'
plan 70b-v6e-8 --topology=v6e-8 --target=llama-3.1-70b \
  --drafter='model("llama-3.2-1b", tokens=4)'
plan 70b-v5p-8 --topology=v5p-8 --target=llama-3.1-70b \
  --drafter='model("llama-3.2-1b", tokens=4)'
plan 405b-v5p-64 --topology=v5p-64 --target=llama-3.1-405b \
  --drafter='model("llama-3.1-8b", tokens=4)'
plan 405b-v6e-64 --topology=v6e-64 --target=llama-3.1-405b \
  --drafter='model("llama-3.1-8b", tokens=4)'
# Heads know 2,048 positions.
plan 8b-v5e-16-eagle3 --topology=v5e-16 --target=llama-3.1-8b \
  --mesh=data:2,model:8 --batch_size=16 --max_length=2048 \
  --drafter='eagle3("eagle3-llama-3.1-8b", tokens=4)'
plan 8b-v6e-8-eagle3 --topology=v6e-8 --target=llama-3.1-8b --max_length=2048 \
  --drafter='eagle3("eagle3-llama-3.1-8b", tokens=4)'
plan 8b-v6e-8-eagle3-grown --topology=v6e-8 --target=llama-3.1-8b \
  --max_length=2048 \
  --drafter='eagle3("eagle3-llama-3.1-8b", tokens=7, tree=dynamic(59))'
plan 8b-v5e-16-medusa --topology=v5e-16 --target=llama-3.1-8b \
  --mesh=data:2,model:8 --batch_size=16 --max_length=2048 \
  --drafter='medusa("medusa-llama-3.1-8b", tokens=4)'
plan 8b-v6e-8-medusa --topology=v6e-8 --target=llama-3.1-8b --max_length=2048 \
  --drafter='medusa("medusa-llama-3.1-8b", tokens=4)'
plan 70b-v5e-16-eagle3 --topology=v5e-16 --target=llama-3.1-70b \
  --max_length=2048 --drafter='eagle3("eagle3-llama-3.1-70b", tokens=4)'
plan 70b-v5e-16-medusa --topology=v5e-16 --target=llama-3.1-70b \
  --max_length=2048 --drafter='medusa("medusa-llama-3.1-70b", tokens=4)'
plan 70b-v6e-8-eagle3 --topology=v6e-8 --target=llama-3.1-70b \
  --max_length=2048 --drafter='eagle3("eagle3-llama-3.1-70b", tokens=4)'
plan 70b-v6e-8-medusa --topology=v6e-8 --target=llama-3.1-70b \
  --max_length=2048 --drafter='medusa("medusa-llama-3.1-70b", tokens=4)'
# Its own way, of certain tokens; this head knows 40,960 positions.
plan 8b-v5e-16-dflash --topology=v5e-16 --target=qwen3-8b \
  --mesh=data:2,model:8 --batch_size=16 --rule=match --max_length=2048 \
  --drafter='dflash("dflash-qwen3-8b", tokens=15, siblings=given)'
plan 8b-v6e-8-dflash --topology=v6e-8 --target=qwen3-8b --mesh=data:1,model:8 \
  --batch_size=8 --rule=match --max_length=2048 \
  --drafter='dflash("dflash-qwen3-8b", tokens=15, siblings=given)'
# One of each family of described layers, then mixtures.
plan gemma-2-9b-v5e-8 --topology=v5e-8 --target=gemma-2-9b \
  --drafter='ngram(tokens=4)'
plan gemma-3-12b-v5e-8 --topology=v5e-8 --target=gemma-3-12b \
  --drafter='ngram(tokens=4)'
plan gemma-4-31b-v5e-8 --topology=v5e-8 --target=gemma-4-31b \
  --drafter='ngram(tokens=4)'
plan olmo-2-7b-v5e-8 --topology=v5e-8 --target=olmo-2-7b \
  --drafter='ngram(tokens=4)'
plan olmo-3-7b-v5e-8 --topology=v5e-8 --target=olmo-3-7b \
  --mesh=data:4,model:2 --drafter='ngram(tokens=4)'
plan gemma-4-26b-a4b-v5e-8 --topology=v5e-8 --target=gemma-4-26b-a4b \
  --drafter='ngram(tokens=4)'
plan mixtral-8x7b-v6e-8 --topology=v6e-8 --target=mixtral-8x7b \
  --drafter='ngram(tokens=4)'
plan olmoe-1b-7b-v5e-8 --topology=v5e-8 --target=olmoe-1b-7b \
  --drafter='ngram(tokens=4)'
plan qwen1.5-moe-a2.7b-v5e-8 --topology=v5e-8 --target=qwen1.5-moe-a2.7b \
  --drafter='ngram(tokens=4)'
plan glm-4.5-air-v5e-16 --topology=v5e-16 --target=glm-4.5-air \
  --weights=int8 --drafter='ngram(tokens=4)'
plan qwen3-30b-a3b-v5e-8 --topology=v5e-8 --target=qwen3-30b-a3b \
  --drafter='model("qwen3-0.6b", tokens=4)'
plan gpt-oss-20b-v5e-8 --topology=v5e-8 --target=gpt-oss-20b \
  --drafter='ngram(tokens=4)'
# As it is published, its experts in MXFP4.
plan gpt-oss-20b-v5e-8-mxfp4 --topology=v5e-8 --target=gpt-oss-20b \
  --weights='fp4(output=False, dense=False)' --drafter='ngram(tokens=4)'
# Recurrent layers, and the head that comes with them.
plan qwen3.5-27b-v5e-16-mtp --topology=v5e-16 --target=qwen3.5-27b \
  --mesh=data:2,model:8 --batch_size=16 --drafter='mtp(tokens=3)'
plan qwen3.5-27b-v6e-8-mtp --topology=v6e-8 --target=qwen3.5-27b \
  --batch_size=8 --drafter='mtp(tokens=3)'
plan sweeps/2.8b --sweep --topology=v5e-4,v6e-4 --target=pythia-2.8b \
  --max_length=2048 --plot=docs/plans/sweeps/2.8b.svg \
  --drafter='model("pythia-70m", tokens=2), model("pythia-70m", tokens=6)'
mkdir -p docs/plans/t5
for draft in small base large; do
  for slice in v5e-8 v4-8; do
    plan "t5/xxl-$draft-$slice" --topology=$slice --target=t5-1.1-xxl \
      --input_length=512 --max_length=512 --prompt_length=1 \
      --drafter="model('t5-1.1-$draft', tokens=7)"
  done
done
