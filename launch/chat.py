r"""Chats with a model in the terminal, decoding speculatively.

  python -m launch.tools.fetch_smollm2
  python -m launch.chat --config=configs/smollm2.py
  echo "What is 2+2?" | python -m launch.chat --config=configs/smollm2.py
  python -m launch.chat --config=configs/huggingface.py:target=DIR \
    --config.drafter='model("DRAFT")' --system_message="Be brief."

DIR is a model with a chat template. Tokens appear as they are accepted, in the
colors of launch.decode; a line after each answer reports its speed. Each
question is answered with the whole conversation as context. Commands:

  /temperature X  for the next answers; 0 is greedy
  /reset          starts a new conversation
  /help           lists the commands
  /quit           quits, as Ctrl-D does; Ctrl-C ends an answer

With piped input, every line is a message or a command, and only answers go to
stdout. Exit code 2: a line was rejected (see stderr); the others were answered.
"""

import contextlib
import sys
import time
from collections.abc import Iterator

import jax
import ml_collections
import rich.console
import rich.text
from absl import flags

from launch import cli, display
from launch.assembly import pair, registry
from launch.prompts import Prompt
from launch.stops import Detokenizer
from models import chat as templates
from specjax.runtime.requests import Batch, Settings
from specjax.state import DecodeState, Origin, StopReason
from specjax.warp import make_sampling

cli.reads(cli.CONFIG)
_SYSTEM_MESSAGE = flags.DEFINE_string(
  "system_message", None, "The system message of the conversation."
)

_COMMANDS = "/temperature X, /reset, /help, /quit"
# Texts are padded to a power of two, at least this: each width is compiled.
_SMALLEST = 256


