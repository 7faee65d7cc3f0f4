"""`/tokenize` and `/detokenize`."""

import json

import pytest
import served

from launch.serving import schemas
from launch.serving.refusals import RefusalError
from models import chat

TALK = [{"role": "user", "content": "x"}]


def call(function, body):
  return function(
    json.dumps(body).encode(), served.tokenizer(), served.defaults_of()
  )


def test_a_text_is_tokenized_and_read_again():
  tokenizer, text = served.tokenizer(), "def é(x):<|endoftext|>"
  body = {"prompt": text, "return_token_strs": True, "model": "toy"}
  actual = call(schemas.tokenize, body)
  ids = tokenizer.backend.encode(text).ids
  assert actual == {
    "count": len(ids),
    "max_model_len": 160,
    "tokens": ids,
    "token_strs": [tokenizer.backend.id_to_token(i) for i in ids],
  }
  assert call(schemas.detokenize, {"tokens": ids}) == {"prompt": text}


def test_a_conversation_is_tokenized_as_it_is_completed():
  asks = call(schemas.tokenize, {"messages": TALK})
  assert asks["token_strs"] is None
  assert asks["tokens"] == chat.encode(served.tokenizer(), TALK)
  ends = call(
    schemas.tokenize, {"messages": TALK, "add_generation_prompt": False}
  )
  assert ends["tokens"] == asks["tokens"][: ends["count"]]
  assert ends["count"] < asks["count"]


@pytest.mark.parametrize(
  "function, body, param",
  [
    (schemas.tokenize, {"prompt": 5}, "prompt"),
    (schemas.tokenize, {"prompt": "\ud800"}, "prompt"),
    (schemas.tokenize, {"prompt": "x", "best_of": 1}, "best_of"),
    (schemas.tokenize, {"prompt": "x", "model": "y"}, "model"),
    (
      schemas.tokenize,
      {"messages": TALK, "add_special_tokens": True},
      "add_special_tokens",
    ),
    (schemas.detokenize, {"tokens": [10**6]}, "tokens"),
    (schemas.detokenize, {"tokens": "x"}, "tokens"),
    (schemas.detokenize, {}, "tokens"),
  ],
)
def test_other_bodies_are_refused(function, body, param):
  with pytest.raises(RefusalError) as error:
    call(function, body)
  assert error.value.param == param
