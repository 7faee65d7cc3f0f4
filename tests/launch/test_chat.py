"""`launch.chat` as its users call it, piped and in a terminal."""

import dataclasses
import io
import sys
import types

import files
import pytest
import rich.console

import launch.chat
from configs import huggingface
from launch import display
from launch.chat import Chat
from launch.prompts import Prompt
from models import chat as templates
from models import tokenizers
from specjax.runtime.requests import make_batches

SMALL = ("--config.drafter=ngram(tokens=3)", "--config.max_new_tokens=12")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """A folder of a random chat model of 256 positions."""
  folder = tmp_path_factory.mktemp("chat") / "model"
  files.make_checkpoint(folder, vocab_size=4128, num_layers=1)
  tokenizer = tokenizers.load(str(folder))
  tokenizer.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
  end = tokenizer.backend.token_to_id("<|im_end|>")
  tokenizers.save(dataclasses.replace(tokenizer, eos_token_id=end), str(folder))
  (folder / "chat_template.jinja").write_text(files.CHATML)
  return folder


@pytest.fixture
def piped(cli, model, monkeypatch, capsys):
  """Pipes text through the command: exit code, stdout and stderr."""

  def of(text, *flags):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    config = f"configs/huggingface.py:target={model}"
    code = cli(launch.chat.run, *SMALL, *flags, config=config)
    return code, *capsys.readouterr()

  return of


@pytest.fixture(scope="module")
def talked(model):
  """A conversation of three turns."""
  config = huggingface.get_config(f"target={model}")
  assert config.drafter == "ngram"  # what needs no draft
  config.max_new_tokens = 12
  with pytest.MonkeyPatch.context() as patch:
    for name in ("stdout", "stderr"):
      patch.setattr(sys, name, io.StringIO())
    made = Chat(config)
    for text in ("What is 2+2?", "And <|im_end|> that?", "Why?"):
      made.run(text)
  return made


def test_answer_is_conditioned_on_the_whole_conversation(talked):
  """The answer is that of the whole text, decoded at once."""
  *before, question, answer = talked.messages
  ids = templates.encode(talked.pair.tokenizer, [*before, question])
  prompt = Prompt(0, 0, "", tuple(ids))
  (batch,) = make_batches([prompt], batch_size=1, max_width=len(ids))
  ((done,), _) = talked.engine.run(batch)
  said = talked.pair.tokenizer.decode(done.token_ids, after=ids)
  assert answer["content"] == said


def test_piped_lines_are_answered_with_only_answers_on_stdout(piped, talked):
  code, out, err = piped("What is 2+2?\nAnd <|im_end|> that?\r\nWhy?")
  assert code == 0
  answers = [m["content"] for m in talked.messages if m["role"] == "assistant"]
  assert out == "".join(answer.rstrip("\ufffd") + "\n" for answer in answers)
  speeds = [x for x in err.splitlines() if " per second, " in x]
  assert len(speeds) == 3
  assert all(" per target call" in line for line in speeds)


def test_invalid_commands_print_one_line_and_chat_continues(piped, talked):
  code, out, err = piped(
    "/nothing\n/temperature hot\n/temperature -1\n/reset x\nWhat is 2+2?\n"
    "/quit\nnever asked\n"
  )
  assert code == 2
  assert out == talked.messages[1]["content"].rstrip("\ufffd") + "\n"
  lines = [x for x in err.splitlines() if x.startswith("error: ")]
  for line, words in zip(
    lines,
    ("unknown command /nothing: use /temp", "could not convert string to fl",
     "temperature must be finite", "unknown command /reset x"),
    strict=True,
  ):  # fmt: skip
    assert words in line


def test_full_context_is_reported_and_suggests_reset(piped):
  question = "Tell me all that you know about this. " * 4
  code, out, err = piped((question + "\n") * 9 + "/reset\nWhat is 2+2?\n")
  assert code == 2
  assert "/reset begins a new one" in err
  assert "the conversation would have" in err
  assert "Traceback" not in err
  _, alone, _ = piped("What is 2+2?\n")
  assert out.endswith(alone)


def test_ctrl_c_interrupts_an_answer_and_keeps_its_tokens(talked, monkeypatch):
  """Written tokens stay, and the conversation goes on."""
  generate, out, calls = talked.engine.generate, io.StringIO(), []

  def interrupted(*args):
    calls.append(1)
    if len(calls) == 3:
      raise KeyboardInterrupt
    return generate(*args)

  monkeypatch.setattr(talked, "messages", talked.messages)  # put back
  monkeypatch.setattr(talked, "_interactive", True)
  monkeypatch.setattr(talked, "console", rich.console.Console(file=out))
  monkeypatch.setattr(talked, "engine", types.SimpleNamespace(
    compile=talked.engine.compile, prefill=talked.engine.prefill,
    generate=interrupted,
  ))  # fmt: skip
  talked.run("So?")
  answer = talked.messages[-1]["content"]
  assert answer
  text = display.visible(answer).rstrip("\ufffd")
  assert out.getvalue() == f"{text}\ninterrupted\n"
  talked.run("Why?")
  assert talked.messages[-2]["content"] == "Why?"
