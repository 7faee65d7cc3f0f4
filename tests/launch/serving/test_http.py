"""OpenAI's HTTP surface, driven by its own client."""

import asyncio
import json
import urllib.request
from concurrent import futures

import fallback
import jax
import numpy as np
import openai
import penalising
import pytest
import served
import toys

from launch.serving import answers, http
from launch.serving.limits import Limits
from models import chat, token_text

pytestmark = pytest.mark.usefixtures("quick_to_compile")

PROMPT = "def main("
TOKEN = "a secret of nobody"


@pytest.fixture(scope="module")
def slots(quick_to_compile):
  return served.text_slots()


@pytest.fixture(scope="module")
def server(slots):
  with served.http_service(slots, limits=Limits(token=TOKEN)) as actual:
    yield actual


@pytest.fixture(scope="module")
def client(server):
  return openai.OpenAI(
    base_url=f"{server[1]}/v1", api_key=TOKEN, max_retries=0, timeout=120
  )


TALK = [{"role": "user", "content": "x"}]


def complete(client, prompt=PROMPT, **settings):
  extra = {
    name: settings.pop(name)
    for name in (
      "top_k",
      "min_p",
      "token_origins",
      "ignore_eos",
      "repetition_penalty",
      "min_tokens",
      "stop_token_ids",
    )
    if name in settings
  }
  return client.completions.create(
    model="toy", prompt=prompt, extra_body=extra, **settings
  )


def get(address, path, **headers):
  request = urllib.request.Request(address + path, headers=headers)
  with urllib.request.urlopen(request, timeout=60) as answer:
    return answer.headers["content-type"], answer.read().decode()


SETTINGS = [
  dict(temperature=0.0),
  dict(temperature=0.8, seed=7),
  dict(temperature=1.2, seed=8, top_p=0.9),
  dict(temperature=1.0, seed=9, top_k=5),
  dict(temperature=1.0, seed=2**32 - 1, min_p=0.1),
]


def test_texts_over_http_are_those_of_generate_at_any_concurrency(server):
  """Every request alone, then all of them at once, three times over."""
  asking = [
    dict(prompt=prompt, max_tokens=24, **settings)
    for settings in SETTINGS
    for prompt in (PROMPT, "import os\nimport sys\n\ndef f(x):", [5, 6, 7])
  ]
  expected = [served.expected_text(**one) for one in asking]
  assert len({*expected}) > len(asking) // 2
  client = openai.AsyncOpenAI(
    base_url=f"{server[1]}/v1", api_key=TOKEN, max_retries=0, timeout=120
  )

  async def one(settings):
    return (await _create(client, settings)).choices[0].text

  async def everything():
    alone = [await one(settings) for settings in asking]
    together = await asyncio.gather(*[one(s) for s in asking * 3])
    await client.close()
    return alone, together

  alone, together = asyncio.run(everything())
  assert alone == expected
  assert list(together) == expected * 3


async def _create(client, settings):
  settings = dict(settings)
  extra = {n: settings.pop(n) for n in ("top_k", "min_p") if n in settings}
  return await client.completions.create(
    model="toy", extra_body=extra, **settings
  )


def test_an_answer_has_what_clients_read(client):
  answer = complete(client, max_tokens=5)
  tokens = served.expected_tokens(PROMPT, max_tokens=5)
  (choice,) = answer.choices
  assert answer.object == "text_completion"
  assert answer.id.startswith("cmpl-")
  assert (answer.model, choice.index) == ("toy", 0)
  assert choice.finish_reason == "length"
  prompt = len(served.tokenizer().encode(PROMPT))
  usage = answer.usage
  assert usage.prompt_tokens == prompt
  assert usage.completion_tokens == len(tokens) == 5
  assert usage.total_tokens == prompt + 5
  assert len(complete(client).choices[0].text) > 0  # 16 tokens by default


