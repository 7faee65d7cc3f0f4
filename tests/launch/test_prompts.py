"""Prompts of files: lines are read, or refused by one line each."""

import json

import files
import pytest
import transformers

from launch import prompts as prompts_lib
from models import tokenizers
from specjax.runtime.requests import Settings

TALK = [{"role": "user", "content": "Two and two?"}]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
  """A folder of the embedded tokenizer with a chat template."""
  folder = tmp_path_factory.mktemp("tokenizer")
  tokenizer = tokenizers.load("models/pretrained/target")
  tokenizer.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
  tokenizers.save(tokenizer, str(folder))
  (folder / "chat_template.jinja").write_text(files.CHATML)
  return folder


@pytest.fixture
def read(tmp_path, chatty):
  """Reads records, or lines as they are: the prompts, and what is wrong."""
  tokenizer = tokenizers.load(str(chatty))

  def of(*records):
    path = tmp_path / "in.jsonl"
    lines = [x if isinstance(x, str) else json.dumps(x) for x in records]
    path.write_text("\ufeff" + "".join(f"{line}\n" for line in lines))
    items, problems = prompts_lib.read_jsonl(
      str(path), tokenizer, max_tokens=50, max_new_tokens=20
    )
    return items, [x.removeprefix(str(path)) for x in problems]

  return of


def test_invalid_lines_are_skipped_and_ids_default_to_line_numbers(
  read,
):
  actual, problems = read(
    {"prompt": "a\u2028b"}, "", "[]", "{", {"prompt": "b", "id": None},
    {"prompt": "c", "id": "x"}, {"prompt": "d", "id": 5},
    {"prompt": "e", "id": [1, {"b": 2, "a": 1}]},
    {"prompt": "f", "id": [1, {"a": 1, "b": 2}]},
  )  # fmt: skip
  assert [p.id for p in actual] == [1, 5, "x", [1, {"b": 2, "a": 1}]]
  assert actual[0].text == "a\u2028b"
  assert problems[0].startswith(":3: Input should be an object")
  assert problems[1].startswith(":4: Invalid JSON: EOF while parsing")
  assert problems[2:] == [
    ":7: id: 5 is already used in line 5",
    ':9: id: [1, {"a": 1, "b": 2}] is already used in line 8',
  ]


def test_random_stream_depends_only_on_the_prompt_id(read):
  lines = [{"prompt": "a", "id": i} for i in ("x", 7, -1, True)]
  streams = {str(p.id): p.stream for p in read(*lines)[0]}
  assert streams == {str(p.id): p.stream for p in read(*lines[::-1])[0]}
  assert streams["7"] == 7
  assert len(set(streams.values())) == 4
  assert all(1 << 31 <= streams[i] < 1 << 32 for i in ("x", "-1", "True"))
  samples, _ = read({"prompt": "x", "id": "a", "num_samples": 3})
  assert [p.sample for p in samples] == [0, 1, 2]
  assert len({p.stream for p in samples}) == 3
  seeded, _ = read({"prompt": "x", "num_samples": 3, "seed": 9})
  assert [p.stream for p in seeded] == [0, 1, 2]


def test_chat_messages_encode_like_transformers(read, chatty):
  (actual,), _ = read({"messages": TALK})
  theirs = transformers.AutoTokenizer.from_pretrained(chatty)
  expected = theirs.apply_chat_template(TALK, add_generation_prompt=True)
  assert list(actual.token_ids) == expected["input_ids"]
  (same_text,), _ = read({"prompt": actual.text})
  assert same_text.key != actual.key


def test_per_line_sampling_settings_are_read(read):
  (actual,), problems = read(
    {"prompt": "x", "temperature": 0.5, "top_k": -1, "top_p": 1, "min_p": None,
     "max_new_tokens": 20, "seed": 7, "stop": "\n", "presence_penalty": 1,
     "frequency_penalty": -0.5, "min_tokens": 3, "repetition_penalty": 1.2,
     "logit_bias": {"4": -1, "2": 9.5}, "stop_token_ids": [8, 8],
     "ignore_eos": True}
  )  # fmt: skip
  assert not problems
  assert actual.settings == Settings(
    temperature=0.5, top_k=0, top_p=1, max_new_tokens=20, seed=7,
    presence_penalty=1, frequency_penalty=-0.5, repetition_penalty=1.2,
    logit_bias=((2, 9.5), (4, -1)), min_tokens=3, stop_token_ids=(8, 8),
    ignore_eos=True,
  )  # fmt: skip
  assert actual.stop == ("\n",)


@pytest.mark.parametrize(
  "wants, message",
  [
    ({"temprature": 1}, "unknown field (did you mean 'temperature'"),
    ({"temperature": -1}, "temperature: Input should be greater than or equal"),
    ({"temperature": float("nan")}, "temperature: Input should be a finite"),
    ({"seed": 2**64}, "seed: Input should be less than"),
    ({"max_new_tokens": 21}, "made for 20: raise --config.max_new_tokens"),
    ({"logit_bias": {"1": 200}}, "logit_bias.1: Input should be less"),
    ({"logit_bias": {"9999": 1}}, "logit_bias: token ids are 0 to 4097"),
    ({"stop": ["a", ""]}, "stop.1: String should have at least 1 character"),
    ({"messages": TALK}, "messages: give a prompt or messages, got both"),
    ({"input": "y"}, "input: required for an encoder-decoder"),
    ({"prompt": ""}, "prompt: must not be empty"),
    ({"prompt": None, "messages": [{"role": "user"}]}, "needs a string under"),
    ({"prompt": "x " * 60}, "tokens, but only 50 fit"),
  ],
)  # fmt: skip
def test_invalid_fields_are_reported_in_one_line(read, wants, message):
  actual, (problem,) = read({"prompt": "x", **wants})
  assert not actual
  assert problem.startswith(":1: ")
  assert message in problem
  assert "\n" not in problem
