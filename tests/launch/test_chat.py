"""`launch.chat` as its users call it, piped and in a terminal."""

import dataclasses
import io
import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys

import fallback
import files
import pytest
import several

import launch.chat
from launch import terminal
from launch.chatting import commands, screen
from launch.chatting.chat import Chat
from models import chat as templates
from models import tokenizers
from specjax.state import Origin

pytestmark = pytest.mark.usefixtures("quick_to_compile")
CHATML = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = ("--config.drafter=ngram", "--config.num_speculative_tokens=3",
         "--config.max_new_tokens=12")  # fmt: skip
TEXT = "def f(x):\n  return x + 1"
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


class Silent(screen.Screen):
  """What is said, in place of where."""

  def __init__(self):
    super().__init__(interactive=False)
    self.said = []

  def note(self, text):
    self.said.append(text)

  error = note


@pytest.fixture(scope="module")
def talked(model):
  """A conversation of three turns."""
  from configs import huggingface

  config = huggingface.get_config(f"target={model}")
  config.drafter, config.num_speculative_tokens = "ngram", 3
  config.skip_mlp = (0,)  # for the drafter that skips layers
  config.max_new_tokens = 12
  made = Chat(config, Silent())
  readings = []
  for text in ("What is 2+2?", "And <|im_end|> that?", "Why?"):
    made.run(text)
    readings.append(made.last.reading)
  return made, readings


def test_after_three_turns_the_state_holds_what_the_template_writes(talked):
  made, readings = talked
  tokenizer, state = made.pair.tokenizer, made.talk.state()
  held = state.tokens[0, : int(state.length[0])].tolist()
  assert held == list(made.conversation.ids) == made.talk.held
  text = templates.render(
    tokenizer, made.conversation.messages, add_generation_prompt=False
  )
  written = tokenizer.backend.decode(held, skip_special_tokens=False)
  assert len(written) > 60
  assert text.startswith(written)
  assert text.removeprefix(written) in ("\n", "<|im_end|>\n")
  assert [r.why for r in readings] == ["it is the first question", "", ""]
  assert sum(r.read for r in readings) + 3 * 12 == len(held)
  for before, after in itertools.pairwise(readings):
    assert after.kept == before.kept + before.read + 12


def test_every_line_piped_is_answered_and_answers_alone_are_printed(
  piped, talked
):
  code, out, err = piped("What is 2+2?\nAnd <|im_end|> that?\r\nWhy?")
  assert code == 0
  messages = talked[0].conversation.messages
  answers = [m["content"] for m in messages if m["role"] == "assistant"]
  shown = "".join(answer.rstrip("\ufffd") + "\n" for answer in answers)
  assert out == terminal.visible(shown)
  speeds = [x for x in err.splitlines() if " a second, " in x]
  assert len(speeds) == 3
  assert all(line.endswith(" a target call") for line in speeds)


def test_what_is_wrong_is_one_line_and_the_conversation_goes_on(piped, talked):
  code, out, err = piped(
    "/nothing\n/rule nope\n/temperature hot\n/drafter model\n/rule\n/stats x\n"
    "/temperature -1\nWhat is 2+2?\n/quit\nnever asked\n"
  )
  assert code == 2
  answer = talked[0].conversation.messages[1]["content"]
  assert out == terminal.visible(answer + "\n")
  lines = [x for x in err.splitlines() if x.startswith("error: ")]
  assert len(lines) == 7
  for line, words in zip(
    lines,
    ("unknown command /nothing", "unknown rule 'nope'", "takes a number",
     "config.draft, or /drafter ngram", "/rule takes NAME",
     "takes nothing after it",
     "temperature must be finite"),
    strict=True,
  ):  # fmt: skip
    assert line.startswith("error: ")
    assert words in line


def test_rules_and_drafters_change_and_the_conversation_stays(talked):
  """Greedy answers are the same whatever drafts and verifies."""
  made, _ = talked
  before = made.conversation
  made.run("So?")
  expected = made.conversation.messages[-1]
  for line, reason in (
    ("/rule match", "the rule is another"),
    ("/drafter layer_skip", "the drafter is another"),
  ):
    made.conversation = before
    made.run(line)
    made.run("So?")
    assert made.last.reading.why == reason
    assert made.conversation.messages[-1] == expected
    assert made.conversation.messages[:-2] == before.messages
  made.run("/drafter ngram")
  made.run("/rule token")
  made.conversation = before