def test_usage_tells_drafted_tokens_that_were_accepted_from_others(client):
  """Also where a stop text cuts what was accepted."""
  settings = dict(max_tokens=48, temperature=1.0, seed=3, token_origins=True)
  text = served.expected_text(PROMPT, max_tokens=48, temperature=1.0, seed=3)
  counts = []
  for stop in (None, text[20:27]):
    answer = complete(client, stop=stop, **settings)
    details = answer.usage.completion_tokens_details
    origins = [x["origin"] for x in answer.choices[0].token_origins]
    assert details.accepted_prediction_tokens == origins.count("accepted") > 0
    rejected = details.rejected_prediction_tokens
    # Chains of three, one a call.
    calls = len(origins) - details.accepted_prediction_tokens
    assert 0 < rejected <= 3 * (calls + 1)
    counts.append(details.accepted_prediction_tokens)
  assert counts[1] < counts[0]


def test_texts_are_tokenized_over_http(client, server):
  path = server[1] + "/tokenize"
  actual = client.post(path, body={"prompt": PROMPT}, cast_to=dict)
  assert actual["tokens"] == served.tokenizer().encode(PROMPT)
  path = path.replace("/tokenize", "/detokenize")
  actual = client.post(path, body={"tokens": actual["tokens"]}, cast_to=dict)
  assert actual == {"prompt": PROMPT}


def test_usage_and_metrics_count_what_was_not_read_again(client, server):
  prompt = PROMPT + " and then"
  count = len(served.tokenizer().encode(prompt))

  def hits():
    _, text = get(server[1], "/metrics")
    name = "vllm:prefix_cache_hits_total"
    (line,) = [x for x in text.splitlines() if x.startswith(name)]
    return float(line.split()[-1])

  before, cached, texts = hits(), [], []
  for _ in range(2):
    answer = complete(client, prompt, max_tokens=4, temperature=1.0, seed=5)
    cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    texts.append(answer.choices[0].text)
  assert cached == [0, count - 1]
  assert hits() - before == count - 1
  assert len(set(texts)) == 1


def test_streams_are_the_same_text_with_usage_at_the_end(client):
  settings = dict(max_tokens=48, temperature=1.0, seed=3)
  text = served.expected_text(PROMPT, **settings)
  chunks = list(
    complete(
      client, stream=True, stream_options={"include_usage": True}, **settings
    )
  )
  assert "".join(c.choices[0].text for c in chunks[:-1]) == text
  assert len(chunks) > 4
  assert [c.choices[0].finish_reason for c in chunks[:-2]] == (
    [None] * (len(chunks) - 2)
  )
  assert chunks[-2].choices[0].finish_reason in ("stop", "length")
  assert chunks[-1].choices == []
  assert chunks[-1].usage.completion_tokens == len(
    served.expected_tokens(PROMPT, **settings)
  )
  assert len({c.id for c in chunks}) == 1
  without = list(complete(client, stream=True, **settings))
  assert without[-1].choices[0].finish_reason


def test_a_stop_token_ends_an_answer_and_is_no_text(client):
  settings, _ = until_a_stop_token()
  choice = complete(client, **settings).choices[0]
  assert choice.finish_reason == "stop"
  assert choice.text == served.expected_text(PROMPT, **settings)


def until_a_stop_token():
  """Settings of a completion that ends early, and its tokens."""
  for seed in range(40):
    settings = dict(max_tokens=60, temperature=1.0, seed=seed)
    tokens = served.expected_tokens(PROMPT, **settings)
    if len(tokens) < 50:
      assert tokens[-1] == served.tokenizer().eos_token_id
      return settings, tokens
  raise AssertionError("none of them ends")


def test_a_stop_token_that_is_ignored_ends_nothing(client):
  """All tokens that are asked for are there and counted; others still end."""
  settings, tokens = until_a_stop_token()
  expected = served.expected_tokens(PROMPT, stop_tokens=(), **settings)
  assert expected[: len(tokens)] == tokens
  assert len(expected) == 60
  actual = complete(client, ignore_eos=True, logprobs=0, **settings)
  (choice,) = actual.choices
  assert choice.finish_reason == "length"
  assert choice.text == served.tokenizer().decode(expected)
  assert actual.usage.completion_tokens == len(choice.logprobs.tokens) == 60
  # In the same slots, one after another.
  for ignored in (False, None):
    again = complete(client, ignore_eos=ignored, **settings).choices[0]
    assert again.finish_reason == "stop"
  stop = choice.text[len(again.text) + 4 :][:6]
  assert stop
  cut = complete(client, ignore_eos=True, stop=stop, **settings).choices[0]
  assert cut.finish_reason == "stop"
  assert cut.text == choice.text[: choice.text.find(stop)]


