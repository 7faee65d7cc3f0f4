"""Lines of a prompts file that ask for more than a prompt's completion."""

import hashlib
import json

import pytest
import transformers

from launch import prompts as prompts_lib
from models import tokenizers
from specjax.runtime.requests import Settings

CHATML = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [{"role": "user", "content": "Two and two?"}]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
  """A folder of the embedded tokenizer with a chat template."""
  folder = tmp_path_factory.mktemp("tokenizer")
  tokenizer = tokenizers.load("models/pretrained/target")
  tokenizer.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
  tokenizers.save(tokenizer, str(folder))
  (folder / "chat_template.jinja").write_text(CHATML)
  return folder


@pytest.fixture
def read(tmp_path, chatty):
  """Reads records: the prompts, and what is wrong."""
  tokenizer = tokenizers.load(str(chatty))

  def of(*records):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return prompts_lib.read_jsonl(
      str(path), tokenizer, max_tokens=50, max_new_tokens=20
    )

  return of


def test_messages_become_what_transformers_makes_of_them(read, chatty):
  (actual,), _ = read({"messages": TALK})
  theirs = transformers.AutoTokenizer.from_pretrained(chatty)
  assert (
    list(actual.token_ids)
    == theirs.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"]
  )
  assert actual.text.endswith("<|im_start|>assistant\n")
  (same_text,), _ = read({"prompt": actual.text})
  assert same_text.key != actual.key


def test_a_line_says_what_it_wants(read):
  (actual,), problems = read(
    {"prompt": "x", "temperature": 0.5, "top_k": 3, "top_p": 1, "min_p": None,
     "max_new_tokens": 20, "seed": 7, "stop": "\n", "task": "of a data set",
     "presence_penalty": 1, "frequency_penalty": -0.5, "min_tokens": 3,
     "repetition_penalty": 1.2, "logit_bias": {"4": -1, "2": 9.5},
     "stop_token_ids": [8, 8], "ignore_eos": True}
  )  # fmt: skip
  assert not problems
  assert actual.settings == Settings(
    temperature=0.5, top_k=3, top_p=1, max_new_tokens=20, seed=7,
    presence_penalty=1, frequency_penalty=-0.5, repetition_penalty=1.2,
    logit_bias=((2, 9.5), (4, -1)), min_tokens=3, stop_token_ids=(8,),
    ignore_eos=True,
  )  # fmt: skip
  assert actual.stop == ("\n",)
  assert actual.stream == 0  # of its own seed


def test_samples_are_rows_of_one_id_and_streams_of_their_own(read):
  actual, _ = read({"prompt": "x", "id": "a", "num_samples": 3},
                  {"prompt": "x", "id": "b"},
                  {"prompt": "x", "id": 7, "num_samples": 1})  # fmt: skip
  assert [(p.id, p.sample) for p in actual] == [
    ("a", 0), ("a", 1), ("a", 2), ("b", None), (7, 0),
  ]  # fmt: skip
  for what in ("stream", "key"):
    assert len({getattr(p, what) for p in actual}) == 5
  more, _ = read({"prompt": "x", "id": "a", "num_samples": 5})
  assert more[:3] == actual[:3]  # a file may ask for more of them later
  seeded, _ = read({"prompt": "x", "num_samples": 3, "seed": 9})
  assert [p.stream for p in seeded] == [0, 1, 2]


def test_every_field_tells_rows_apart(read):
  wants = [
    {}, {"temperature": 0.5}, {"temperature": 0}, {"top_k": 4}, {"top_p": 0.5},
    {"min_p": 0.5}, {"max_new_tokens": 4}, {"seed": 1}, {"seed": 0},
    {"stop": "a"}, {"stop": ["a", "b"]}, {"num_samples": 1},
    {"presence_penalty": 1}, {"frequency_penalty": 1}, {"ignore_eos": True},
    {"repetition_penalty": 2}, {"logit_bias": {"1": 2}}, {"min_tokens": 1},
    {"stop_token_ids": [1]},
  ]  # fmt: skip
  keys = [read({"prompt": "x", "id": 0, **w})[0][0].key for w in wants]
  assert len(set(keys)) == len(wants)


