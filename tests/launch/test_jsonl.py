"""Files of JSON lines, and that every command reads them alike."""

import codecs
import json

import ml_collections
import pytest
from files import EMBEDDED

from launch import jsonl, prompts, report
from launch.assembly import retrieval
from launch.evaluation import questions
from launch.training import data, t5_data
from models import tokenizers

# str.splitlines ends a line at each of them; JSON needs none escaped.
ODD = "one\u2028two\u2029three\u0085four"
RECORD = {
  "id": 1, "question_id": 1, "category": "a", "turns": [ODD], "prompt": ODD,
  "input": ODD, "output": ODD, "completion": ODD, "text": ODD,
  "num_target_calls": 1, "token_ids": [1],
}  # fmt: skip


def of_prompts(path):
  actual, problems = prompts.read_jsonl(
    str(path), tokenizers.load(EMBEDDED), max_tokens=90
  )
  assert not problems
  return [one.text for one in actual]


def of_pairs(path):
  config = ml_collections.ConfigDict({"dataset": str(path), "answers": ""})
  return [said for said, _ in t5_data.pairs(config, "train")]


READERS = {
  "prompts": of_prompts,
  "questions": lambda path: [q.turns[0] for q in questions.read(path)],
  "corpora": lambda path: retrieval.texts(str(path)),
  "training": lambda path: list(data.documents_of(path)),
  "pairs": of_pairs,
  "tables": lambda path: [one["text"] for one in report.read(str(path))],
}


@pytest.fixture(params=READERS)
def read(request):
  return READERS[request.param]


@pytest.mark.parametrize("start", [b"", codecs.BOM_UTF8], ids=["", "BOM"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
def test_every_reader_takes_all_text_that_json_does(read, tmp_path, start, end):
  line = json.dumps(RECORD, ensure_ascii=False).encode()
  path = tmp_path / "in.jsonl"
  path.write_bytes(start + end + line + end + b" " + end)
  assert read(path) == [ODD]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32-le"])
def test_every_reader_refuses_files_that_are_no_utf8(read, tmp_path, encoding):
  path = tmp_path / "in.jsonl"
  path.write_bytes((json.dumps(RECORD) + "\n").encode(encoding))
  with pytest.raises(ValueError, match=r"in\.jsonl: not UTF-8") as error:
    read(path)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("line", "words"),
  [
    (b'{"a": 1', "not JSON: "),
    (b'{"a": "\xff"}', "not UTF-8"),
    (codecs.BOM_UTF8 + b"{}", "not JSON: "),
    (b"[" * 100_000, "nested too deeply"),
  ],
)
def test_a_line_that_is_no_json_is_named(tmp_path, line, words):
  path = tmp_path / "in.jsonl"
  path.write_bytes(b"{}\n\n" + line + b"\n")
  with pytest.raises(ValueError, match=rf"in\.jsonl:3: {words}"):
    list(jsonl.read(path))