def test_laws_that_read_their_text_are_decoded_beside_others(client):
  """As plain Python decodes them, in slots that change hands."""
  tokenizer, (_, params) = served.tokenizer(), served.text_decoder()
  prompt, table = tokenizer.encode(PROMPT), np.asarray(params.target)
  reference = lambda settings: penalising.decoded(
    table, prompt, settings, budget=24, ends=(tokenizer.eos_token_id,)
  )
  first = reference({})
  asking = [
    dict(),
    dict(presence_penalty=-2.0, frequency_penalty=-2.0),
    dict(repetition_penalty=2.5),
    dict(logit_bias={first[0]: -100.0, 7: 6.0}),
    dict(min_tokens=20, stop_token_ids=[first[1]]),
  ]
  expected = [reference(settings) for settings in asking]
  assert len({tuple(tokens) for tokens in expected}) == len(asking)

  def one(settings):
    wire = dict(settings)
    if "logit_bias" in wire:
      wire["logit_bias"] = {f"{k}": v for k, v in wire["logit_bias"].items()}
    return complete(client, max_tokens=24, temperature=0.0, **wire)

  with futures.ThreadPoolExecutor(5) as pool:
    answers = list(pool.map(one, asking * 2))
  for answer, tokens in zip(answers, expected * 2, strict=True):
    assert answer.choices[0].text == tokenizer.decode(tokens)
    assert answer.usage.completion_tokens == len(tokens)


def test_streams_count_their_tokens_in_every_chunk_if_asked(client):
  settings, tokens = until_a_stop_token()
  options = {"include_usage": True, "continuous_usage_stats": True}
  chunks = list(
    complete(client, stream=True, stream_options=options, **settings)
  )
  counts = [chunk.usage.completion_tokens for chunk in chunks]
  assert counts == sorted(counts)
  assert counts[0] < counts[-1] == len(tokens)
  assert {chunk.usage.prompt_tokens for chunk in chunks} == {
    len(served.tokenizer().encode(PROMPT))
  }


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_a_text_before_themselves(client, stream):
  settings = dict(max_tokens=48, temperature=1.0, seed=3)
  text = served.expected_text(PROMPT, **settings)
  stop = [text[20:27], "not in it"]
  actual = complete(client, stop=stop, stream=stream, **settings)
  if stream:
    chunks = list(actual)
    got = "".join(c.choices[0].text for c in chunks)
    reason = chunks[-1].choices[0].finish_reason
  else:
    (choice,) = actual.choices
    got, reason = choice.text, choice.finish_reason
    assert actual.usage.completion_tokens < 48
  assert got == text[: text.find(stop[0])]
  assert reason == "stop"


def test_choices_draw_from_streams_of_one_seed(client):
  settings = dict(max_tokens=12, temperature=1.0, seed=11)
  answer = complete(client, prompt=[PROMPT, "x = "], n=3, **settings)
  texts = [c.text for c in answer.choices]
  assert [c.index for c in answer.choices] == list(range(6))
  assert texts == [
    served.expected_text(prompt, stream=stream, **settings)
    for prompt in (PROMPT, "x = ")
    for stream in range(3)
  ]
  assert len({*texts}) == 6
  chunks = list(
    complete(client, prompt=[PROMPT, "x = "], n=3, stream=True, **settings)
  )
  for index, text in enumerate(texts):
    assert text == "".join(
      c.choices[0].text for c in chunks if c.choices[0].index == index
    )


def test_without_a_seed_answers_differ(client):
  texts = {complete(client, temperature=1.5).choices[0].text for _ in range(4)}
  assert len(texts) > 1


def by_name(laws, token, count):
  """As completions tell them: the token, and above it the likeliest."""
  told = [token, *np.argsort(-laws, kind="stable")[:count][::-1].tolist()]
  name = lambda x: token_text.name_of(served.tokenizer(), x)
  return {name(x): laws[x] for x in told}