def test_a_plain_prompt_keeps_the_key_of_earlier_outputs(read):
  (actual,), _ = read({"prompt": "x", "id": 0})
  assert actual.key == hashlib.sha256(b'[0, "x", 0]').hexdigest()[:16]


@pytest.mark.parametrize(
  "wants, message",
  [
    ({"temprature": 1}, "unknown key 'temprature' (did you mean 'temperature'"),
    ({"max_tokens": 1}, "did you mean 'max_new_tokens'"),
    ({"temperature": -1}, '"temperature" must be a number >= 0'),
    ({"temperature": 1e39}, '"temperature" must be'),
    ({"temperature": float("nan")}, '"temperature" must be'),
    ({"temperature": True}, '"temperature" must be'),
    ({"top_p": 0}, "must be a number in (0, 1]"),
    ({"top_p": 1e-60}, "must be a number in (0, 1]"),
    ({"top_k": 1.5}, "must be a whole number"),
    ({"seed": 2**32}, '"seed" must be in 0..'),
    ({"num_samples": 0}, '"num_samples" must be a whole number in 1..'),
    ({"max_new_tokens": 21}, "made for 20: raise --config.max_new_tokens"),
    ({"presence_penalty": 2.1}, "must be a number in [-2, 2]"),
    ({"repetition_penalty": 0}, "must be a number in"),
    ({"min_tokens": 21}, '"min_tokens" is 21, and at most 20 are emitted'),
    ({"min_tokens": 5, "max_new_tokens": 4}, "at most 4 are emitted"),
    ({"logit_bias": {"many": 1}}, '"logit_bias" must be of token ids in 0..'),
    ({"logit_bias": {"1": 200}}, "must be numbers in [-100, 100]"),
    ({"stop_token_ids": [-1]}, "a list of at most 64 token ids in 0.."),
    ({"ignore_eos": 1}, '"ignore_eos" must be true or false'),
    ({"stop_tokens_ids": [1]}, "did you mean 'stop_token_ids'"),
    ({"stop": ""}, "none empty"),
    ({"stop": ["a", 3]}, "none empty"),
    ({"messages": TALK}, "got both"),
    ({"prompt": None, "messages": []}, "expected a list of"),
    ({"prompt": None, "messages": ["hi"]}, "expected a list of"),
    ({"prompt": None, "messages": [{"role": "user"}]}, "needs a string under"),
    ({"prompt": None, "messages": [{"role": "user", "content": "x " * 60}]},
     "tokens, but only 50 fit"),
  ],
)  # fmt: skip
def test_what_is_no_good_is_one_line(read, wants, message):
  actual, (problem,) = read({"prompt": "x", **wants})
  assert not actual
  assert message in problem
  assert "\n" not in problem


def test_a_row_that_looks_like_a_sample_is_refused(read):
  record = {"prompt": "x", "id": 1, "num_samples": 2}
  forged = {"prompt": "x", "id": {"id": 1, "sample": 1}}
  for lines in ([record, forged], [forged, record]):
    actual, problems = read(*lines)
    assert len(problems) == 1
    assert len({json.dumps(p.row_id, sort_keys=True) for p in actual}) == len(
      actual
    )


@pytest.mark.parametrize("wants", [{"seed": 0}, {"stop": "a"},
                                   {"num_samples": 1}])  # fmt: skip
def test_commands_with_one_setting_for_all_refuse_others(tmp_path, wants):
  path = tmp_path / "in.jsonl"
  path.write_text(json.dumps({"prompt": "x", "id": "a", **wants}) + "\n")
  tokenizer = tokenizers.load("models/pretrained/target")
  told = f'id "a" has settings of its own \\({next(iter(wants))}\\)'
  with pytest.raises(ValueError, match=told):
    prompts_lib.all_of(str(path), tokenizer, max_tokens=50)
