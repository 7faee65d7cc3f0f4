r"""A conversation with a chat model in the terminal, decoded speculatively.

  python -m launch.tools.fetch_smollm2
  python -m launch.chat --config=configs/smollm2.py
  echo "What is 2+2?" | python -m launch.chat --config=configs/smollm2.py
  python -m launch.chat --config=configs/huggingface.py:target=DIR \
    --config.drafter='model("DRAFT")' --system_message="Be brief."

DIR is a model with a chat template. Tokens appear as they are accepted, in the
colours of launch.decode; the line after an answer says how fast it came. The
caches keep the conversation, and only what is new is read, unless the model's
template rewrites what was said. Commands are

  /drafter CALL   drafts by CALL, as ngram(tokens=8); the conversation stays
  /temperature X  of the answers from now on; 0 takes the likeliest token
  /reset          forgets what was said
  /quit           ends, as Ctrl-D does; Ctrl-C ends an answer

A line that ends in a backslash goes on in the next. Piped, every line is a
message or a command, the answers alone go to stdout, and exit code 2 says that
a line was refused (said on stderr); the others are answered all the same.
"""

import contextlib
import sys
from collections.abc import Iterator

import jax
import ml_collections
import rich.console
import rich.text
from absl import flags

from launch import cli, display
from launch.assembly import pair, registry
from launch.conversation import CachedText, Conversation
from launch.report import loss_in_words
from launch.stops import Detokenizer
from models import chat as templates
from specjax import intervals, random, suggestions
from specjax.state import Origin, StopReason
from specjax.warp import make_sampling

cli.reads(cli.CONFIG)
_SYSTEM_MESSAGE = flags.DEFINE_string(
  "system_message", None, "What the system says before the conversation."
)

_COMMANDS = ("/drafter CALL", "/temperature X", "/reset", "/quit")


class Chat:
  """A conversation with a pair.

  Attributes:
    conversation: the messages so far.
    pair: the models that answer.
    text: the conversation on the device.
    console: where all but piped answers goes.
  """

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    *,
    system: str | None = None,
    interactive: bool = False,
  ):
    """Loads the pair.

    Raises:
      ValueError: if it cannot be talked with, or not here.
    """
    if config.mesh:
      raise ValueError("launch.chat runs on one device: give no config.mesh")
    stream = sys.stdout if interactive else sys.stderr
    self.console = rich.console.Console(
      file=stream, highlight=False, markup=False
    )
    self._interactive = interactive
    self._config = ml_collections.ConfigDict(config.to_dict())
    self._models = pair.load(self._config)
    self.pair = pair.assemble(self._config, self._models)
    self.pair.room(config.max_new_tokens)
    self.text = self._new_text()
    said = ({"role": "system", "content": system},) if system else ()
    self._begun = self.conversation = Conversation(
      tokenizer=self.pair.tokenizer, stop_tokens=self.pair.stop_tokens,
      messages=said,
    )  # fmt: skip
    # It is asked once, so that what is wrong with it is said now.
    templates.render(self.pair.tokenizer, self._begun.ask("?").messages)
    self._number = 0  # each conversation draws from a stream of its own

  def _new_text(self) -> CachedText:
    status = lambda text: self.console.status(text, spinner_style="dim")
    return CachedText(
      self.pair.decoder, self.pair.params,
      stop_tokens=self.pair.stop_tokens, max_length=self.pair.max_length,
      waiting=status if self._interactive else contextlib.nullcontext,
    )  # fmt: skip

  def headline(self) -> str:
    """Models and settings in a line, and a line for each model in few bits."""
    config, rule = self._config, self.pair.decoder.rule.name
    who = (
      f"{config.target}: drafted by {registry.canonical(config)}, rule {rule}, "
      f"temperature {config.temperature:g}"
    )
    return "\n".join([who, *self.pair.notes])

  def run(self, line: str) -> bool:
    """Obeys or answers a line; False ends the conversation.

    Raises:
      ValueError, OSError, cli.UserError: what the user can mend; nothing has
        changed then, but that an answer was cut.
    """
    match line.split(maxsplit=1):
      case []:
        pass
      case ["/quit"]:
        return False
      case ["/reset"]:
        self.conversation = self._begun
        self.text.forget()
        self._number += 1
        self.note("forgotten")
      case ["/temperature", text]:
        try:
          value = float(text)
        except ValueError:
          raise ValueError(f"/temperature takes a number, got {text}") from None
        make_sampling(1, temperature=value)
        self._config.temperature = value
        self.note(f"temperature {value:g}")
      case ["/drafter", call]:
        self._draft_by(call.strip())
      case [word, *_] if line.startswith("/"):
        names = [command.split()[0] for command in _COMMANDS]
        guess = "" if word in names else suggestions.guess(word, names)
        raise ValueError(
          f"no command {line.strip()}{guess}: there are {', '.join(_COMMANDS)} "
          "(a message that begins with a slash has a blank before it)"
        )
      case _:
        self.answer(line)
    return True

  def _draft_by(self, call: str) -> None:
    config = ml_collections.ConfigDict(self._config.to_dict())
    config.drafter, models = call, self._models
    if registry.of(config).loaded != self.pair.drafting.loaded:
      models = pair.load(config, beside=models)
    made = pair.assemble(config, models)
    self._config, self._models, self.pair = config, models, made
    self.text = self._new_text()
    self.note(self.headline())

  def answer(self, text: str) -> None:
    """Asks a question, streams the answer, and keeps both."""
    config, asked = self._config, self.conversation.ask(text)
    seed = jax.random.key(config.seed)
    self.text.read(
      asked.ids,
      max_new_tokens=config.max_new_tokens,
      sampling=make_sampling(
        1,
        temperature=config.temperature,
        top_k=config.top_k or None,
        top_p=config.top_p if config.top_p < 1 else None,
        min_p=config.min_p or None,
      ),
      key=random.row_keys(seed, jax.numpy.array([self._number]))[0],
    )
    detokenizer, ids = Detokenizer(self.pair.tokenizer, asked.ids), list[int]()
    try:
      for new in self.text.rounds():
        for token, origin in new:
          ids.append(token)
          self._write(detokenizer.add(token), origin)
    except KeyboardInterrupt:  # what was written stays, and is read again
      if not self._interactive:
        raise
    self._write(detokenizer.rest() + "\n", Origin.BONUS)
    self.conversation = asked.answered(ids)
    state = self.text.state
    if state is None:  # broken off in the middle of a round
      return
    counters, reason = jax.device_get((state.counters, state.stop_reason))
    self.note(self._speed(len(ids), counters))
    if reason[0] == StopReason.NAN_LOGITS:
      raise ValueError("the model's numbers are none (NaN): the answer ended")
    if reason[0] == StopReason.LENGTH:
      if len(self.text.held) >= self.pair.max_length:
        raise ValueError(
          f"the context of {self.pair.max_length} tokens is full, and the "
          "answer was cut: /reset begins a new conversation"
        )
      self.note(
        f"(cut at {config.max_new_tokens} tokens, which "
        "--config.max_new_tokens of the command sets)"
      )

  def _write(self, text: str, origin: Origin) -> None:
    if self._interactive:
      shown = rich.text.Text(display.visible(text), display.STYLES[origin])
      self.console.print(shown, end="", soft_wrap=True)
    else:
      sys.stdout.write(text)
      sys.stdout.flush()

  def _speed(self, count: int, counters) -> str:
    """The line after an answer of so many tokens."""
    rate = count / max(self.text.seconds, 1e-9)
    parts = [f"{count} token{'s' * (count != 1)}", f"{rate:.1f} a second"]
    rule = self.pair.decoder.rule
    if calls := int(counters.num_target_calls[0]):
      parts.append(f"{count / calls:.2f} a target call")
    if not self.pair.drafting.drafts:
      parts.append("plain decoding")
    elif not rule.lossless:
      away = intervals.known(counters.total_variation[0])
      away = None if away is None else away / max(count, 1)
      parts.append(loss_in_words(rule.name, False, away))
    return ", ".join(parts)

  def note(self, text: str) -> None:
    """Shows something beside the answers; on stderr where they are piped."""
    self.console.print(rich.text.Text(text, style="dim"), soft_wrap=True)


