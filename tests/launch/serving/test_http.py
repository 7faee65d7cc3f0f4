"""OpenAI's HTTP surface, driven by its own client."""

import asyncio
import json
import urllib.request
from concurrent import futures

import jax
import numpy as np
import openai
import penalizing
import pytest
import served
import toys

from models import chat, token_text

PROMPT = "def main("
TOKEN = "a secret of nobody"


@pytest.fixture(scope="module")
def slots():
  return served.text_slots()


@pytest.fixture(scope="module")
def server(slots):
  with served.http_service(slots, limits=dict(token=TOKEN)) as actual:
    yield actual


@pytest.fixture(scope="module")
def client(server):
  return openai.OpenAI(
    base_url=f"{server[1]}/v1", api_key=TOKEN, max_retries=0, timeout=120
  )


TALK = [{"role": "user", "content": "x"}]


def complete(client, prompt=PROMPT, *, stream=False, **settings):
  return client.completions.create(
    model="toy", prompt=prompt, stream=stream, extra_body=settings
  )


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
    answer = await client.completions.create(
      model="toy", prompt=settings["prompt"], extra_body=settings
    )
    return answer.choices[0].text

  async def everything():
    alone = [await one(settings) for settings in asking]
    together = await asyncio.gather(*[one(s) for s in asking * 3])
    await client.close()
    return alone, together

  alone, together = asyncio.run(everything())
  assert alone == expected
  assert list(together) == expected * 3


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
    told = answer.choices[0].token_origins
    if stop is None:
      assert "".join(x["text"] for x in told) == text
    origins = [x["origin"] for x in told]
    assert {*origins} <= {"accepted", "residual", "bonus"}
    assert details.accepted_prediction_tokens == origins.count("accepted") > 0
    rejected = details.rejected_prediction_tokens
    # Chains of three, one a call.
    calls = len(origins) - details.accepted_prediction_tokens
    assert 0 < rejected <= 3 * (calls + 1)
    counts.append(details.accepted_prediction_tokens)
  assert counts[1] < counts[0]


def test_streams_are_the_same_text_with_usage_at_the_end_or_everywhere(client):
  settings = dict(max_tokens=48, temperature=1.0, seed=3)
  tokens = served.expected_tokens(PROMPT, **settings)
  settings |= dict(stream=True, return_token_ids=True)
  options = {"include_usage": True, "continuous_usage_stats": True}
  for stream_options in ({"include_usage": True}, options, None):
    chunks = list(complete(client, stream_options=stream_options, **settings))
    if stream_options:
      *chunks, last = chunks
      assert last.choices == []
      assert last.usage.completion_tokens == len(tokens)
    text = "".join(c.choices[0].text for c in chunks)
    assert text == served.tokenizer().decode(tokens)
    assert [x for c in chunks for x in c.choices[0].token_ids] == tokens
    reasons = [c.choices[0].finish_reason for c in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1)
    assert reasons[-1] in ("stop", "length")
    assert len(chunks) > 4
    assert len({c.id for c in chunks}) == 1
    counts = [c.usage and c.usage.completion_tokens for c in chunks]
    if stream_options is options:
      assert counts == sorted(counts)
      assert counts[0] < counts[-1] == len(tokens)
    else:
      assert counts == [None] * len(chunks)


def until_a_stop_token():
  """Settings of a completion that ends early, and its tokens."""
  for seed in range(40):
    settings = dict(max_tokens=60, temperature=1.0, seed=seed)
    tokens = served.expected_tokens(PROMPT, **settings)
    if len(tokens) < 50:
      assert tokens[-1] == served.tokenizer().eos_token_id
      return settings, tokens
  raise AssertionError("none of them ends")


def test_a_stop_token_ends_an_answer_unless_it_is_ignored(client):
  """And is no text; in the same slots, one after another."""
  settings, tokens = until_a_stop_token()
  expected = served.expected_tokens(PROMPT, stop_tokens=(), **settings)
  for ignored in (True, False):
    ids, reason = (expected, "length") if ignored else (tokens, "stop")
    actual = complete(client, ignore_eos=ignored, **settings)
    (choice,) = actual.choices
    assert choice.finish_reason == reason
    assert choice.text == served.tokenizer().decode(ids)
    assert actual.usage.completion_tokens == len(ids)