def test_stats_say_what_was_read_and_measure_plain_decoding(talked):
  made, _ = talked
  made.talk.forget()
  made.run("So?")
  made.run("And so?")
  assert "speed-up" not in made._screen.said[-2]
  made.run("/stats")
  stats = made._screen.said[-1]
  assert f"context: {len(made.talk.held)} of 256 tokens" in stats
  read = made.last.reading
  assert f"read: {read.read} new tokens after {read.kept}" in stats
  assert "plain decoding after the same text: " in stats
  ratio = made.last.tokens_per_second / made._plain_rate
  assert f"speed-up {ratio:.2f}, lossless" in stats
  assert f"{12 / made.last.num_target_calls:.2f} a target call" in stats


def test_a_system_message_and_a_reset(talked):
  made, _ = talked
  made.run("/system Be brief.")
  made.run("So?")
  assert made.last.reading.why == "the system's message is another"
  made.run("/reset")
  made.run("So?")
  assert [m["role"] for m in made.conversation.messages] == [
    "system", "user", "assistant",
  ]  # fmt: skip
  assert made.last.reading.why == "it is the first question"


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


def test_characters_are_shown_whole():
  """A token at a time, none of it is half a character."""
  tokenizer = tokenizers.load(files.EMBEDDED)
  text = "größe 🙂👩‍🔬 日本 é."
  growing = screen.Growing(tokenizer)
  pieces = [growing.add(token) for token in tokenizer.encode(text)]
  assert "".join(pieces) + growing.rest() == text
  assert not any("\ufffd" in piece for piece in pieces)
  assert "" in pieces
  broken = screen.Growing(tokenizer)
  shown = [broken.add(token) for token in tokenizer.encode("a🙂")[:-1]]
  assert "".join(shown) + broken.rest() == "a"


@pytest.mark.parametrize(
  "line, found",
  [("/rule token", ("rule", "token")), ("/stats", ("stats", "")),
   ("/system", ("system", "")), ("/system a  b", ("system", "a  b")),
   ("hello /rule", None), ("//etc", None), ("", None)],
)  # fmt: skip
def test_commands_are_told_from_messages(line, found):
  assert commands.parse(line) == found
  assert commands.message("//etc") == "/etc"


def test_a_line_that_ends_in_a_backslash_goes_on():
  lines = ["a\\\n", "b\r\n", "\\\n", "c\\"]
  assert list(screen._joined(iter(lines))) == ["a\nb", "\nc"]


@pytest.fixture
def shown(monkeypatch):
  """A screen that somebody sits before, and what it shows."""
  out = io.StringIO()
  monkeypatch.setattr(sys, "stdout", out)
  return screen.Screen(interactive=True), out