def lines(interactive: bool) -> Iterator[str]:
  """Typed or piped lines; one that ends in a backslash goes on in the next."""
  if interactive:
    with contextlib.suppress(ImportError):
      import readline  # noqa: F401  `input` then edits, and remembers
  else:
    with contextlib.suppress(AttributeError):  # not a real stdin
      sys.stdin.reconfigure(encoding="utf-8", errors="replace")
  begun = ""
  while True:
    try:
      if interactive:
        line = input("… " if begun else "> ")
      elif not (line := sys.stdin.readline()):
        raise EOFError
    except KeyboardInterrupt:  # the line is given up
      if not interactive:
        raise
      print()
      continue
    except EOFError:
      if begun:
        yield begun.removesuffix("\n")
      return
    # What is typed may be no UTF-8.
    line = line.rstrip("\r\n").encode("utf-8", "replace").decode()
    if line.endswith("\\"):
      begun += line[:-1] + "\n"
    else:
      yield begun + line
      begun = ""


def run(_) -> int:
  """The command."""
  interactive = sys.stdin.isatty() and sys.stdout.isatty()
  chat = Chat(
    cli.CONFIG.value, system=_SYSTEM_MESSAGE.value, interactive=interactive
  )
  if interactive:
    chat.note(f"{chat.headline()}\n{', '.join(_COMMANDS)}")
    display.show_legend(chat.console)
  code = 0
  for line in lines(interactive):
    try:
      if not chat.run(line):
        break
    except KeyboardInterrupt:  # while it was read
      if not interactive:
        raise
      chat.note("interrupted")
    except (ValueError, OSError, cli.UserError) as error:
      message = " ".join(str(error).split())
      print(f"error: {message}", file=sys.stderr, flush=True)
      code = 0 if interactive else 2
  return code


if __name__ == "__main__":
  cli.run(run)
