"""`launch.chat` as its users call it, piped and in a terminal."""

import dataclasses
import io
import os
import pathlib
import signal
import sys

import files
import jax
import pytest
import rich.console

import launch.chat
from configs import huggingface
from launch import display
from launch.chat import Cache, Chat
from models import tokenizers
from specjax.warp import make_sampling

pytestmark = pytest.mark.usefixtures("quick_to_compile")
CHATML = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = ("--config.drafter=ngram(tokens=3)", "--config.max_new_tokens=12")
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """A folder of a random chat model of 256 positions."""
  folder = tmp_path_factory.mktemp("chat") / "model"
  files.make_checkpoint(folder, vocab_size=4128, num_layers=1)
  tokenizer = tokenizers.load(str(folder))
  tokenizer.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
  end = tokenizer.backend.token_to_id("<|im_end|>")
  tokenizers.save(dataclasses.replace(tokenizer, eos_token_id=end), str(folder))
  (folder / "chat_template.jinja").write_text(CHATML)
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
  config.drafter = "ngram(tokens=3)"
  config.max_new_tokens = 12
  with pytest.MonkeyPatch.context() as patch:
    for name in ("stdout", "stderr"):
      patch.setattr(sys, name, io.StringIO())
    made = Chat(config)
    for text in ("What is 2+2?", "And <|im_end|> that?", "Why?"):
      made.run(text)
  return made


@pytest.fixture
def reads(talked, monkeypatch):
  """Numbers of tokens that were read; the conversation is put back."""
  read, counts, before = talked.cache.read, [], talked.messages
  monkeypatch.setattr(
    talked.cache, "read", lambda *args, **how: counts.append(read(*args, **how))
  )
  yield counts
  talked.messages = before


def continued(cache, ids):
  """Tokens that were read of a text, and those that continue it."""
  sampling = make_sampling(1, temperature=0.0)
  read = cache.read(
    ids, max_new_tokens=12, sampling=sampling, key=jax.random.key(0)
  )
  return read, [token for token, _ in cache.rounds()]


def test_only_what_is_new_is_read_and_the_answer_is_that_of_the_whole(talked):
  told = []
  cache = Cache(talked.pair, told.append)
  first = list(range(20, 60))
  read, said = continued(cache, first)
  assert (read, cache.held) == (40, first + said)
  longer = [*cache.held, 7, 8, 9]
  read, extended = continued(cache, longer)
  assert read == 3
  assert [x.split(" in ")[0] for x in told] == [
    "compiling for 64 tokens", "compiling for 16 tokens"
  ]  # fmt: skip
  assert continued(Cache(talked.pair, told.append), longer) == (
    len(longer),
    extended,
  )
  # A text that does not begin as what is held is read anew.
  read, _ = continued(cache, longer[1:])
  assert read == len(longer) - 1


def test_every_line_piped_is_answered_and_answers_alone_are_printed(
  piped, talked
):
  code, out, err = piped("What is 2+2?\nAnd <|im_end|> that?\r\nWhy?")
  assert code == 0
  answers = [m["content"] for m in talked.messages if m["role"] == "assistant"]
  assert out == "".join(answer.rstrip("\ufffd") + "\n" for answer in answers)
  speeds = [x for x in err.splitlines() if " a second, " in x]
  assert len(speeds) == 3
  assert all(" a target call" in line for line in speeds)


def test_help_lists_the_commands_and_is_no_error(piped):
  code, out, err = piped("/help\n")
  assert (code, out) == (0, "")
  assert "/temperature X, /reset, /help, /quit" in err


def test_what_is_wrong_is_one_line_and_the_conversation_goes_on(piped, talked):
  code, out, err = piped(
    "/nothing\n/temperature hot\n/temperature -1\n/reset x\nWhat is 2+2?\n"
    "/quit\nnever asked\n"
  )
  assert code == 2
  assert out == talked.messages[1]["content"].rstrip("\ufffd") + "\n"
  lines = [x for x in err.splitlines() if x.startswith("error: ")]
  for line, words in zip(
    lines,
    ("no command /nothing: there are /temp", "could not convert string to fl",
     "temperature must be finite", "no command /reset x"),
    strict=True,
  ):  # fmt: skip
    assert words in line


def test_a_temperature_changes_answers(talked, reads):
  before = talked.messages
  talked.run("So?")
  greedy = talked.messages
  talked.messages = before
  talked.run("/temperature 1.5")
  talked.run("So?")
  talked.run("/temperature 0")
  assert talked.messages != greedy


def test_a_system_message_stays_and_a_reset_forgets_all_else(piped):
  text = "What is 2+2?\n/reset\nWhat is 2+2?\n"
  plain, told = (
    piped(text, *flags)[1] for flags in ((), ("--system_message=Be brief.",))
  )
  for out in (plain, told):
    assert out == 2 * out[: len(out) // 2]
  assert plain != told


def test_a_full_context_says_so_and_offers_to_begin_anew(piped):
  question = "Tell me all that you know about this. " * 4
  code, out, err = piped((question + "\n") * 9 + "/reset\nWhat is 2+2?\n")
  assert code == 2
  assert "/reset begins a new one" in err
  assert "the conversation would have" in err
  assert "Traceback" not in err
  _, alone, _ = piped("What is 2+2?\n")
  assert out.endswith(alone)


def test_a_model_without_a_template_is_refused(cli, pair, capsys):
  config = f"configs/huggingface.py:target={pair[0]}"
  assert cli(launch.chat.run, *SMALL, config=config) == 2
  assert "has no chat template" in capsys.readouterr().err


@pytest.fixture
def heeded():
  """Ctrl-C counts, also where the tests run in a shell's background."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("interactive", [True, False])
def test_ctrl_c_ends_an_answer_or_a_pipe(
  talked, reads, monkeypatch, interactive
):
  """Written tokens stay, and the conversation goes on."""
  steps, out, calls = talked.cache._steps, io.StringIO(), []
  talked.cache.state = None  # all is read

  def interrupted(*args):
    calls.append(1)
    if len(calls) == 3:  # of reading, and of the first two rounds
      os.kill(os.getpid(), signal.SIGINT)
    return steps(*args)

  monkeypatch.setattr(sys, "stdout", out)
  monkeypatch.setattr(talked, "_interactive", interactive)
  monkeypatch.setattr(talked, "console", rich.console.Console(file=out))
  monkeypatch.setattr(talked.cache, "_steps", interrupted)
  if not interactive:
    with pytest.raises(KeyboardInterrupt):
      talked.run("So?")
    return
  talked.run("So?")
  assert 1 <= len(talked.cache.held) - reads[-1] < 12
  answer = talked.messages[-1]["content"]
  assert out.getvalue() == display.visible(answer).rstrip("\ufffd") + "\n"
  assert talked.cache.state is None
  talked.run("Why?")
  assert talked.messages[-2]["content"] == "Why?"