@pytest.fixture
def heeded():
  """Ctrl-C counts, also where the tests run in a shell's background."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


def interrupted(*, times):
  """Rounds of a token; Ctrl-C comes in the second, so often."""
  for number, token in enumerate(tokenizers.load(files.EMBEDDED).encode(TEXT)):
    if number == 1:
      for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
    yield [(token, Origin.ACCEPTED)]


@pytest.fixture
def terminals(shown, monkeypatch):
  """The same, of a terminal that obeys escapes."""
  monkeypatch.setenv("TERM", "xterm")
  shown[0].console._force_terminal = True
  return shown


def seen(written, width):
  """The lines that a terminal of this width then shows."""
  lines, column = [""], 0
  for sign in re.findall(r"\x1b\[\d*[A-Za-z]|\x1b\[[\d;]*m|.|\n|\r", written):
    if sign == "\n":
      lines.append("")
      column = 0
    elif sign == "\r":
      column = 0
    elif sign.endswith("G") and sign[0] == "\x1b":
      column = int(sign[2:-1]) - 1
    elif sign == "\x1b[0K":
      lines[-1] = lines[-1][:column]
    elif sign == "\x1b[2K":
      lines[-1] = ""
    elif sign[0] != "\x1b":
      if column == width:
        lines.append("")
        column = 0
      lines[-1] = lines[-1][:column] + sign
      column += 1
  return lines


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_words_do_not_break_at_the_border(terminals, size):
  """Whatever the pieces; what is longer than a line does."""
  screen_, out = terminals
  screen_.console.width = 20
  text = "Nobody expects that\n  a wonderful afternoon comes\tsuddenly " + (
    "x" * 50 + " end."
  )
  for start in range(0, len(text), size):
    screen_._write(text[start : start + size], Origin.ACCEPTED)
  lines = [line.rstrip() for line in seen(out.getvalue(), 20)]
  assert lines == [
    "Nobody expects that", "  a wonderful", "afternoon comes", "suddenly",
    "x" * 20, "x" * 20, "x" * 10 + " end.",
  ]  # fmt: skip


def test_words_without_blanks_between_them_fill_lines(terminals):
  screen_, out = terminals
  screen_.console.width = 11
  for sign in "日本語の文章です":
    screen_._write(sign, Origin.BONUS)
  assert seen(out.getvalue(), 99) == ["日本語の文", "章です"]


def test_what_takes_long_is_gone_once_it_is_over(terminals):
  screen_, out = terminals
  screen_.passing("compiling ...")
  assert seen(out.getvalue(), 99) == ["compiling ..."]
  screen_.passing("")
  assert seen(out.getvalue(), 99) == [""]


@pytest.mark.parametrize(
  "error, shown_as",
  [
    ("it drafts trees: config.rule=match verifies them",
     "it drafts trees: /rule match verifies them"),
    ("give config.draft, or config.drafter=ngram or layer_skip",
     "give config.draft, or /drafter ngram or layer_skip (it is launch.chat "
     "that takes --config.draft, when it is started)"),
    ("needs siblings='greedy', got siblings='iid'",
     "needs siblings='greedy', got siblings='iid' (it is launch.chat that "
     "takes --config.siblings, when it is started)"),
    ("a tree of a draft, with num_nodes above 6",
     "a tree of a draft, with num_nodes above 6 (it is launch.chat that takes "
     "--config.num_nodes, when it is started)"),
    ("unknown rule 'nope'", "unknown rule 'nope'"),
  ],
)  # fmt: skip
def test_hints_name_what_can_be_typed(error, shown_as):
  from configs import huggingface

  assert commands.here(error, huggingface.get_config("target=x")) == shown_as


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("times, left", [(0, 99), (1, 2), (2, 1)])
def test_ctrl_c_ends_an_answer_and_what_was_written_stays(shown, times, left):
  """The first is noted until a round is over, the second breaks one off."""
  before = signal.getsignal(signal.SIGINT)
  tokenizer = tokenizers.load(files.EMBEDDED)
  ids = shown[0].answer(tokenizer, interrupted(times=times))
  assert ids == tokenizer.encode(TEXT)[:left]
  assert shown[1].getvalue() == tokenizer.decode(ids) + "\n"
  assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_is_shown_with_the_space_that_it_begins_with(shown):
  tokenizer = fallback.numbered(20)
  rounds = iter([[(3, Origin.ACCEPTED)], [(4, Origin.BONUS)]])
  assert shown[0].answer(tokenizer, rounds, [7]) == [3, 4]
  assert shown[1].getvalue() == " w3 w4\n"


@pytest.mark.usefixtures("heeded")
def test_ctrl_c_ends_a_pipe(monkeypatch):
  monkeypatch.setattr(sys, "stdout", io.StringIO())
  piped = screen.Screen(interactive=False)
  with pytest.raises(KeyboardInterrupt):
    piped.answer(tokenizers.load(files.EMBEDDED), interrupted(times=1))


# A process of its own: jax has threads, and one that has does not fork well.
IN_TERMINAL = r"""
import os, pexpect, sys, time
seconds, *command = sys.argv[1:]
child = pexpect.spawn(
  sys.executable, ["-m", "launch.chat", *command], encoding="utf-8",
  env={**os.environ, "TERM": "xterm-256color", "NO_COLOR": ""},
  timeout=float(seconds), dimensions=(40, 200),
)
child.expect("drafted by ngram, rule token, temperature 0; /help")
child.expect("drafted and accepted")
child.expect("\n> ")
child.sendline("What is 2+2?")
child.expect("\x1b\\[[0-9;]*m[^\x1b]+\x1b\\[0m")  # a token in its colour
child.expect("12 tokens, [0-9.]+ a second, [0-9.]+ a target call")
child.expect("\n> ")
time.sleep(1)  # as somebody who types: what comes with the prompt is lost
child.send("given up")
child.expect_exact("given up")
for _ in range(20):  # a signal beside a key that is being read is lost
  time.sleep(1)
  child.sendintr()
  if not child.expect(["\n> ", pexpect.TIMEOUT], timeout=5):
    break
child.send("\x1b[A")  # the line before, which readline keeps
child.expect_exact("What is 2+2?")
child.send("\r")
child.expect("12 tokens")
child.expect("\n> ")
child.sendline("/stats")
child.expect("new tokens after [0-9]+ that were kept")
child.expect("speed-up [0-9.]+, lossless")
child.expect("\n> ")
child.sendeof()
child.expect(pexpect.EOF)
child.close()
sys.exit(child.exitstatus)
"""


@pytest.mark.heavy
@pytest.mark.skipif(os.name != "posix", reason="needs a terminal of its own")
def test_in_a_terminal(model):
  """Colours, the line after an answer, history, Ctrl-C, Ctrl-D."""
  done = subprocess.run(
    [sys.executable, "-c", IN_TERMINAL, str(several.PATIENCE),
     f"--config=configs/huggingface.py:target={model}", *SMALL],
    capture_output=True, text=True, cwd=ROOT, check=False,
    timeout=2 * several.PATIENCE,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
