"""Bodies of requests: what is done, what asks for nothing, what is refused."""

import dataclasses
import json

import numpy as np
import pytest
import served

from launch.serving import fields, schemas
from launch.serving.control import Asked
from launch.serving.refusals import RefusalError, error_body

DEFAULTS = served.defaults_of()


def read(record, *, is_chat=False, defaults=DEFAULTS):
  return schemas.read(
    json.dumps(record).encode(),
    is_chat=is_chat,
    tokenizer=served.tokenizer(),
    defaults=defaults,
  )


def refused(record, **more):
  with pytest.raises(RefusalError) as error:
    read(record, **more)
  return error.value


@pytest.mark.parametrize(
  "settings",
  [
    dict(temperature=-1), dict(temperature="hot"), dict(temperature=1e400),
    dict(top_p=0), dict(top_p=1.5), dict(min_p=2), dict(top_k=-1),
    dict(top_k=1.5), dict(n=0), dict(n=17), dict(n=True), dict(seed=-1),
    dict(seed=2**32), dict(max_tokens=0), dict(max_tokens=160), dict(stop=""),
    dict(stop=[1]), dict(stream="yes"), dict(stream_options=5),
    dict(logprobs=6), dict(presence_penalty=2.5), dict(frequency_penalty=-3),
    dict(logit_bias={"5": 101}), dict(echo="yes"), dict(best_of=2),
    dict(logit_bias={"x": 1}), dict(logit_bias={"-1": 1}), dict(logit_bias=[]),
    dict(logit_bias={"1000000": 1}), dict(logit_bias={"5": True}),
    dict(logit_bias={"5": None}), dict(logit_bias={"\u0665": 1}),
    dict(logit_bias={str(i): 1 for i in range(301)}),
    dict(logit_bias={"5": float("nan")}), dict(presence_penalty=float("nan")),
    dict(suffix="x"), dict(bogus=1), dict(prompt=""), dict(prompt=[]),
    dict(prompt=[10**6]), dict(prompt=[[1], []]), dict(prompt=[1, "a"]),
    dict(prompt="x " * 200), dict(prompt="\ud800"),
    dict(slo_ms_per_token=50), dict(slo_class="chat"), dict(ignore_eos=1),
    dict(top_logprobs=3),
    dict(repetition_penalty=0), dict(repetition_penalty=1e400),
    dict(presence_penalty="1"), dict(frequency_penalty=True),
    dict(min_tokens=-1), dict(min_tokens=17), dict(min_tokens=1.5),
    dict(stop_token_ids=5), dict(stop_token_ids=[-1]),
    dict(stop_token_ids=[10**6]), dict(stop_token_ids=[True]),
    dict(stop_token_ids=list(range(65))), dict(stream=True, stream_options=[]),
    dict(stream=True, stream_options={"include_obfuscation": True}),
    dict(stream=True, stream_options={"usage_in_words": True}),
    dict(tools=[{"type": "function"}]), dict(functions=[{"name": "f"}]),
    dict(response_format={"type": "json_object"}),
    dict(logprobs=-1), dict(prompt=None),
    dict(prompt=[[]]), dict(prompt=[True]), dict(prompt=[-1]),
    dict(prompt={"text": "x"}), dict(temperature=True), dict(stop=[["a"]]),
    dict(max_tokens=1.5), dict(max_tokens="4"), dict(skip_special_tokens=False),
    dict(chat_template_kwargs={"enable_thinking": False}),
    dict(use_beam_search=True),
    dict(messages=[]), dict(seed=1.0), dict(seed="1"), dict(n=1.0),
    dict(reasoning_effort="low"), dict(store=True),
  ],
  ids=lambda s: "-".join(f"{k}={str(v)[:12]!r}" for k, v in s.items()),
)  # fmt: skip
def test_what_is_not_done_is_refused(settings):
  error = refused({"prompt": "x", "model": "toy"} | settings)
  assert error.status == 400
  assert error.kind == "invalid_request_error"
  assert error.message
  assert error.param in settings


# As JSON, which has no NaN, but readers of it that do.
HOSTILE = (
  "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-320", "1e-46", "-0.0",
  "0", "1", "-1", "0.5", "2147483648", "18446744073709551616", "1" + "0" * 400,
  "true", "false", '""', '"1"', '"NaN"', r'"\u0000"', r'"\ud800"', "[]",
  "[null]", "[[[]]]", "[NaN]", "[1e999]", '[1, "x"]', "[true]", "[-1]",
  "[2147483648]", "{}", '{"5": NaN}', '{"5": 1e999}',
  '{"5": null}', '{"5": true}', '{"": 1}',
  '{"-1": 1}', '{"1e3": 1}', '{"+5": 1}', '{"5": {"5": 1}}', '{"5": [1]}',
  '{"include_usage": NaN}', '{"include_usage": 1}',
)  # fmt: skip


