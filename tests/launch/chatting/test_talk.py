"""A text that goes on: what is read of it, and what it says then."""

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import VOCAB

import specjax
from launch.chatting import talk as talk_lib
from launch.chatting.talk import ContextFullError, Talk
from specjax import drafters
from specjax.tree import paths

pytestmark = pytest.mark.usefixtures("quick_to_compile")
KEY = jax.random.key(5)
STOP = 4
DECODER = specjax.make_decoder(
  decoding.MODEL,
  drafter=drafters.model.drafter(
    decoding.MODEL, tree=paths(2, 2), vocab_size=VOCAB
  ),
  rule="recursive",
)


@pytest.fixture(scope="module")
def one():
  """A talk whose programs are compiled once."""
  return Talk(
    DECODER, decoding.PARAMS, stop_tokens=(STOP,), max_length=100,
    truncation={}, first_buffer=32,
  )  # fmt: skip


@pytest.fixture
def talk(one):
  one.forget()
  return one


def say(talk, ids, *, budget=7, temperature=0.0):
  """Reads a text and goes on: what was read, and the tokens."""
  reading = talk.read(
    ids, max_new_tokens=budget, temperature=temperature, key=KEY
  )
  tokens = [token for new in talk.rounds() for token, _ in new]
  assert talk.held == [*ids, *tokens]
  return reading, tokens


def greedily(ids, budget=7):
  """What the target says, by its table."""
  said = []
  while len(said) < budget and said[-1:] != [STOP]:
    logits = toys.context_logits(decoding.TARGET, [*ids, *said])
    said.append(int(np.argmax(logits)))
  return said


def test_of_three_turns_only_what_is_new_is_read(talk, monkeypatch):
  given = []
  for name in ("_init", "_extend"):
    real = getattr(talk, name)

    def spy(params, first, *rest, real=real, name=name, **more):
      counted = rest[2] if name == "_extend" else rest[0]
      given.append((name, int(np.sum(counted))))
      return real(params, first, *rest, **more)

    monkeypatch.setattr(talk, name, spy)
  ids, kept = [1, 2, 3], 0
  for new in ([], [5, 6], [7, 8, 9, 1]):
    ids += new
    reading, tokens = say(talk, ids)
    assert reading.kept == kept
    assert reading.read == len(ids) - kept
    assert tokens == greedily(ids)
    ids = [*ids, *tokens]
    kept = len(ids)
  assert given == [("_init", 3), ("_extend", 2), ("_extend", 4)]


def test_an_answer_is_that_of_a_text_that_is_read_at_once(talk):
  """At every temperature: draws follow from the place in the text."""
  texts = []
  ids = [1, 2, 3]
  for new in ([], [5, 6], [7, 8, 9, 1]):
    ids = [*ids, *new]
    _, tokens = say(talk, ids, temperature=0.9)
    texts.append((ids, tokens))
    ids = [*ids, *tokens]
  for ids, tokens in texts:
    talk.forget()
    reading, again = say(talk, ids, temperature=0.9)
    assert reading.kept == 0
    assert again == tokens


def test_a_text_that_is_another_is_read_anew(talk):
  _, tokens = say(talk, [1, 2, 3])
  other = [1, 2, 9, *tokens, 5, 6]
  reading, again = say(talk, other)
  assert reading.kept == 0
  assert reading.why == "what came before is another text"
  assert again == greedily(other)
  reading, _ = say(talk, talk.held[:4])
  assert reading.read == 4


def test_an_answer_that_is_broken_off_stays_and_goes_on(talk):
  talk.read([1, 2, 3], max_new_tokens=20, temperature=0.0, key=KEY)
  rounds = talk.rounds()
  written = [token for token, _ in [*next(rounds), *next(rounds)]]
  rounds.close()
  assert talk.held == [1, 2, 3, *written]
  reading, tokens = say(talk, [*talk.held, 6])
  assert (reading.kept, reading.read) == (3 + len(written), 1)
  assert tokens == greedily([1, 2, 3, *written, 6])


