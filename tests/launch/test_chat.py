"""`launch.chat` as its users call it, piped and in a terminal."""

import dataclasses
import io
import os
import pathlib
import signal
import subprocess
import sys

import files
import pytest
import rich.console
import several

import launch.chat
from launch import display
from launch.chat import Chat
from models import chat as templates
from models import tokenizers

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
  from configs import huggingface

  config = huggingface.get_config(f"target={model}")
  skipped = model.parent / "skip.json"
  skipped.write_text('{"skip_attention": [], "skip_mlp": [0]}')
  config.drafter = "ngram(tokens=3)"
  config.checkpoints.layer_skip = str(skipped)
  config.max_new_tokens = 12
  with pytest.MonkeyPatch.context() as patch:
    for name in ("stdout", "stderr"):
      patch.setattr(sys, name, io.StringIO())
    made = Chat(config)
    for text in ("What is 2+2?", "And <|im_end|> that?", "Why?"):
      made.run(text)
  return made


def reads(talked, line):
  """Number of tokens that the cached text reads for a line."""
  read, counts = talked.text.read, []
  talked.text.read = lambda *args, **more: counts.append(read(*args, **more))
  try:
    talked.run(line)
  finally:
    talked.text.read = read
  return counts[0]


def test_after_three_turns_the_state_holds_what_the_template_writes(talked):
  tokenizer, state = talked.pair.tokenizer, talked.text.state
  held = state.tokens[0, : int(state.length[0])].tolist()
  assert held == list(talked.conversation.ids) == talked.text.held
  text = templates.render(
    tokenizer, talked.conversation.messages, add_generation_prompt=False
  )
  written = tokenizer.backend.decode(held, skip_special_tokens=False)
  assert len(written) > 60
  assert text.startswith(written)
  assert text.removeprefix(written) in ("\n", "<|im_end|>\n")


def test_every_line_piped_is_answered_and_answers_alone_are_printed(
  piped, talked
):
  code, out, err = piped("What is 2+2?\nAnd <|im_end|> that?\r\nWhy?")
  assert code == 0
  messages = talked.conversation.messages
  answers = [m["content"] for m in messages if m["role"] == "assistant"]
  shown = "".join(answer.rstrip("\ufffd") + "\n" for answer in answers)
  assert out == display.visible(shown)
  speeds = [x for x in err.splitlines() if " a second, " in x]
  assert len(speeds) == 3
  assert all(line.endswith(" a target call") for line in speeds)


def test_what_is_wrong_is_one_line_and_the_conversation_goes_on(piped, talked):
  code, out, err = piped(
    "/nothing\n/temprature 1\n/temperature hot\n/drafter model\n/drafter\n"
    "/reset x\n/temperature -1\nWhat is 2+2?\n/quit\nnever asked\n"
  )
  assert code == 2
  answer = talked.conversation.messages[1]["content"]
  assert out == display.visible(answer + "\n")
  lines = [x for x in err.splitlines() if x.startswith("error: ")]
  for line, words in zip(
    lines,
    ("no command /nothing: there are /drafter CALL", "did you mean",
     "takes a number, got hot", "drafter 'model' needs a checkpoint",
     "no command /drafter: there are /drafter CALL", "no command /reset x",
     "temperature must be finite"),
    strict=True,
  ):  # fmt: skip
    assert words in line


def test_a_drafter_and_a_temperature_change_and_the_conversation_stays(talked):
  """Greedy answers are the same whatever drafts, and all is read once more."""
  before = talked.conversation
  assert reads(talked, "So?") < len(before.ids)
  expected = talked.conversation
  talked.conversation = before
  talked.run("/drafter layer_skip")
  assert reads(talked, "So?") > len(before.ids)
  assert talked.conversation == expected
  talked.conversation = before
  talked.run("/temperature 1.5")
  talked.run("So?")
  assert talked.conversation != expected
  talked.run("/temperature 0")
  talked.run("/drafter ngram(tokens=3)")


def test_a_drafter_is_read_that_no_path_names(talked):
  talked.run("/drafter quantised_self(bits=8, tokens=2)")
  assert talked.pair.draft.vocab_size
  talked.run("/drafter ngram(tokens=3)")


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


def test_a_line_that_ends_in_a_backslash_goes_on(monkeypatch):
  monkeypatch.setattr(sys, "stdin", io.StringIO("a\\\nb\r\n\\\nc\\"))
  assert list(launch.chat.lines(interactive=False)) == ["a\nb", "\nc"]


@pytest.fixture
def heeded():
  """Ctrl-C counts, also where the tests run in a shell's background."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("interactive", [True, False])
def test_ctrl_c_ends_an_answer_or_a_pipe(talked, monkeypatch, interactive):
  """Written tokens stay, and the conversation goes on."""
  before, steps, out = talked.conversation, talked.text._steps, io.StringIO()
  talked.run("So?")
  whole, talked.conversation = talked.conversation.ids, before
  talked.text.forget()
  calls = []

  def interrupted(*args):
    calls.append(1)
    if len(calls) == 3:  # of reading, and of the first two rounds
      os.kill(os.getpid(), signal.SIGINT)
    return steps(*args)

  monkeypatch.setattr(sys, "stdout", out)
  monkeypatch.setattr(talked, "_interactive", interactive)
  monkeypatch.setattr(talked, "console", rich.console.Console(file=out))
  monkeypatch.setattr(talked.text, "_steps", interrupted)
  if not interactive:
    with pytest.raises(KeyboardInterrupt):
      talked.run("So?")
    return
  talked.run("So?")
  ids = talked.conversation.ids
  answer = talked.conversation.messages[-1]["content"]
  assert ids == whole[: len(ids)]
  assert len(before.ids) < len(ids) < len(whole)
  assert out.getvalue() == display.visible(answer).rstrip("\ufffd") + "\n"
  assert talked.text.held == []
  assert reads(talked, "Why?") > len(ids)
  talked.conversation = before


def test_tokens_have_the_colours_of_their_origins(talked, monkeypatch):
  out = io.StringIO()
  monkeypatch.setattr(talked, "_interactive", True)
  monkeypatch.setattr(
    talked, "console", rich.console.Console(file=out, force_terminal=True)
  )
  for origin in display.STYLES:
    talked._write(origin.name, origin)
  shown = [text for text in out.getvalue().split("\x1b[") if "m" in text]
  assert len({text.partition("m")[0] for text in shown} - {"0"}) == 3


# A process of its own: jax has threads, and one that has does not fork well.
IN_TERMINAL = r"""
import os, pexpect, sys, time
seconds, *command = sys.argv[1:]
child = pexpect.spawn(
  sys.executable, ["-m", "launch.chat", *command], encoding="utf-8",
  env={**os.environ, "TERM": "xterm-256color", "NO_COLOR": ""},
  timeout=float(seconds), dimensions=(40, 200),
)
child.expect_exact("drafted by ngram(tokens=3), rule token")
child.expect("/drafter CALL, /temperature X, /reset, /quit")
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
child.sendline("/reset")
child.expect("forgotten")
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