def test_laws_that_read_their_text_are_decoded_beside_others(client):
  """As plain Python decodes them, in slots that change hands."""
  tokenizer, (_, params) = served.tokenizer(), served.text_decoder()
  prompt, table = tokenizer.encode(PROMPT), np.asarray(params.target)
  reference = lambda settings: penalizing.decoded(
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

  one = lambda settings: complete(client, max_tokens=24, **settings)
  with futures.ThreadPoolExecutor(5) as pool:
    answers = list(pool.map(one, asking * 2))
  for answer, tokens in zip(answers, expected * 2, strict=True):
    assert answer.choices[0].text == tokenizer.decode(tokens)
    assert answer.usage.completion_tokens == len(tokens)


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


def by_name(laws, token, count):
  """As completions tell them: the token, and above it the likeliest."""
  told = [token, *np.argsort(-laws, kind="stable")[:count][::-1].tolist()]
  name = lambda x: token_text.name_of(served.tokenizer(), x)
  return {name(x): laws[x] for x in told}


def test_likeliest_tokens_are_the_targets_own_whatever_is_sampled_from(client):
  """Those of a direct pass, in a conversation with a warp and a penalty."""
  _, params = served.text_decoder()
  ids = chat.encode(served.tokenizer(), TALK)
  answer = client.chat.completions.create(
    model="toy", messages=TALK, presence_penalty=2, top_logprobs=20,
    logprobs=True, max_tokens=8, temperature=1.3, seed=5, top_p=0.9,
  )  # fmt: skip
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
    assert len(actual.tokens) == len(prompt) + tokens
  chunks = list(complete(client, prompts[0], stream=True, **settings))
  assert "".join(c.choices[0].text for c in chunks) == answer.choices[0].text
  assert [
    x for c in chunks for x in c.choices[0].logprobs.token_logprobs
  ] == answer.choices[0].logprobs.token_logprobs


def test_bytes_of_tokens_are_those_of_the_text(client):
  """Also where several tokens make one character."""
  settings = dict(max_tokens=60, temperature=2, ignore_eos=True)
  for seed in range(40):
    talk = client.chat.completions.create(
      model="toy", messages=TALK, logprobs=True, extra_body=settings, seed=seed
    ).choices[0]
    spelt = b"".join(bytes(one.bytes) for one in talk.logprobs.content)
    assert spelt.decode("utf-8", "replace").startswith(talk.message.content)
    if any("\ufffd" in one.token for one in talk.logprobs.content):
      return
  raise AssertionError("no token was a part of a character")


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


def post(address, path, body, token=TOKEN, kind="application/json"):
  request = urllib.request.Request(
    address + path, data=json.dumps(body).encode(),
    headers={"Content-Type": kind, "Authorization": f"Bearer {token}"},
  )  # fmt: skip
  try:
    with urllib.request.urlopen(request, timeout=60) as answer:
      return answer.status, json.loads(answer.read())
  except urllib.error.HTTPError as error:
    return error.code, json.loads(error.read())


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
  with urllib.request.urlopen(f"{address}/health", timeout=60) as answer:
    assert json.loads(answer.read())["status"] == "ok"
  complete(client, max_tokens=30)
  with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
    assert answer.headers["content-type"].startswith("text/plain")
    text = answer.read().decode()
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


# What compiles in an answered request: nothing, whatever it asks for.
ANY = [
  dict(prompt=prompt, max_tokens=9, n=n, stream=n == 1, **settings)
  for prompt in ("x", "import os\n" * 8, ["a", "b c"], [5, 6])
  for n in (1, 2)
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
    answer = complete(client, **body)
    assert list(answer) if body["stream"] else answer.choices
  left = complete(client, max_tokens=60, ignore_eos=True, stream=True)
  next(iter(left))
  left.close()
  served.until(lambda: server[0].scheduler.load() == (0, 0))
  assert not compiled