def answered(body, is_chat):
  """The request that is read of a text, or the refusal."""
  try:
    return schemas.read(
      body.encode(), is_chat=is_chat, tokenizer=served.tokenizer(),
      defaults=DEFAULTS,
    )  # fmt: skip
  except RefusalError as error:
    return error


@pytest.mark.parametrize("is_chat", [False, True])
def test_hostile_values_of_every_field_are_refused_or_fit_the_programs(is_chat):
  """Values that pass are finite, and the same after 32 bits."""
  prompt = {"messages": [{"role": "user", "content": "x"}]}
  prompt = prompt if is_chat else {"prompt": "x"}
  # Beside what some fields want.
  prompt |= {"logprobs": True} if is_chat else {"logprobs": 2}
  known = {*fields.CHAT, *fields.COMPLETION, *fields._NEUTRAL, *fields._UNREAD}
  taken = set()
  for name in sorted({*known, "top_n_sigma"}):
    for value in HOSTILE:
      body = json.dumps({k: v for k, v in prompt.items() if k != name})
      body = f'{body[:-1]}, "{name}": {value}}}'
      actual = answered(body, is_chat)
      if isinstance(actual, RefusalError):
        assert actual.status in (400, 404)
        assert 0 < len(actual.message) < 500
        json.dumps(error_body(actual), allow_nan=False)
        continue
      taken.add(name)
      asked = actual.asked
      tokens, biases, _ = asked.lists()
      assert np.isfinite(asked.warp()).all()
      assert np.isfinite(biases).all()
      assert (tokens >= 0).all()
      again = Asked.of(asked.numbers(), np.array(asked.token_ids))
      np.testing.assert_array_equal(again.numbers(), asked.numbers())
  assert len(taken) > 30


def test_what_asks_for_nothing_is_taken():
  """It is as if it were left out, also where it is null."""
  plain = {"prompt": "x", "seed": 5}
  nothing = dict(
    presence_penalty=0, frequency_penalty=0.0, logit_bias={}, echo=False,
    best_of=1, suffix=None, user="me", ignore_eos=False, stop=None, n=1,
    repetition_penalty=1.0, tools=[], functions=[], function_call="none",
    response_format={"type": "text"}, metadata={"a": "b"}, max_tokens=None,
    stream_options=None, logprobs=None, top_p=1, min_p=0, top_k=0, bogus=None,
    min_tokens=0, stop_token_ids=[], skip_special_tokens=True, priority=3,
    request_id="r1", verbosity="low", chat_template_kwargs={},
    reasoning_effort="none",
  )  # fmt: skip
  assert read(plain | nothing) == read(plain)
  for options in (
    {}, {"include_usage": None, "include_obfuscation": False},
    {"include_usage": False, "continuous_usage_stats": False},
    {"continuous_usage_stats": None},
  ):  # fmt: skip
    actual = read(plain | {"stream": True, "stream_options": options})
    assert actual == read(plain | {"stream": True})
  assert read(plain | {"stop": []}) == read(plain)
  options = {"include_usage": True, "continuous_usage_stats": True}
  assert read(plain | {"stream_options": options}) == read(plain)


def test_what_is_asked_for_is_done():
  actual = read(
    dict(
      prompt=["x", [5, 6]], n=2, seed=3, temperature=2, top_p=0.5, top_k=7,
      min_p=0.1, stop="a", logprobs=0, stream=True, token_origins=True,
      stream_options={"include_usage": True, "continuous_usage_stats": True},
      max_tokens=9, model="toy", ignore_eos=True,
    )
  )  # fmt: skip
  assert actual == schemas.Ask(
    is_chat=False, prompts=((*served.tokenizer().encode("x"),), (5, 6)),
    budgets=(9, 9), num_choices=2, is_seeded=True, stop=("a",),
    log_probs=True, origins=True, stream=True, usage=True,
    usage_so_far=True, objective=None, echo=False,
    asked=Asked(
      token_ids=(*served.tokenizer().encode("x"),), seed=3, max_new_tokens=9,
      temperature=2, top_k=7, top_p=0.5, min_p=0.1, ignore_stop=True,
    ),
  )  # fmt: skip
  chat = read(
    {"messages": [{"role": "user", "content": "x"}], "logprobs": True},
    is_chat=True,
  )
  assert (chat.budgets, chat.log_probs, chat.is_seeded) == ((32,), True, False)
  with_objectives = dataclasses.replace(DEFAULTS, has_objectives=True)
  actual = read(
    {"prompt": "x", "slo_ms_per_token": 50}, defaults=with_objectives
  )
  assert actual.objective == 0.05


