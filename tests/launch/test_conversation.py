"""A conversation's ids, and the text on the device that they continue."""

import contextlib
import dataclasses

import decoding
import fallback
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import VOCAB

import specjax
from launch.conversation import CachedText, Conversation
from models import chat, tokenizers
from specjax import drafters
from specjax.tree import paths
from specjax.warp import make_sampling

pytestmark = pytest.mark.usefixtures("quick_to_compile")
CHATML = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS = CHATML.replace("m.content", "m.content | trim")
# As some do with what a model thought: answers lose it, or earlier ones do.
FORGETS, FORGETS_LATER = (
  CHATML.replace(
    "{{ m.content }}",
    f"{{{{ m.content if loop.revindex < {n} else m.content.split('#')[-1] }}}}",
  )
  for n in (2, 3)
)
TEXT_ENDS = (
  "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
  "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
ENDS_OTHERWISE = CHATML.replace("<|im_end|>", "<|endoftext|>")
ANSWERS = ["Seven.", " It is\n\n7, naïvely 🙂", ""]
QUESTIONS = ["What is 3+4?", "Say it <|im_end|> again", "Why?"]


@pytest.fixture(scope="module")
def tokenizer():
  made = tokenizers.train(
    ["user assistant the quick brown fox\n", "What is 3 + 4? Why 7."] * 9,
    vocab_size=330,
  )
  made.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
  end = made.backend.token_to_id("<|im_end|>")
  return dataclasses.replace(made, eos_token_id=end)


def begun(tokenizer, template):
  tokenizer = dataclasses.replace(tokenizer, chat_template=template)
  return Conversation(
    tokenizer=tokenizer, stop_tokens=(tokenizer.eos_token_id,)
  )


def generated(talk, text):
  """An answer as a model writes it that ends its turn."""
  return [*talk.tokenizer.encode_text(text), talk.tokenizer.eos_token_id]


def held(talk, answers=ANSWERS, questions=QUESTIONS):
  """Of some questions: what was asked, and the conversation once answered."""
  for question, answer in zip(questions, answers, strict=True):
    turn = talk.ask(question)
    talk = turn.answered(generated(talk, answer))
    yield talk, turn


def is_continued(before, asked):
  """True if the text so far is the beginning of the request's."""
  return asked.ids[: len(before.ids)] == before.ids


def test_ids_are_those_of_the_template_and_begin_with_what_was_read(tokenizer):
  before = begun(tokenizer, CHATML)
  for talk, turn in held(before):
    assert turn.ids == tuple(chat.encode(talk.tokenizer, turn.messages))
    assert is_continued(before, turn)
    before = talk
  whole = chat.encode(
    talk.tokenizer, talk.messages, add_generation_prompt=False
  )
  newline = talk.tokenizer.encode_text("\n")
  assert [*talk.ids, *newline] == whole


def test_generated_ids_are_kept_where_their_text_is_made_of_others(tokenizer):
  talk = begun(tokenizer, CHATML)
  turn = talk.ask("What is 3+4?")
  by_letter = [i for c in "Why" for i in talk.tokenizer.encode_text(c)]
  assert by_letter != talk.tokenizer.encode_text("Why")
  talk = turn.answered([*by_letter, tokenizer.eos_token_id])
  again = talk.ask("And?")
  assert is_continued(talk, again)
  assert again.ids != tuple(chat.encode(talk.tokenizer, again.messages))


def test_an_answer_that_was_cut_gets_the_end_that_the_template_writes(
  tokenizer,
):
  talk = begun(tokenizer, CHATML)
  talk = talk.ask("What is 3+4?").answered(tokenizer.encode_text("Se"))
  again = talk.ask("And?")
  assert is_continued(talk, again)
  assert again.ids[len(talk.ids)] == tokenizer.eos_token_id
  assert again.ids == tuple(chat.encode(talk.tokenizer, again.messages))


def test_a_broken_character_is_kept_as_it_was_written(tokenizer):
  talk = begun(tokenizer, CHATML)
  smile = tokenizer.encode_text("🙂")
  talk = talk.ask("?").answered(smile[:2])
  assert len(smile) == 4
  assert is_continued(talk, talk.ask("And?"))


@pytest.mark.parametrize(
  "template, answer, continued",
  [
    (TRIMS, "Seven.", True),
    (TRIMS, " Seven.", False),  # it rewrites answers
    (FORGETS, "Seven.", True),
    (FORGETS, "hm#Seven.", False),
    (FORGETS_LATER, "Seven.", True),
    (FORGETS_LATER, "hm#Seven.", False),  # what came before an answer
    (ENDS_OTHERWISE, "Seven.", False),  # with another token than the answer
  ],
)  # fmt: skip
def test_what_a_template_rewrites_is_rendered_anew(
  tokenizer, template, answer, continued
):
  (_, _), (before, _), (talk, turn) = held(
    begun(tokenizer, template), [answer] * 3
  )
  assert is_continued(before, turn) == continued
  assert turn.ids == tuple(chat.encode(talk.tokenizer, turn.messages))


def test_text_between_answers_is_read_on_where_ids_agree(tokenizer):
  """Without a token there, an answer's end may be one with what follows."""
  turn = begun(tokenizer, TEXT_ENDS).ask("What is 3+4?")
  whole = tokenizer.encode_text("Why")
  letters = [i for c in "Why" for i in tokenizer.encode_text(c)]
  for ids, continued in ((whole, True), (letters, False)):
    talk = turn.answered(ids)
    after = talk.ask("And?")
    assert is_continued(talk, after) == continued
    assert after.ids == tuple(chat.encode(talk.tokenizer, after.messages))


def test_an_answer_begins_with_the_space_that_was_written():
  """Also where a tokenizer drops the space that a whole text begins with."""
  tokenizer = dataclasses.replace(
    fallback.numbered(20),
    chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
  )
  talk = Conversation(tokenizer=tokenizer, stop_tokens=())
  talk = talk.ask("w7").answered(tokenizer.encode("w3 w4"))
  assert talk.messages[-1]["content"] == " w3 w4"
  assert list(talk.ask(" w5").ids) == tokenizer.encode("w7 w3 w4 w5")


# ------------------------------------------------------------ the cached text

KEY = jax.random.key(5)
STOP = 4
GREEDY = make_sampling(1, temperature=0.0)
DECODER = specjax.make_decoder(
  decoding.MODEL,
  drafter=drafters.model(decoding.MODEL, tree=paths(2, 2), vocab_size=VOCAB),
  rule="recursive",
)


@pytest.fixture(scope="module")
def one():
  """A talk whose programs are compiled once."""
  return CachedText(
    DECODER, decoding.PARAMS, stop_tokens=(STOP,), max_length=100,
    first_buffer=32,
  )  # fmt: skip


@pytest.fixture
def talk(one):
  one.forget()
  return one


def say(talk, ids, *, budget=7, temperature=0.0):
  """Reads a text and continues it: how much was read, and the tokens."""
  sampling = make_sampling(1, temperature=temperature)
  read = talk.read(ids, max_new_tokens=budget, sampling=sampling, key=KEY)
  tokens = [token for new in talk.rounds() for token, _ in new]
  assert talk.held == [*ids, *tokens]
  return read, tokens


def greedily(ids, budget=7):
  """The target's law, by its table."""
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
    read, tokens = say(talk, ids)
    assert read == len(ids) - kept
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
    read, again = say(talk, ids, temperature=0.9)
    assert read == len(ids)
    assert again == tokens


def test_a_text_that_is_another_is_read_anew(talk):
  _, tokens = say(talk, [1, 2, 3])
  other = [1, 2, 9, *tokens, 5, 6]
  read, again = say(talk, other)
  assert read == len(other)
  assert again == greedily(other)
  read, _ = say(talk, talk.held[:4])
  assert read == 4


def test_an_answer_that_is_broken_off_stays_and_goes_on(talk):
  talk.read([1, 2, 3], max_new_tokens=20, sampling=GREEDY, key=KEY)
  rounds = talk.rounds()
  written = [token for token, _ in [*next(rounds), *next(rounds)]]
  rounds.close()
  assert talk.held == [1, 2, 3, *written]
  read, tokens = say(talk, [*talk.held, 6])
  assert read == 1
  assert tokens == greedily([1, 2, 3, *written, 6])


def test_the_buffer_grows_and_all_is_read_again_once(talk):
  say(talk, [1, 2, 3])
  assert talk.buffer_length == 32
  more = [*talk.held, *([7, 8, 9] * 8)]
  read, tokens = say(talk, more)
  assert read == len(more)
  assert talk.buffer_length == 64
  assert tokens == greedily(more)
  read, _ = say(talk, [*talk.held, 3])
  assert read == 1


def test_up_to_the_last_token_only_what_is_new_is_read(talk):
  """As many as nearly fill the buffer, or a budget beyond it."""
  say(talk, [*([7, 8, 9] * 25)])
  assert talk.buffer_length == 100  # it is the largest
  _, tokens = say(talk, [3], budget=0)
  many = [3, *tokens, *([7, 8, 9] * 26)]
  read, tokens = say(talk, many)
  assert read == len(many) - 1
  assert tokens == greedily(many)
  more = [*talk.held, 5]
  read, tokens = say(talk, more, budget=50)
  assert read == 1
  assert tokens == greedily(more, budget=100 - len(more))


def test_a_full_context_is_refused_and_cuts_the_last_answer(talk):
  almost = [*([7, 8, 9] * 32), 1]
  _, tokens = say(talk, almost, budget=50)
  assert tokens == greedily(almost, budget=3)
  held = list(talk.held)
  if len(held) < 100:  # the answer ended by itself
    held += [1] * (100 - len(held))
  with pytest.raises(ValueError, match="/reset begins a new one"):
    talk.read(held, max_new_tokens=5, sampling=GREEDY, key=KEY)


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
      talk.read([*held, 6], max_new_tokens=3, sampling=GREEDY, key=KEY)
  read, tokens = say(talk, [*held, 6])
  assert read == len(held) + 1
  assert tokens == greedily([*held, 6])


def test_whoever_waits_for_a_compiler_is_told(talk, monkeypatch):
  told = []
  monkeypatch.setattr(talk, "_compiled", set())
  monkeypatch.setattr(
    talk, "_waiting", lambda text: contextlib.nullcontext(told.append(text))
  )
  say(talk, [1, 2], budget=2)
  say(talk, [*talk.held, 2], budget=2)
  assert told == ["compiling ..."] * 2
  say(talk, [*talk.held, 2], budget=2)
  assert len(told) == 2


def test_the_newest_token_may_be_the_only_one_that_counts_as_read(talk):
  """A text of one token, and an answer of none."""
  assert say(talk, [3], budget=0) == (1, [])
  _, tokens = say(talk, [3, 5])
  assert tokens == greedily([3, 5])
  assert jnp.array_equal(talk.state.length, jnp.array([2 + len(tokens)]))
