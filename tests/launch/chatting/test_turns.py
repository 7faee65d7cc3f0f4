"""The ids of a conversation: the template's, and what was generated."""

import dataclasses

import fallback
import pytest

from launch.chatting.turns import Conversation
from models import chat, tokenizers

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
NO_SYSTEM = (
  "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}"
  "{% endif %}" + CHATML
)
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
  """Conversations and turns of some questions, each with its answer."""
  for question, answer in zip(questions, answers, strict=True):
    turn = talk.ask(question)
    talk = talk.answered(turn, generated(talk, answer))
    yield talk, turn


def test_ids_are_those_of_the_template_and_begin_with_what_was_read(tokenizer):
  before = ()
  for number, (talk, turn) in enumerate(held(begun(tokenizer, CHATML))):
    assert turn.anew == ("" if number else "it is the first question")
    assert turn.ids == tuple(chat.encode(talk.tokenizer, turn.messages))
    assert turn.ids[: len(before)] == before
    before = talk.ids
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
  talk = talk.answered(turn, [*by_letter, tokenizer.eos_token_id])
  again = talk.ask("And?")
  assert not again.anew
  assert again.ids[: len(talk.ids)] == talk.ids
  assert again.ids != tuple(chat.encode(talk.tokenizer, again.messages))


def test_an_answer_that_was_cut_gets_the_end_that_the_template_writes(
  tokenizer,
):
  talk = begun(tokenizer, CHATML)
  turn = talk.ask("What is 3+4?")
  talk = talk.answered(turn, tokenizer.encode_text("Se"))
  again = talk.ask("And?")
  assert not again.anew
  assert again.ids[len(talk.ids)] == tokenizer.eos_token_id
  assert again.ids == tuple(chat.encode(talk.tokenizer, again.messages))


def test_a_broken_character_is_kept_as_it_was_written(tokenizer):
  talk = begun(tokenizer, CHATML)
  smile = tokenizer.encode_text("🙂")
  talk = talk.answered(talk.ask("?"), smile[:2])
  assert len(smile) == 4
  again = talk.ask("And?")
  assert again.ids[: len(talk.ids)] == talk.ids
  assert not again.anew


@pytest.mark.parametrize(
  "template, answer, reason",
  [
    (TRIMS, "Seven.", ""),
    (TRIMS, " Seven.", "the template rewrites answers"),
    (FORGETS, "Seven.", ""),
    (FORGETS, "hm#Seven.", "the template rewrites answers"),
    (FORGETS_LATER, "Seven.", ""),
    (FORGETS_LATER, "hm#Seven.",
     "the template rewrites what came before an answer"),
    (ENDS_OTHERWISE, "Seven.",
     "the answer ended with another token than the template writes"),
  ],
)  # fmt: skip
def test_what_a_template_rewrites_is_made_anew_and_said(
  tokenizer, template, answer, reason
):
  talk = begun(tokenizer, template)
  *_, (talk, turn) = held(talk, [answer] * 3)
  assert turn.anew == reason
  assert turn.ids == tuple(chat.encode(talk.tokenizer, turn.messages))


def test_text_between_answers_is_read_on_where_ids_agree(tokenizer):
  """Without a token there, an answer's end may be one with what follows."""
  talk = begun(tokenizer, TEXT_ENDS)
  turn = talk.ask("What is 3+4?")
  whole = talk.tokenizer.encode_text("Why")
  letters = [i for c in "Why" for i in talk.tokenizer.encode_text(c)]
  for ids, reason in (
    (whole, ""),
    (letters, "the template ends answers with text, and ids are others there"),
  ):
    after = talk.answered(turn, ids).ask("And?")
    assert after.anew == reason
    assert after.ids == tuple(chat.encode(talk.tokenizer, after.messages))


def test_another_system_message_makes_all_anew(tokenizer):
  *_, (talk, _) = held(begun(tokenizer, CHATML))
  talk = talk.with_system("Be brief.")
  turn = talk.ask("So?")
  assert turn.anew == "the system's message is another"
  assert turn.ids == tuple(chat.encode(talk.tokenizer, turn.messages))
  assert turn.messages[0] == {"role": "system", "content": "Be brief."}
  assert talk.with_system("").messages[0]["role"] == "user"
  fresh = talk.begun_anew()
  assert [m["role"] for m in fresh.messages] == ["system"]
  assert fresh.ask("So?").anew == "it is the first question"


def test_a_system_message_that_is_refused_changes_nothing(tokenizer):
  talk = begun(tokenizer, NO_SYSTEM)
  with pytest.raises(ValueError, match="refuses this: no system"):
    talk.with_system("Be brief.")


def test_an_answer_begins_with_the_space_that_was_written():
  """Also where a tokenizer drops the space that a whole text begins with."""
  tokenizer = dataclasses.replace(
    fallback.numbered(20),
    chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
  )
  talk = Conversation(tokenizer=tokenizer, stop_tokens=())
  talk = talk.answered(talk.ask("w7"), tokenizer.encode("w3 w4"))
  assert talk.messages[-1]["content"] == " w3 w4"
  assert list(talk.ask(" w5").ids) == tokenizer.encode("w7 w3 w4 w5")