def test_a_prompt_is_scored_only_where_it_is_told():
  some = dataclasses.replace(DEFAULTS, scores=True)
  ask = lambda **more: read({"prompt": "x"} | more, defaults=some)
  actual = ask(echo=True, logprobs=1, max_tokens=0)
  assert (actual.asked.scored, actual.asked.num_likeliest) == (True, 1)
  assert actual.budgets == (0,)
  assert ask(echo=True, max_tokens=0).asked.scored
  assert not ask(echo=True, max_tokens=2).asked.scored
  assert not ask(logprobs=0).asked.scored
  assert not ask(echo=True, logprobs=0).asked.num_likeliest
  refused({"prompt": "x", "max_tokens": 0}, defaults=some)
  error = refused({"prompt": "x", "echo": True, "logprobs": 0})
  assert error.param == "echo"
  assert "are not scored on a mesh" in str(error)
  talk = {"messages": [{"role": "user", "content": "x"}], "echo": True}
  assert refused(talk, is_chat=True, defaults=some).param == "echo"


def test_likeliest_tokens_are_asked_for_as_openai_has_it():
  """A number in completions; a flag and a number in chats."""
  ask = lambda value: read({"prompt": "x", "logprobs": value})
  for value, expected in ((True, 0), (False, 0), (0, 0), (5, 5)):
    actual = ask(value)
    assert actual.log_probs == (value is not False)
    assert actual.asked.num_likeliest == expected
  talk = {"messages": [{"role": "user", "content": "x"}]}
  actual = read(talk | {"logprobs": True, "top_logprobs": 20}, is_chat=True)
  assert (actual.log_probs, actual.asked.num_likeliest) == (True, 20)
  assert read(talk | {"top_logprobs": 0}, is_chat=True).asked.num_likeliest == 0
  for wrong in (21, -1, True, 1.0, "3", [2], float("nan"), 10**30):
    body = talk | {"logprobs": True, "top_logprobs": wrong}
    assert refused(body, is_chat=True).param == "top_logprobs"
  assert refused(talk | {"top_logprobs": 2}, is_chat=True).param
  assert refused(talk | {"logprobs": 2}, is_chat=True).param == "logprobs"
  assert refused({"prompt": "x", "top_logprobs": 2}).param == "top_logprobs"


def test_laws_that_read_their_text_are_asked_for_as_everywhere():
  wanted = dict(
    presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.5,
    min_tokens=7,
  )  # fmt: skip
  asked = dict(logit_bias={"5": -100, "3": 2.5}, stop_token_ids=[9, 8, 9])
  prompt = {"prompt": "x", "max_tokens": 7}
  chat = {"messages": [{"role": "user", "content": "x"}]}
  for record, is_chat in ((prompt, False), (chat, True)):
    actual = read(record | wanted | asked, is_chat=is_chat).asked
    assert {name: getattr(actual, name) for name in wanted} == wanted
    assert actual.logit_bias == ((3, 2.5), (5, -100.0))
    assert actual.stop_token_ids == (9, 8)


def test_objectives_have_names():
  classes = schemas.classes_of(["chat=50", "batch=400"])
  assert classes == {"chat": 0.05, "batch": 0.4}
  some = dataclasses.replace(DEFAULTS, has_objectives=True, classes=classes)
  ask = lambda **more: read({"prompt": "x"} | more, defaults=some).objective
  assert ask(slo_class="batch") == 0.4
  assert ask() is None
  usual = dataclasses.replace(some, classes=classes | {"default": 0.1})
  assert read({"prompt": "x"}, defaults=usual).objective == 0.1
  for wrong in ("none", 5, ["chat"]):
    error = refused({"prompt": "x", "slo_class": wrong}, defaults=some)
    assert (error.status, error.param) == (400, "slo_class")
    assert "['batch', 'chat']" in error.message
  both = {"prompt": "x", "slo_class": "chat", "slo_ms_per_token": 50}
  assert "one of" in refused(both, defaults=some).message


@pytest.mark.parametrize("wrong", ["chat", "=5", "a=0", "a=-1", "a=x", "a=nan"])
def test_classes_that_are_none_are_refused(wrong):
  with pytest.raises(ValueError, match="NAME=MILLISECONDS"):
    schemas.classes_of(["b=1", wrong])
  with pytest.raises(ValueError, match="once"):
    schemas.classes_of(["b=1", "b=2"])


def test_a_budget_that_is_not_said_is_cut_to_what_fits():
  small = dataclasses.replace(DEFAULTS, longest_prompt=8, max_length=10)
  assert read({"prompt": [1] * 8}, defaults=small).budgets == (2,)