def test_likeliest_tokens_are_the_targets_own_whatever_is_sampled_from(client):
  """Of a direct pass: streamed and not, beside who asks for none."""
  _, params = served.text_decoder()
  context = list(served.tokenizer().encode(PROMPT))
  settings = dict(max_tokens=8, temperature=1.3, seed=5, top_p=0.9)
  told = dict(top_logprobs=20, logprobs=True)
  laws = []
  for token in served.expected_tokens(PROMPT, **settings):
    logits = toys.context_logits(params.target, context).astype(np.float64)
    laws.append(logits - np.log(np.exp(logits).sum()))
    context.append(token)
  tokens = context[-len(laws) :]
  expected = [by_name(*one, 5) for one in zip(laws, tokens, strict=True)]
  for stream in (False, True):
    asking = [
      dict(logprobs=count, stream=stream, **settings) for count in (5, 0)
    ]
    with futures.ThreadPoolExecutor(2) as pool:
      answers = list(pool.map(lambda more: complete(client, **more), asking))
      choices = [
        [one.choices[0].logprobs for one in (answer if stream else [answer])]
        for answer in answers
      ]
    actual = [one for part in choices[0] for one in part.top_logprobs]
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
      assert one == pytest.approx(other, abs=1e-4)
    assert all(part.top_logprobs is None for part in choices[1])
  ids = chat.encode(served.tokenizer(), TALK)
  answer = client.chat.completions.create(
    model="toy", messages=TALK, presence_penalty=2, **told, **settings
  )
  for one in answer.choices[0].logprobs.content:
    logits = toys.context_logits(params.target, ids).astype(np.float64)
    law = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-law, kind="stable")[:20]
    assert [x.logprob for x in one.top_logprobs] == pytest.approx(
      law[best], abs=1e-4
    )
    names = [token_text.name_of(served.tokenizer(), x) for x in best.tolist()]
    assert [x.token for x in one.top_logprobs] == names
    (token,) = served.tokenizer().backend.encode(one.token).ids
    ids.append(token)


@pytest.mark.parametrize("tokens", [0, 4])
def test_a_prompt_that_is_told_is_scored(client, tokens):
  """As evaluation harnesses score texts."""
  _, params = served.text_decoder()
  tokenizer = served.tokenizer()
  prompts = [tokenizer.encode(PROMPT), list(range(60, 120)), [5]]
  settings = dict(max_tokens=tokens, logprobs=2, echo=True, ignore_eos=True)
  answer = complete(client, prompts, **settings)
  assert answer.usage.completion_tokens == 3 * tokens
  for prompt, choice in zip(prompts, answer.choices, strict=True):
    new = []
    if tokens:
      new = served.expected_tokens(prompt, max_tokens=tokens, stop_tokens=())
    assert choice.text == tokenizer.decode(prompt) + tokenizer.decode(
      new, after=prompt
    )
    assert choice.finish_reason == "length"
    actual, expected, likeliest = choice.logprobs, [], [None]
    for place in range(1, len(prompt) + tokens):
      text = [*prompt, *new]
      logits = toys.context_logits(params.target, text[:place])
      laws = logits - np.log(np.exp(logits.astype(np.float64)).sum())
      expected.append(laws[text[place]])
      likeliest.append(by_name(laws, text[place], 2))
    assert actual.token_logprobs[0] is None
    assert actual.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert actual.top_logprobs[0] is None
    for one, other in zip(actual.top_logprobs[1:], likeliest[1:], strict=True):
      assert one == pytest.approx(other, abs=1e-4)
    assert actual.text_offset[0] == 0
    assert len(actual.tokens) == len(actual.text_offset) == len(prompt) + tokens
  chunks = list(complete(client, prompts[0], stream=True, **settings))
  assert "".join(c.choices[0].text for c in chunks) == answer.choices[0].text
  assert [
    x for c in chunks for x in c.choices[0].logprobs.token_logprobs
  ] == answer.choices[0].logprobs.token_logprobs


def test_prompts_are_scored_beside_others(client, server):
  """In chunks, in turn, while a stream goes on."""
  ask = lambda **more: complete(
    client, [list(range(i, i + 60)) for i in range(40, 43)], **more
  )
  alone = ask(max_tokens=0, logprobs=0, echo=True)
  stream = complete(client, max_tokens=60, ignore_eos=True, stream=True)
  next(iter(stream))
  beside = ask(max_tokens=0, logprobs=0, echo=True)
  stream.close()
  for one, other in zip(alone.choices, beside.choices, strict=True):
    assert one.logprobs.token_logprobs[1:] == pytest.approx(
      other.logprobs.token_logprobs[1:], abs=1e-5
    )


