#!/bin/sh
# What docs/evaluation.md says of where an index pays: SmolLM2 answers Spec-Bench's
# questions from documents, for summaries and about code, eight of each, with drafts that
# are looked up in the text alone and in an index too: of the documents that all of the
# benchmark's questions of these kinds are about, or of what the model itself answered
# other questions (conversations.jsonl, which launch.tools.self_data makes); and with a
# ladder, which may stop looking up (docs/adaptive.md). Wants the machine for itself,
# about 35 minutes of two cores, and the model in $XDG_CACHE_HOME. What is there is not
# made again, and a stopped run goes on.
#
#   docs/measurements/retrieval/run.sh FOLDER question.jsonl conversations.jsonl
cd "$(dirname "$0")/../../.." || exit 1
python=${PYTHON:-.venv/bin/python}
out=${1:?a folder} questions=${2:?question.jsonl} conversations=${3:?conversations.jsonl}
mkdir -p "$out" || exit 1

"$python" - "$out" "$questions" "$conversations" <<'END' || exit 1
import collections, json, pathlib, sys
out, questions, conversations = map(pathlib.Path, sys.argv[1:])
kinds = ("rag", "summarization", "coding")
read = lambda path: [json.loads(line) for line in path.read_text().splitlines()]
write = lambda name, rows: (out / name).write_text(
  "".join(json.dumps(row) + "\n" for row in rows))
asked = [one for one in read(questions) if one["category"] in kinds]
write("documents.jsonl", [{"text": turn} for one in asked for turn in one["turns"]])
write("answers.jsonl", [{"text": one["messages"][1]["content"]}
                        for one in read(conversations)])
count, chosen = collections.Counter(), []
for one in asked:
  count[one["category"]] += 1
  if count[one["category"]] <= 8:
    chosen.append(one)
write("asked.jsonl", chosen)
END

target=$("$python" -c "from configs import smollm2; print(smollm2.path())") || exit 1
for name in documents answers; do
  [ -e "$out/$name.safetensors" ] || "$python" -m launch.tools.corpus_index \
    --input="$out/$name.jsonl" --target="$target" --output="$out/$name.safetensors" ||
    exit 1
done

narrow() { # a drafter of trees, verified in the narrowest pass that holds them
  echo "with_rule(with_widths($1, 1, 2, 4), match)"
}

systems="ngram(tokens=4), ladder(ngram, lengths=(0, 2, 4)), $(narrow "suffix(tokens=4)")"
for name in documents answers; do
  index="corpus=\"$out/$name.safetensors\""
  systems="$systems, $(narrow "suffix(tokens=4, $index)")"
done
systems="$systems, $(narrow "rest(tokens=4, $index)")"
[ -e "$out/retrieval.json" ] || "$python" -m launch.evaluate \
  --config=configs/smollm2.py --config.max_new_tokens=64 \
  --questions="$out/asked.jsonl" --systems="$systems" --temperatures=0,1 \
  --batch_sizes=1 --output="$out/retrieval.json" >"$out/retrieval.log" 2>&1 || exit 1
"$python" -m launch.tables evaluation "$out/retrieval.json"
