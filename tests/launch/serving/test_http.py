"""OpenAI's HTTP surface, driven by its own client."""

import asyncio
import json
import pathlib
import re
import subprocess
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


@pytest.fixture(scope="module")
def client(server):
  return openai.OpenAI(
    base_url=f"{server[1]}/v1", api_key="none", max_retries=0, timeout=120
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


def test_http_completions_match_generate_at_any_concurrency(server):
  """Every request alone, then all of them at once, three times over."""
  asking = [
    dict(prompt=prompt, max_tokens=24, **settings)
    for settings in SETTINGS
    for prompt in (PROMPT, "import os\nimport sys\n\ndef f(x):", [5, 6, 7])
  ]
  expected = [served.expected_text(**one) for one in asking]
  assert len({*expected}) > len(asking) // 2
  client = openai.AsyncOpenAI(
    base_url=f"{server[1]}/v1", api_key="none", max_retries=0, timeout=120
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


def test_completion_response_has_the_fields_clients_read(client):
  settings = dict(max_tokens=48, temperature=1.0, seed=3)
  answer = complete(client, token_origins=True, **settings)
  tokens = served.expected_tokens(PROMPT, **settings)
  (choice,) = answer.choices
  assert answer.object == "text_completion"
  assert (answer.model, choice.index) == ("toy", 0)
  assert choice.finish_reason in ("stop", "length")
  usage, prompt = answer.usage, len(served.tokenizer().encode(PROMPT))
  assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, len(tokens))
  assert usage.total_tokens == prompt + len(tokens)
  origins = [x["origin"] for x in choice.token_origins]
  assert "".join(x["text"] for x in choice.token_origins) == choice.text
  assert {*origins} <= {"accepted", "residual", "bonus"}
  details = usage.completion_tokens_details
  accepted = details.accepted_prediction_tokens
  assert accepted == origins.count("accepted") > 0
  # Chains of three, one a call.
  calls = len(origins) - accepted
  assert 0 < details.rejected_prediction_tokens <= 3 * (calls + 1)


def test_streamed_text_matches_with_final_or_continuous_usage(client):
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


def test_penalties_and_biases_match_a_reference_in_mixed_batches(client):
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
def test_text_ends_before_the_stop_string(client, stream):
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


def test_choices_use_separate_random_streams_of_one_seed(client):
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


def test_top_logprobs_are_the_unwarped_target_log_probs(client):
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
def test_echo_scores_the_prompt(client, tokens):
  """As evaluation harnesses score texts."""
  _, params = served.text_decoder()
  tokenizer = served.tokenizer()
  prompts = [tokenizer.encode(PROMPT), list(range(60, 120)), [5]]
  settings = dict(max_tokens=tokens, logprobs=2, echo=True, ignore_eos=True)
  answer = complete(client, prompts, **settings)
  assert answer.usage.completion_tokens == 3 * tokens
  for prompt, choice in zip(prompts, answer.choices, strict=True):
    text = list(prompt)
    if tokens:
      text += served.expected_tokens(prompt, max_tokens=tokens, stop_tokens=())
    actual = choice.logprobs
    assert len(actual.tokens) == len(text)
    assert actual.token_logprobs[0] is actual.top_logprobs[0] is None
    for place in range(1, len(text)):
      logits = toys.context_logits(params.target, text[:place])
      laws = logits - np.log(np.exp(logits.astype(np.float64)).sum())
      expected = laws[text[place]]
      assert actual.token_logprobs[place] == pytest.approx(expected, abs=1e-4)
      best = max(actual.top_logprobs[place].values())
      assert best == pytest.approx(laws.max(), abs=1e-4)
  chunks = list(complete(client, prompts[0], stream=True, **settings))
  assert "".join(c.choices[0].text for c in chunks) == answer.choices[0].text


MESSAGES = [
  {"role": "system", "content": "Short."},
  {"role": "user", "content": [{"type": "text", "text": "x <|endoftext|>"}]},
]


def test_chat_completions_match_generate(client):
  messages = [MESSAGES[0], {"role": "user", "content": "x <|endoftext|>"}]
  ids = chat.encode(served.tokenizer(), messages)
  assert served.tokenizer().eos_token_id not in ids  # no forgery
  settings = dict(max_tokens=20, temperature=1.0, seed=4)
  text = served.expected_text(ids, **settings)
  post = lambda **more: client.chat.completions.create(
    model="toy", messages=MESSAGES, temperature=1.0, seed=4, **more
  )
  answer = post(max_completion_tokens=20, logprobs=True)
  (choice,) = answer.choices
  assert answer.object == "chat.completion"
  assert (choice.message.role, choice.message.content) == ("assistant", text)
  assert len(choice.logprobs.content) == answer.usage.completion_tokens
  assert answer.usage.prompt_tokens == len(ids)
  chunks = list(
    post(max_tokens=20, stream=True, stream_options={"include_usage": True})
  )
  assert chunks[0].choices[0].delta.role == "assistant"
  assert all(c.choices[0].delta.role is None for c in chunks[1:-1])
  assert "".join(c.choices[0].delta.content for c in chunks[:-1]) == text
  last = chunks[-1].usage
  assert last.total_tokens == answer.usage.total_tokens
  assert last.prompt_tokens_details.cached_tokens == len(ids) - 1


def test_invalid_requests_raise_openai_client_errors(client):
  with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
    client.completions.create(model="gpt-4", prompt="x")
  with pytest.raises(openai.BadRequestError, match="suffix"):
    complete(client, suffix="y")


def test_models_health_and_metrics_match_vllm_conventions(server, client):
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


def test_requests_trigger_no_compilation(server, client, compiled):
  """Every width of prompts, choices, warps, stop texts, log-probabilities."""
  for body in ANY:
    answer = complete(client, **body)
    assert list(answer) if body["stream"] else answer.choices
  left = complete(client, max_tokens=60, ignore_eos=True, stream=True)
  next(iter(left))
  left.close()
  served.until(lambda: server[0].scheduler.load() == (0, 0))
  assert not compiled


def test_documented_curl_commands_succeed(server):
  """docs/serving.md as printed, but for the port."""
  (block,) = re.findall(
    r"```bash\n(.*?)```", pathlib.Path("docs/serving.md").read_text(), re.S
  )
  for line in block.strip().split("\n\n"):
    assert "localhost:8000" in line
    line = line.replace("http://localhost:8000", "localhost:8000")
    line = line.replace("localhost:8000", server[1])
    done = subprocess.run(
      ["bash", "-c", line.replace("curl ", "curl -sS --fail ", 1)],
      capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, (line, done.stderr, done.stdout)
    assert done.stdout