def has_parts(tokens):
  """True if any is a part of a character."""
  return any("\ufffd" in token for token in tokens)


def test_bytes_of_tokens_are_those_of_the_text(client):
  """Each token's own, also where several make one character."""
  for seed in range(40):
    answer = client.chat.completions.create(
      model="toy", messages=MESSAGES, max_tokens=60, logprobs=True,
      temperature=2, seed=seed,
    )  # fmt: skip
    (choice,) = answer.choices
    actual = choice.logprobs.content
    joined = b"".join(bytes(one.bytes) for one in actual)
    assert joined.decode("utf-8", "replace") == choice.message.content
    assert "\ufffd".encode() not in joined  # which stands for half of one
    for one in actual:
      if one.token != "<|endoftext|>":
        assert bytes(one.bytes).decode("utf-8", "replace") == one.token
    if has_parts(one.token for one in actual):
      return
  raise AssertionError("no token was a part of a character")


def test_offsets_of_tokens_are_where_they_begin_in_the_text(client):
  """Parts of one character are all where it does."""
  for seed in range(40):
    seen = [placed(client, seed, stream) for stream in (False, True)]
    assert seen[0] == seen[1]
    text, tokens, offsets = seen[0]
    whole = [
      (token, at)
      for token, at in zip(tokens, offsets, strict=True)
      if not has_parts([token]) and token != "<|endoftext|>"
    ]
    assert all(text[at : at + len(token)] == token for token, at in whole)
    assert offsets == sorted(offsets)
    if "\ufffd" in text and has_parts(tokens) and len(whole) > 10:
      return
  raise AssertionError("no token was a part of a character")


def placed(client, seed, stream):
  """A text, its tokens, and where they are said to begin."""
  actual = complete(
    client, max_tokens=60, temperature=2, seed=seed, logprobs=0, stream=stream
  )
  text, tokens, offsets = "", [], []
  for answer in actual if stream else [actual]:
    (choice,) = answer.choices
    text += choice.text
    tokens += choice.logprobs.tokens
    offsets += choice.logprobs.text_offset
  return text, tokens, offsets


MESSAGES = [
  {"role": "system", "content": "Short."},
  {"role": "user", "content": [{"type": "text", "text": "x <|endoftext|>"}]},
]


def test_conversations(client):
  messages = [MESSAGES[0], {"role": "user", "content": "x <|endoftext|>"}]
  ids = chat.encode(served.tokenizer(), messages)
  assert served.tokenizer().eos_token_id not in ids  # no forgery
  settings = dict(max_tokens=20, temperature=1.0, seed=4)
  text = served.expected_text(ids, **settings)
  ask = lambda **more: client.chat.completions.create(
    model="toy", messages=MESSAGES, temperature=1.0, seed=4, **more
  )
  answer = ask(max_completion_tokens=20, logprobs=True)
  (choice,) = answer.choices
  assert answer.object == "chat.completion"
  assert (choice.message.role, choice.message.content) == ("assistant", text)
  assert len(choice.logprobs.content) == answer.usage.completion_tokens
  assert answer.usage.prompt_tokens == len(ids)
  chunks = list(
    ask(max_tokens=20, stream=True, stream_options={"include_usage": True})
  )
  assert chunks[0].choices[0].delta.role == "assistant"
  assert all(c.choices[0].delta.role is None for c in chunks[1:-1])
  assert "".join(c.choices[0].delta.content for c in chunks[:-1]) == text
  last = chunks[-1].usage
  assert last.total_tokens == answer.usage.total_tokens
  assert last.prompt_tokens_details.cached_tokens == len(ids) - 1
  with client.chat.completions.stream(
    model="toy", messages=MESSAGES, temperature=1.0, seed=4, stop=text[9:13]
  ) as stream:
    final = stream.get_final_completion()
  assert final.choices[0].message.content == text[: text.find(text[9:13])]


def test_origins_of_tokens_where_they_are_asked_for(client):
  chunks = complete(
    client, max_tokens=24, temperature=1.0, seed=3, stream=True,
    token_origins=True,
  )  # fmt: skip
  actual = [x for c in chunks for x in c.choices[0].token_origins]
  assert len(actual) <= 24
  assert {x["origin"] for x in actual} <= {"accepted", "residual", "bonus"}
  assert len({x["origin"] for x in actual}) > 1
  assert "".join(x["text"] for x in actual) == served.expected_text(
    PROMPT, max_tokens=24, temperature=1.0, seed=3
  )