def test_the_buffer_grows_and_all_is_read_again_once(talk):
  say(talk, [1, 2, 3])
  assert talk.buffer_length == 32
  more = [*talk.held, *([7, 8, 9] * 8)]
  reading, tokens = say(talk, more)
  assert reading.why == "the buffer grew"
  assert talk.buffer_length == 64
  assert tokens == greedily(more)
  reading, _ = say(talk, [*talk.held, 3])
  assert reading.read == 1


def test_up_to_the_last_token_only_what_is_new_is_read(talk):
  """As many as nearly fill the buffer, or a budget beyond it."""
  say(talk, [*([7, 8, 9] * 25)])
  assert talk.buffer_length == 100  # it is the largest
  reading, tokens = say(talk, [3], budget=0)
  many = [3, *tokens, *([7, 8, 9] * 26)]
  reading, tokens = say(talk, many)
  assert reading.kept == 1
  assert tokens == greedily(many)
  more = [*talk.held, 5]
  reading, tokens = say(talk, more, budget=50)
  assert reading.read == 1
  assert tokens == greedily(more, budget=100 - len(more))


def test_a_full_context_is_refused_and_cuts_the_last_answer(talk):
  almost = [*([7, 8, 9] * 32), 1]
  _, tokens = say(talk, almost, budget=50)
  assert tokens == greedily(almost, budget=3)
  held = list(talk.held)
  if len(held) < 100:  # the answer ended by itself
    held += [1] * (100 - len(held))
  with pytest.raises(ContextFullError, match="/reset begins a new one"):
    talk.read(held, max_new_tokens=5, temperature=0.0, key=KEY)


def test_temperatures_and_lengths_are_no_programs_of_their_own(talk):
  sizes = []
  for temperature in (0.0, 0.5, 1.5):
    ids = [1, 2, 3][: len(sizes) + 1]
    talk.forget()
    for new in range(1, 4):
      _, tokens = say(talk, ids, temperature=temperature, budget=2)
      ids = [*ids, *tokens, *range(5, 5 + new)]
    programs = (talk._init, talk._extend, talk._steps)
    sizes.append([program._cache_size() for program in programs])
  assert sizes[0] == sizes[1] == sizes[2]


def test_what_breaks_off_is_read_again(talk, monkeypatch):
  say(talk, [1, 2, 3])
  held = list(talk.held)
  with monkeypatch.context() as patch:
    patch.setattr(talk, "_extend", lambda *args, **more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
      talk.read([*held, 6], max_new_tokens=3, temperature=0.0, key=KEY)
  reading, tokens = say(talk, [*held, 6])
  assert reading.why == "something broke off"
  assert tokens == greedily([*held, 6])


def test_whoever_waits_for_a_compiler_is_told(talk, monkeypatch):
  """And once it is over, that it is."""
  said = []
  monkeypatch.setattr(talk_lib, "_PATIENCE", 0.01)
  slow = Talk(
    specjax.make_decoder(decoding.MODEL), decoding.PARAMS, stop_tokens=(),
    max_length=20, truncation={}, say=said.append,
  )  # fmt: skip
  say(slow, [1, 2], budget=2)
  assert said
  assert said == ["compiling ...", ""] * (len(said) // 2)
  say(slow, [*slow.held, 2], budget=2)
  del said[:]
  say(slow, [*slow.held, 2], budget=2)
  assert not said


def test_the_newest_token_may_be_the_only_one_that_counts_as_read(talk):
  """A text of one token, and an answer of none."""
  reading, tokens = say(talk, [3], budget=0)
  assert (reading.read, tokens) == (1, [])
  _, tokens = say(talk, [3, 5])
  assert tokens == greedily([3, 5])
  assert jnp.array_equal(talk.state().length, jnp.array([2 + len(tokens)]))