_TALK = {"messages": [{"role": "user", "content": "x " * 100}]}


@pytest.mark.parametrize(
  "record, param, words",
  [
    ({"prompt": [1] * 8, "max_tokens": 3}, "max_tokens",
     "you requested 11 tokens (8 in the prompt, 3 in the completion)"),
    ({"prompt": [1] * 8, "max_tokens": 2**70}, "max_tokens",
     "(8 in the prompt, 1180591620717411303424 in the completion)"),
    ({"prompt": [1] * 9}, "prompt", "your prompt resulted in 9 tokens"),
    ({"prompt": "x " * 100, "max_tokens": 1}, "prompt", "resulted in 1"),
    (_TALK, "messages", "your messages resulted in "),
  ],
)  # fmt: skip
def test_a_full_context_is_said_as_clients_know_it(record, param, words):
  """They look for these words, or the code, and send less."""
  small = dataclasses.replace(DEFAULTS, longest_prompt=8, max_length=10)
  error = refused(record, defaults=small, is_chat=param == "messages")
  assert (error.param, error.code) == (param, "context_length_exceeded")
  assert "This model's maximum context length is 10 tokens." in error.message
  assert words in error.message


@pytest.mark.parametrize("count", [0, -1, 17, 10**9, 1.5, "2", True])
def test_the_limit_of_choices_that_is_named_is_the_limit(count):
  error = refused({"prompt": "x", "n": count})
  assert error.param == "n"
  assert "16" in error.message
  assert str(count).lower() in error.message
  assert "..10000" not in error.message
  assert read({"prompt": "x", "n": 16}).num_choices == 16


def test_the_vocabulary_is_not_gone_through_for_a_request(monkeypatch):
  """Counting it takes a tenth of a second, while all others wait."""
  monkeypatch.setattr(
    type(served.tokenizer()), "vocabulary", lambda self: 1 / 0
  )
  for prompt in ([5] * 64, [[5] * 64] * 9, ["x", [5]]):
    assert read({"prompt": prompt}).prompts
  assert "in 0..4095" in refused({"prompt": ["x", [4096]]}).message


def test_two_budgets_are_refused_and_each_is_taken():
  talk = {"messages": [{"role": "user", "content": "x"}]}
  for name in ("max_tokens", "max_completion_tokens"):
    assert read(talk | {name: 7}, is_chat=True).budgets == (7,)
    assert read({"prompt": "x", name: 7}).budgets == (7,)
  both = {"max_tokens": 7, "max_completion_tokens": 7}
  assert refused(talk | both, is_chat=True).param in both


def test_another_model_is_not_found():
  error = refused({"prompt": "x", "model": "gpt-4"})
  assert (error.status, error.code) == (404, "model_not_found")


@pytest.mark.parametrize(
  "messages",
  [
    None, [], "hello", [1], [{}], [{"role": "user"}],
    [{"role": 1, "content": "x"}], [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}],
    [{"role": "user", "content": "x " * 200}],
    [{"role": "user", "content": "\ufdd0 <|endoftext|>"}],
    [{"role": "tool", "content": "x", "tool_call_id": "1"}],
    [{"role": "narrator", "content": "x"}],
    [{"role": "user", "content": "x", "name": 5}],
  ],
  ids=range(15),
)  # fmt: skip
def test_conversations_that_are_none_are_refused(messages):
  error = refused({"model": "toy", "messages": messages}, is_chat=True)
  assert (error.status, error.param) == (400, "messages")


def test_a_developer_is_the_system_and_parts_are_one_text():
  """As OpenAI's clients say it."""
  plain = [
    {"role": "system", "content": "Short."}, {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"},
  ]  # fmt: skip
  part = lambda text: {"type": "text", "text": text}
  same = [
    {"role": "developer", "content": [part("Short.")]},
    {"role": "user", "content": [part("a "), part("b")], "name": "Ada"},
    {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
    {"role": "user", "content": [part("d")]},
  ]
  ids = lambda talk: read({"messages": talk}, is_chat=True).prompts
  assert ids(plain) == ids(same)
  assert len(ids(plain[1:])[0]) < len(ids(plain)[0])


def test_what_would_keep_others_waiting_is_refused():
  many = [str(n) for n in range(17)]
  for settings, param in (
    (dict(stop=many), "stop"), (dict(stop="x" * 300), "stop"),
    (dict(prompt=["x"] * 100_000), "n"),
  ):  # fmt: skip
    assert refused({"prompt": "x"} | settings).param == param
  assert read({"prompt": "x", "stop": many[:16]}).stop == tuple(many[:16])