def post(address, path, body, token=TOKEN, kind="application/json"):
  data = body if isinstance(body, bytes) else json.dumps(body).encode()
  request = urllib.request.Request(
    address + path, data=data,
    headers={"Content-Type": kind, "Authorization": f"Bearer {token}"},
  )  # fmt: skip
  try:
    with urllib.request.urlopen(request, timeout=60) as answer:
      return answer.status, json.loads(answer.read())
  except urllib.error.HTTPError as error:
    return error.code, json.loads(error.read())


@pytest.mark.parametrize(
  "body",
  [
    b"", b"{", b"[]", b"3", b"\xff\xfe", b"nul", b"[" * 100_000,
    b'{"a":' * 100_000, b'{"prompt": "\\ud800"}',
    b'{"prompt": ' + b"1" * 10_000 + b"}",
    b'{"prompt": [' + b"1" * 5000 + b"]}",
    b'{"prompt": "x", "\\ud800": 1}',
  ],
  ids=range(12),
)  # fmt: skip
def test_garbage_is_refused(server, body):
  for path in ("/v1/completions", "/v1/chat/completions"):
    status, answer = post(server[1], path, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"]


@pytest.mark.parametrize("repetition", [1e-3, 1e3])
def test_the_strongest_of_every_field_is_answered(client, repetition):
  """At once, and with numbers: no law is lost in 32 bits."""
  answer = complete(
    client, max_tokens=6, temperature=1e30, seed=0, top_p=1e-30, top_k=1,
    min_p=1.0, presence_penalty=2, frequency_penalty=-2, min_tokens=6,
    repetition_penalty=repetition, stop_token_ids=list(range(64)), logprobs=5,
    logit_bias={str(i): 100 * (-1) ** i for i in range(300)},
  )  # fmt: skip
  (choice,) = answer.choices
  assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", 6)
  assert all(-1e6 < x <= 1e-5 for x in choice.logprobs.token_logprobs)


def test_errors_of_other_kinds(server, client):
  address = server[1]
  with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
    client.completions.create(model="gpt-4", prompt="x")
  status, body = post(
    address, "/v1/completions", {"prompt": "x", "suffix": "y"}
  )
  assert (status, body["error"]["param"]) == (400, "suffix")
  assert post(address, "/v1/nothing", {})[0] == 404
  assert post(address, "/v1/models", {})[0] == 405
  assert client.models.retrieve("toy").id == "toy"
  with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
    client.models.retrieve("gpt-4")
  wrong = openai.OpenAI(
    base_url=f"{address}/v1", api_key="another", max_retries=0
  )
  with pytest.raises(openai.AuthenticationError):
    wrong.models.list()
  for token in ("", TOKEN[:-1], TOKEN + "x", "é"):
    assert post(address, "/v1/completions", {"prompt": "x"}, token)[0] == 401
  assert post(
    address, "/v1/completions", {"prompt": "x"}, kind="text/plain"
  )[0] == 415  # fmt: skip


def test_what_is_open_to_everybody(server, client):
  address = server[1]
  (model,) = client.models.list().data
  assert (model.id, model.root, model.max_model_len) == ("toy", "toy", 160)
  kind, text = get(address, "/health")
  assert json.loads(text)["status"] == "ok"
  complete(client, max_tokens=30)
  kind, text = get(address, "/metrics")
  assert kind.startswith("text/plain")
  lines = dict(
    line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#"
  )
  # What `vllm bench serve` reads, and divides by each other.
  for name in ("drafts", "draft_tokens", "accepted_tokens"):
    key = f'vllm:spec_decode_num_{name}_total{{model_name="toy"}}'
    assert float(lines[key]) > 0
  assert (
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="toy",'
    'position="0"}'
  ) in lines
  live = json.loads(get(address, "/live")[1])
  assert live["tokens_per_second"] > 0
  assert 0 < live["acceptance"] < 1


def test_every_refusal_is_an_exception_of_its_own():
  """One that is raised again keeps the frames of all who raised it."""
  for make in (*answers.FAILURES.values(), http._full, http._closed):
    assert make() is not make()


def test_what_clients_send_that_asks_for_nothing_of_a_stream(server):
  body = {"prompt": PROMPT, "temperature": 2, "max_tokens": 3, "stop": []}
  for options in ({}, {"include_usage": None, "include_obfuscation": False}):
    data = json.dumps(body | {"stream": True, "stream_options": options})
    request = urllib.request.Request(
      server[1] + "/v1/completions", data=data.encode(),
      headers={
        "Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"
      },
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
      text = answer.read().decode()
    assert text.endswith("data: [DONE]\n\n")
    assert '"usage"' not in text


# What compiles in an answered request: nothing, whatever it asks for.
ANY = [
  dict(prompt=prompt, max_tokens=9, n=n, stream=stream, **settings)
  for prompt in ("x", "import os\n" * 8, ["a", "b c"], [5, 6])
  for n, stream in ((1, True), (2, False))
  for settings in (
    dict(temperature=0),
    dict(temperature=2, seed=0, stop=["a", "\n\n"], logprobs=2),
    dict(temperature=0.3, top_p=0.7, min_p=0.1, top_k=9, token_origins=True),
  )
]


@pytest.fixture
def compiled():
  """Names of what is compiled from here on."""
  names = []
  listen = lambda name, seconds, **more: (
    names.append(name) if "compile" in name else None
  )
  jax.monitoring.register_event_duration_secs_listener(listen)
  jax.jit(lambda x: x * 5)(np.arange(3))
  assert names  # it hears what is compiled
  names.clear()
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


def test_nothing_is_compiled_for_whatever_is_asked(server, client, compiled):
  """Every width of prompts, choices, warps, stop texts, log-probabilities."""
  for body in ANY:
    request = urllib.request.Request(
      server[1] + "/v1/completions", data=json.dumps(body).encode(),
      headers={
        "Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"
      },
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
      assert answer.read()
  status, body = post(
    server[1], "/v1/chat/completions",
    {"messages": TALK, "logprobs": True, "top_logprobs": 3},
  )  # fmt: skip
  assert status == 200, body
  left = complete(client, max_tokens=60, ignore_eos=True, stream=True)
  next(iter(left))
  left.close()
  served.until(lambda: server[0].scheduler.load() == (0, 0))
  assert not compiled


def test_a_text_that_cannot_be_watched_is_said_to_be_so(slots, monkeypatch):
  """Of a loop that has ended it does not speak: that goes on."""
  broken = lambda ids: 1 / 0
  with served.http_service(slots) as (service, address):
    with monkeypatch.context() as patched:
      patched.setattr(http.stops, "watch", lambda *_: broken)
      status, body = post(address, "/v1/completions", {"prompt": PROMPT})
    assert (status, body["error"]["code"]) == (500, "unreadable")
    assert "loop" not in body["error"]["message"]
    status, body = post(address, "/v1/completions", {"prompt": PROMPT})
    assert status == 200
    assert service.scheduler.is_alive()


def test_a_completion_begins_with_its_space_and_ends_before_one(slots):
  """Where a tokenizer drops the space that a whole text begins with."""
  reads = fallback.numbered(served.tokenizer().vocab_size)
  ids = served.expected_tokens([5, 6], max_tokens=8)
  assert len({*ids[:4]}) == 4
  text = fallback.said(ids, reads)
  with served.http_service(slots, reads=reads) as (_, address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
    for stop, expected in ((None, text), (f" w{ids[3]}", text)):
      expected = text.partition(stop)[0] if stop else text
      settings = dict(max_tokens=8, temperature=0, stop=stop, logprobs=0)
      whole = complete(client, "w5 w6", **settings)
      assert whole.choices[0].text == expected
      assert whole.usage.completion_tokens == (4 if stop else len(ids))
      told = whole.choices[0].logprobs
      for token, at in zip(told.tokens[:3], told.text_offset, strict=False):
        assert text[at : at + len(token)] == token
      chunks = complete(
        client, "w5 w6", stream=True, token_origins=True, **settings
      )
      chunks = [chunk.choices[0] for chunk in chunks]
      assert "".join(chunk.text for chunk in chunks) == expected
      shown = "".join(x["text"] for c in chunks for x in c.token_origins)
      assert shown == expected + (stop or "")
