"""Slots of toy models and servers over them, with `generate` as the oracle."""

import contextlib
import dataclasses
import functools
import threading
import time

import decoding
import jax.numpy as jnp
import numpy as np
import toys

import specjax
from launch.serving import http, schemas
from launch.serving import server as server_lib
from launch.serving import slots as slots_lib
from launch.serving.control import Request
from launch.serving.metrics import Metrics
from launch.serving.scheduler import Scheduler, Ticket
from models import tokenizers
from specjax import drafters, random
from specjax.tree import chain
from specjax.warp import make_sampling

PATIENCE = 120
MAX_LENGTH = 48
STOP = (3,)


def make_slots(decoder, params=decoding.PARAMS, **more):
  options = dict(
    num_slots=3, widths=(8, 16), longest=16, max_length=MAX_LENGTH,
    stop_tokens=STOP, max_rounds=4,
  )  # fmt: skip
  slots = slots_lib.Slots(
    {decoder.drafter.tree.max_depth: decoder}, params, **(options | more)
  )
  slots.compile()
  slots.compile_rest()
  return slots


def make_scheduler(slots, iterate=None, **more):
  options = dict(queue_length=64, cost_model=slots.cost_model()) | more
  metrics = Metrics(model="toy", num_slots=slots.num_slots, depth=slots.depth)
  made = Scheduler(slots, iterate or slots.iterate, metrics=metrics, **options)
  return made, metrics


class Heard:
  """A ticket, and all news that it got."""

  def __init__(self, asked, **more):
    self.news, self.over = [], threading.Event()
    self.ticket = Ticket(request=asked, deliver=self.hear, **more)

  def hear(self, news):
    self.news.append(news)
    if news.finish is not None:
      self.over.set()

  def wait(self):
    assert self.over.wait(PATIENCE)
    return self

  @property
  def tokens(self):
    return [x for news in self.news for x in news.token_ids]

  @property
  def finish(self):
    return self.news[-1].finish


def requests(count, *, vocab, seed=0, longest=16, budget=24):
  """Prompts of many lengths, each with a warp, a seed and a budget."""
  rng = np.random.default_rng(seed)
  return [
    Request(
      token_ids=tuple(
        rng.integers(0, vocab, rng.integers(1, longest + 1)).tolist()
      ),
      seed=int(rng.integers(2**32)),
      stream=int(rng.integers(3)),
      max_new_tokens=int(rng.integers(1, budget + 1)),
      temperature=float(rng.choice([0.0, 0.7, 1.3])),
      top_k=int(rng.choice([0, 0, 4])),
      top_p=float(rng.choice([1.0, 0.8])),
      min_p=float(rng.choice([0.0, 0.05])),
    )
    for _ in range(count)
  ]


def alone(
  decoder, asked, params=decoding.PARAMS, *, width=16, max_length=MAX_LENGTH,
  stop=STOP,
):  # fmt: skip
  """A request's tokens by `generate`, in a state of its own."""
  tokens = np.zeros((1, width), np.int32)
  tokens[0, : len(asked.token_ids)] = asked.token_ids
  state = decoding.jitted(decoder, "init")(
    params,
    tokens,
    np.array([len(asked.token_ids)]),
    random.seeded_keys(
      np.array([asked.seed], np.uint32), np.array([asked.stream], np.uint32)
    ),
    buffer_length=max_length,
    max_new_tokens=np.array([asked.max_new_tokens]),
    sampling=make_sampling(
      1, temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p,
      min_p=asked.min_p,
    ),
    stop_tokens=stop,
  )  # fmt: skip
  state = decoding.decode(decoder, state, params)
  return np.asarray(
    state.tokens[0, len(asked.token_ids) : state.length[0]]
  ).tolist()


def until(condition, patience=PATIENCE):
  """Waits for something that another thread does."""
  end = time.monotonic() + patience
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.005)


# ---------------------------------------------------------------- over HTTP

TEMPLATE = (
  "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
  "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@functools.cache
def tokenizer():
  """The embedded pair's, with a chat template."""
  loaded = tokenizers.load("models/pretrained/target")
  return dataclasses.replace(loaded, chat_template=TEMPLATE)


@functools.cache
def text_decoder():
  """Table models over that vocabulary: exact, and their texts are wild."""
  vocab = tokenizer().vocab_size
  target = toys.table(vocab, seed=0, scale=3.0)
  target[:, tokenizer().eos_token_id] += 4
  draft = toys.near(target, noise=0.8, seed=1)
  params = specjax.Params(target=jnp.asarray(target), draft=jnp.asarray(draft))
  model = toys.table_model(vocab)
  drafter = drafters.model(model, tree=chain(3), vocab_size=vocab)
  return specjax.make_decoder(model, drafter=drafter), params


def text_slots():
  """Slots of `text_decoder`, compiled."""
  decoder, params = text_decoder()
  return make_slots(
    decoder, params, widths=(16, 64), longest=64, max_length=160,
    stop_tokens=(tokenizer().eos_token_id,),
  )  # fmt: skip


def defaults_of(**more):
  """The defaults of requests."""
  return schemas.Defaults(
    model="toy", warp=dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0),
    vocab_size=tokenizer().vocab_size, max_new_tokens=32, longest_prompt=64,
    max_length=160, most=16, **more,
  )  # fmt: skip


@contextlib.contextmanager
def http_service(slots, iterate=None, *, limits=None, **more):
  """A server in a thread over `text_slots`: the `Service` and its address.

  `iterate` is in place of the slots', `limits` are fields of `Service`, and the
  rest goes to the scheduler.
  """
  scheduler, metrics = make_scheduler(slots, iterate, **more)
  service = http.Service(
    scheduler=scheduler, metrics=metrics, tokenizer=tokenizer(),
    defaults=defaults_of(scores=slots.scores), **(limits or {}),
  )  # fmt: skip
  scheduler.start()
  where = server_lib.bind("127.0.0.1", 0)
  port = where.getsockname()[1]
  server = server_lib.make_server(service)
  thread = threading.Thread(target=lambda: server.run(sockets=[where]))
  thread.start()
  try:
    until(lambda: server.started)
    yield service, f"http://127.0.0.1:{port}"
  finally:
    server.should_exit = True
    thread.join(PATIENCE)
    scheduler.close(at_once=True)
    assert scheduler.join(PATIENCE)
    assert not thread.is_alive()


def expected_tokens(prompt, *, stream=0, stop_tokens=None, **settings):
  """A request's tokens by `generate`."""
  decoder, params = text_decoder()
  if isinstance(prompt, str):
    prompt = tokenizer().encode(prompt)
  settings = dict(seed=0, max_tokens=16, temperature=0.0) | settings
  asked = Request(
    token_ids=tuple(prompt),
    stream=stream,
    max_new_tokens=settings.pop("max_tokens"),
    **settings,
  )
  return alone(
    decoder, asked, params, width=64, max_length=160,
    stop=(tokenizer().eos_token_id,) if stop_tokens is None else stop_tokens,
  )  # fmt: skip


def expected_text(prompt, **settings):
  """As `expected_tokens`, decoded at once."""
  return tokenizer().decode(expected_tokens(prompt, **settings))


@functools.cache
def long_request():
  """A request for a completion that no stop token ends."""
  for seed in range(1000):
    asked = dict(prompt="def main(", max_tokens=150, temperature=1.0, seed=seed)
    if len(expected_tokens(**asked)) == 150:
      return asked
  raise AssertionError("all of them end")
