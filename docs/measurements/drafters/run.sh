#!/bin/sh
# What docs/evaluation.md says of the embedded pair: every way to draft answers the same
# held-out prompts in turn, at temperatures 0 and 1 and batch sizes 1 and 8; what is
# looked up in a corpus is looked up in the files that the pair was trained on. `trees`:
# which tree of its EAGLE-3 head pays at batch size 1. Wants the machine for itself, about
# 35 minutes of two cores and 25 for the trees. What is there is not made again, and a
# stopped run goes on.
#
#   docs/measurements/drafters/run.sh FOLDER drafters trees
cd "$(dirname "$0")/../../.." || exit 1
python=${PYTHON:-.venv/bin/python}
out=$1
shift
mkdir -p "$out" || exit 1

[ -e "$out/held-out.jsonl" ] || "$python" -m launch.tools.held_out_prompts --count=64 \
  --output="$out/held-out.jsonl" || exit 1
"$python" - "$out" <<'END' || exit 1
import json, pathlib, sys
from launch.training import corpus
out = pathlib.Path(sys.argv[1])
with open(out / "asked.jsonl", "w") as asked:
  for line in open(out / "held-out.jsonl"):
    one = json.loads(line)
    question = {"question_id": one["id"], "category": "python", "task": "python"}
    asked.write(json.dumps(question | {"turns": [one["prompt"]]}) + "\n")
with open(out / "trained.jsonl", "w") as texts:
  for file in corpus.python_files(split="train"):
    texts.write(json.dumps({"text": file.text}) + "\n")
END
index=$out/trained.safetensors
[ -e "$index" ] || "$python" -m launch.tools.corpus_index --input="$out/trained.jsonl" \
  --target=models/pretrained/target --output="$index" || exit 1

run() { # name, flags
  name=$1
  shift
  [ -e "$out/$name.json" ] || "$python" -m launch.evaluate \
    --config=configs/embedded.py --config.max_new_tokens=64 \
    --questions="$out/asked.jsonl" "$@" --output="$out/$name.json" \
    >"$out/$name.log" 2>&1 || exit 1
}

drafters() {
  of="tokens=3, nodes=8" from="corpus=\"$index\""
  systems="model(tokens=3), ngram(tokens=3), eagle3(tokens=3), medusa(tokens=3)"
  systems="$systems, with_rule(eagle3(tokens=3, tree=dynamic(8, top_k=4)), match)"
  skipped=docs/self_speculation/embedded-bayesian.json
  systems="$systems, layer_skip(\"$skipped\", tokens=1)"
  systems="$systems, with_rule(suffix($of), match), with_rule(suffix($of, $from), match)"
  systems="$systems, with_rule(rest($of, $from), match)"
  systems="$systems, with_rule(lookahead(tokens=3, window=5, num_guesses=5), match)"
  systems="$systems, with_rule(rasd($of, $from, siblings=top_k), match)"
  systems="$systems, with_rule(rasd($of, $from), recursive)"
  run all --systems="$systems" --temperatures=0,1 --batch_sizes=1,8
  for temperature in 0 1; do
    run "online-$temperature" --temperatures="$temperature" --batch_sizes=1 \
      --systems="model(tokens=3), online(model(tokens=3), rate=2e-4)"
  done
}

# A chain, the fastest static tree by what was measured of ranks and passes, and dynamic
# trees; a static tree's children are certain at temperature 0 and drawn at 1. Ranks are
# counted on the 64 prompts after those that are answered.
trees() {
  [ -e "$out/ranked.jsonl" ] || {
    "$python" -m launch.tools.held_out_prompts --count=128 --output="$out/more.jsonl" &&
      tail -n 64 "$out/more.jsonl" >"$out/ranked.jsonl"
  } || exit 1
  for temperature in 0 1; do
    siblings=top_k rule=match
    [ "$temperature" = 0 ] || { siblings=without_replacement rule=recursive; }
    set -- --config=configs/embedded.py \
      --config.temperature="$temperature" --config.batch_size=1 \
      --config.max_new_tokens=64 --prompts="$out/ranked.jsonl"
    [ -e "$out/costs-$temperature.json" ] || "$python" -m launch.evaluate "$@" \
      --config.drafter='eagle3(tokens=3)' --rounds=5 --timing=passes \
      --output="$out/costs-$temperature.json" || exit 1
    [ -e "$out/tree-$temperature.json" ] || "$python" -m launch.tools.best_tree "$@" \
      --config.drafter="eagle3(siblings=$siblings)" --config.rule=$rule \
      --timings="$out/costs-$temperature.json" \
      --output="$out/tree-$temperature.json" || exit 1
    systems=plain
    for depth in 1 2 3 4; do systems="$systems, eagle3(tokens=$depth)"; done
    for nodes in 4 6 8 fastest; do
      tree=$("$python" - "$out/tree-$temperature.json" "$nodes" <<'END'
import json, sys
found = json.load(open(sys.argv[1]))
size = sys.argv[2]
tree = found["best"] if size == "fastest" else found["trees"][int(size)]
print(", ".join(map(str, tree["parents"])))
END
      ) || exit 1
      static="with_rule(eagle3(tree=($tree), siblings=$siblings), $rule)"
      case $systems in
        *"$static"*) ;; # the fastest is one of the others
        *) [ "$tree" = -1 ] || systems="$systems, $static" ;;
      esac
    done
    for nodes in 6 8 10; do
      dynamic="eagle3(tokens=3, tree=dynamic($nodes, top_k=4))"
      systems="$systems, with_rule($dynamic, match)"
    done
    run "trees-$temperature" --systems="$systems" --temperatures="$temperature" \
      --batch_sizes=1
  done
}

for part; do $part; done
"$python" -m launch.tables evaluation "$out"/all.json "$out"/online-*.json \
  "$out"/trees-*.json
