"""Bodies of requests: what is done, what is ignored, what is refused."""

import dataclasses
import json

import pytest
import served

from launch.serving import schemas
from launch.serving.control import Request
from launch.serving.schemas import RefusalError

DEFAULTS = served.defaults_of()
SMALL = dataclasses.replace(DEFAULTS, longest_prompt=8, max_length=10)
TALK = [{"role": "user", "content": "x"}]


def read(record, *, defaults=DEFAULTS):
  body = record if isinstance(record, bytes) else json.dumps(record).encode()
  return schemas.read(
    body,
    is_chat=isinstance(record, dict) and "messages" in record,
    tokenizer=served.tokenizer(),
    defaults=defaults,
  )


def refused(record, **more):
  with pytest.raises(RefusalError) as error:
    read(record, **more)
  return error.value


@pytest.mark.parametrize(
  "body",
  [b"", b"[]", b"\xff\xfe", b"[" * 10_000, b'{"prompt": "\\ud800"}',
   b'{"prompt": "x", "temperature": NaN}',
   b'{"prompt": [' + b"1" * 5000 + b"]}"],
  ids=range(7),
)  # fmt: skip
def test_malformed_bodies_are_rejected(body):
  error = refused(body)
  assert (error.status, error.kind) == (400, "invalid_request_error")
  assert 0 < len(error.message) < 500


@pytest.mark.parametrize(
  "settings",
  [
    dict(temperature=-1), dict(top_k=1.5), dict(n=17), dict(n=True),
    dict(seed=2**64), dict(max_tokens=0), dict(stop=""),
    dict(stop=[str(i) for i in range(17)]), dict(stream="yes"),
    dict(logprobs=6), dict(logit_bias={"5": 101}), dict(logit_bias={"x": 1}),
    dict(stop_token_ids=[4096]), dict(best_of=2), dict(prompt=[4096]),
    dict(prompt=[1, "a"]), dict(prompt=None), dict(slo_ms_per_token=50),
    dict(top_logprobs=3), dict(bogus=1), dict(tools=[{"type": "function"}]),
    dict(response_format={"type": "json_object"}), dict(echo=True, logprobs=0),
    dict(messages=[]), dict(messages=[{"role": "user"}]),
    dict(messages=[{"role": "tool", "content": "x"}]),
    dict(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
    dict(messages=[{"role": "user", "content": "\ufdd0 <|endoftext|>"}]),
  ],
  ids=lambda s: "-".join(f"{k}={str(v)[:12]!r}" for k, v in s.items()),
)  # fmt: skip
def test_unsupported_settings_are_rejected_by_field(settings):
  is_chat = "messages" in settings
  error = refused(settings if is_chat else {"prompt": "x"} | settings)
  assert error.status == 400
  assert error.param in settings
  assert is_chat or error.message.startswith(error.param)


NOTHING = dict(
  presence_penalty=0, logit_bias=None, echo=False, user="me", n=1, tools=[],
  response_format={"type": "text"}, max_tokens=None, top_k=-1, bogus=None,
  stream_options={"include_obfuscation": False}, skip_special_tokens=True,
)  # fmt: skip


@pytest.mark.parametrize(
  "settings, changes",
  [
    (NOTHING, {}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_p": 0, "temperature": 1}, {"temperature": 0.0, "top_p": 1.0}),
    ({"seed": -1}, {"seed": (-1 - 0x9E3779B9) % 2**32}),
    ({"logprobs": 3}, {"num_likeliest": 3}),
    ({"ignore_eos": True}, {"ignore_stop": True}),
    ({"max_completion_tokens": 7}, {"max_new_tokens": 7}),
    (
      {"logit_bias": {"5": -100, "3": 2.5}, "stop_token_ids": [9, 8, 9]},
      {"logit_bias": ((3, 2.5), (5, -100.0)), "stop_token_ids": (9, 8, 9)},
    ),
    (
      {"presence_penalty": -2, "repetition_penalty": 1.5, "min_tokens": 7},
      {"presence_penalty": -2, "repetition_penalty": 1.5, "min_tokens": 7},
    ),
  ],
  ids=str,
)
def test_client_settings_are_translated_to_requests(settings, changes):
  actual = read({"prompt": "x", "seed": 5} | settings).request
  expected = Request(
    token_ids=tuple(served.tokenizer().encode("x")), max_new_tokens=16,
    temperature=0.0, seed=5,
  )  # fmt: skip
  assert actual == dataclasses.replace(expected, **changes)


def test_openai_chat_messages_are_accepted():
  part = lambda text: {"type": "text", "text": text}
  plain = [
    {"role": "system", "content": "Short."}, {"role": "user", "content": "a b"}
  ]  # fmt: skip
  same = [
    {"role": "developer", "content": [part("Short.")], "refusal": None},
    {"role": "user", "content": [part("a "), part("b")], "name": "Ada"},
  ]
  asks = read({"messages": plain}), read({"messages": same})
  assert asks[0].prompts == asks[1].prompts
  assert asks[0].budgets == [32]
  some = read({"messages": TALK, "logprobs": True, "top_logprobs": 20})
  assert (some.log_probs, some.request.num_likeliest) == (True, 20)
  assert refused({"messages": TALK, "top_logprobs": 2}).param == "top_logprobs"


@pytest.mark.parametrize(
  "record, param, words",
  [
    ({"prompt": [1] * 8, "max_tokens": 3}, "max_tokens",
     "you requested 11 tokens (8 in the prompt, 3 in the completion)"),
    ({"prompt": [1] * 9}, "prompt", "your prompt resulted in 9 tokens"),
    ({"messages": [{"role": "user", "content": "x " * 100}]}, "messages",
     "your messages resulted in "),
  ],
)  # fmt: skip
def test_context_overflow_errors_use_the_openai_wording(record, param, words):
  """They look for these words, or the code, and send less."""
  error = refused(record, defaults=SMALL)
  assert (error.param, error.code) == (param, "context_length_exceeded")
  assert "This model's maximum context length is 10 tokens." in error.message
  assert words in error.message
  assert read({"prompt": [1] * 8}, defaults=SMALL).budgets == [2]