class Chat:
  """A conversation with a pair.

  Attributes:
    messages: the conversation so far, in the format of chat templates.
    pair: the models.
    engine: decodes the answers.
  """

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    *,
    system: str | None = None,
    interactive: bool = False,
  ):
    """Loads the pair."""
    self.console = rich.console.Console(
      stderr=not interactive, highlight=False, markup=False
    )
    self._interactive = interactive
    config.batch_size = 1
    self.pair = pair.build(config)
    self.engine = pair.engine_of(config, self.pair)
    self._room = self.pair.room(config.max_new_tokens)
    self._temperature = config.temperature
    self._initial = [{"role": "system", "content": system}] if system else []
    self.messages = self._initial
    # Render once, so that a broken template fails now.
    question = {"role": "user", "content": "?"}
    templates.render(self.pair.tokenizer, [*self._initial, question])
    self._number = 0  # each conversation has its own random stream

  def run(self, line: str) -> bool:
    """Handles a command or a message; returns False to quit."""
    match line.split():
      case []:
        pass
      case ["/quit"]:
        return False
      case ["/help"]:
        self.note(_COMMANDS)
      case ["/reset"]:
        self.messages = self._initial
        self._number += 1
        self.note("new conversation")
      case ["/temperature", text]:
        make_sampling(1, temperature=float(text))
        self._temperature = float(text)
        self.note(f"temperature {text}")
      case [word, *_] if word.startswith("/"):
        raise ValueError(
          f"unknown command {line.strip()}: use {_COMMANDS} (or put a space "
          "before a message that begins with a slash)"
        )
      case _:
        self.answer(line)
    return True

  def answer(self, text: str) -> None:
    """Asks a question, streams the answer, and keeps both."""
    tokenizer = self.pair.tokenizer
    messages = [*self.messages, {"role": "user", "content": text}]
    before = templates.encode(tokenizer, messages)
    if len(before) > self._room:
      raise ValueError(
        f"the conversation would have {len(before)} tokens, but only "
        f"{self._room} fit with an answer: /reset begins a new one"
      )
    prompt = Prompt(
      stream=self._number, id=0, text="", token_ids=tuple(before),
      settings=Settings(temperature=self._temperature),
    )  # fmt: skip
    width = 1 << (max(len(before), _SMALLEST) - 1).bit_length()
    batch = Batch(prompts=(prompt,), rows=1, width=min(width, self._room))
    if (seconds := self.engine.compile(batch)) > 1:
      self.note(f"compiled for {batch.width} tokens in {seconds:.0f} s")
    detokenizer, ids = Detokenizer(tokenizer, before), list[int]()
    start, end = time.perf_counter(), "interrupted"
    state = self.engine.prefill(batch)
    try:
      while jax.device_get(state.stop_reason)[0] == StopReason.RUNNING:
        state = self.engine.generate(batch, state, 1)
        new = slice(len(before) + len(ids), int(state.length[0]))
        tokens, origins = jax.device_get((state.tokens, state.origins))
        for token, origin in zip(tokens[0, new], origins[0, new], strict=True):
          ids.append(int(token))
          self._write(detokenizer.add(ids[-1]), Origin(origin))
      end = self._end(state, len(ids), time.perf_counter() - start)
    except KeyboardInterrupt:  # keep what was written
      if not self._interactive:
        raise
    self._write(detokenizer.rest() + "\n", Origin.BONUS)
    reply = tokenizer.decode(ids, after=before)
    self.messages = [*messages, {"role": "assistant", "content": reply}]
    self.note(end)
    if end.endswith("NaN"):
      raise ValueError("the model's logits are NaN: the answer ended")

  def _end(self, state: DecodeState, count: int, seconds: float) -> str:
    """Reports how fast an answer was and why it was cut, if it was."""
    (calls,), (reason,) = jax.device_get(
      (state.counters.num_target_calls, state.stop_reason)
    )
    end = f"{count} tokens, {count / seconds:.1f} per second, "
    end += f"{count / max(calls, 1):.2f} per target call"
    if reason == StopReason.LENGTH:
      end += ", cut at --config.max_new_tokens"
    if reason == StopReason.NAN_LOGITS:
      end += ": the model's logits are NaN"
    return end

  def _write(self, text: str, origin: Origin) -> None:
    if self._interactive:
      shown = rich.text.Text(display.visible(text), display.STYLES[origin])
      self.console.print(shown, end="", soft_wrap=True)
    else:
      sys.stdout.write(text)
      sys.stdout.flush()

  def note(self, text: str) -> None:
    """Shows a note; on stderr if answers are piped."""
    self.console.print(rich.text.Text(text, style="dim"), soft_wrap=True)


def lines(interactive: bool) -> Iterator[str]:
  """Yields typed or piped lines; Ctrl-C discards the line being typed."""
  if not interactive:
    yield from sys.stdin
    return
  with contextlib.suppress(ImportError):
    import readline  # noqa: F401  gives `input` editing and history
  while True:
    try:
      yield input("> ")
    except KeyboardInterrupt:
      print()
    except EOFError:
      return


def run(_) -> int:
  """The command."""
  interactive = sys.stdin.isatty() and sys.stdout.isatty()
  chat = Chat(
    cli.CONFIG.value, system=_SYSTEM_MESSAGE.value, interactive=interactive
  )
  if interactive:
    drafter = registry.canonical(cli.CONFIG.value)
    chat.note(f"drafted by {drafter}, rule {chat.pair.decoder.rule.name}")
    chat.note("\n".join([*chat.pair.notes, _COMMANDS]))
    display.show_legend(chat.console)
  code = 0
  for line in lines(interactive):
    try:
      # What is typed may not be UTF-8.
      if not chat.run(line.rstrip("\r\n").encode("utf-8", "replace").decode()):
        break
    except ValueError as error:
      cli.fail(str(error))
      code = 0 if interactive else 2
    except KeyboardInterrupt:  # while the question was read
      if not interactive:
        raise
      chat.note("interrupted")
  return code


if __name__ == "__main__":
  cli.run(run)
