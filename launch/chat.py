r"""A conversation with a chat model in the terminal, decoded speculatively.

  python -m launch.tools.fetch_smollm2
  python -m launch.chat --config=configs/smollm2.py
  echo "What is 2+2?" | python -m launch.chat --config=configs/smollm2.py
  python -m launch.chat --config=configs/huggingface.py:target=DIR \
    --config.drafter='model("DRAFT")' --system_message="Be brief."

DIR is a model with a chat template. Tokens appear as they are accepted, in the
colors of launch.decode; the line after an answer says how fast it came. The
caches keep the conversation: a question is read with what was said before only
where the template or the tokenizer write that in other tokens. Commands:

  /temperature X  of the answers from now on; 0 is greedy
  /reset          forgets what was said
  /help           lists the commands
  /quit           ends, as Ctrl-D does; Ctrl-C ends an answer

Piped, every line is a message or a command, and answers alone go to stdout;
exit code 2: a line was refused (said on stderr), and the others were answered.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator

import jax
import ml_collections
import numpy as np
import rich.console
import rich.text
from absl import flags

from launch import cli, display
from launch.assembly import pair, registry
from launch.stops import Detokenizer
from models import chat as templates
from specjax import random
from specjax.state import DecodeState, Origin, StopReason
from specjax.types import Sampling
from specjax.warp import make_sampling

cli.reads(cli.CONFIG)
_SYSTEM_MESSAGE = flags.DEFINE_string(
  "system_message", None, "What the system says before the conversation."
)

_COMMANDS = "/temperature X, /reset, /help, /quit"
# What is read at once is padded to a power of two, of at least so many tokens.
_SMALLEST = 16
# The first buffer; later ones are twice as long. A round reads all of it.
_FIRST_BUFFER = 1024


def _power_of_two(count: int) -> int:
  return 1 << (max(count, _SMALLEST) - 1).bit_length()


class Cache:
  """A text on the device with its caches, which rounds continue.

  Attributes:
    held: the text.
    state: its caches, as of the last round; None if there are none.
  """

  def __init__(self, models: pair.Pair, say: Callable[[str], None]):
    """An empty one, which says what it compiles."""
    self.held: list[int] = []
    self.state: DecodeState | None = None
    self._say, self._shapes = say, set[tuple]()
    self._pair, decoder = models, models.decoder
    self._init = jax.jit(
      functools.partial(decoder.init, stop_tokens=models.stop_tokens),
      static_argnames="buffer_length",
    )
    self._extend = jax.jit(decoder.extend, donate_argnums=1)
    self._steps = jax.jit(decoder.steps, donate_argnums=1)

  def read(
    self, ids: list[int], *, max_new_tokens: int, sampling: Sampling, key
  ) -> int:
    """Sets the text to continue; what is held of it is not read again."""
    longest, room, kept = self._pair.max_length, 0, []
    if len(ids) >= longest:
      raise ValueError(
        f"the conversation would have {len(ids)} tokens, and there is room for "
        f"{longest}: /reset begins a new one"
      )
    budget = min(max_new_tokens, longest - len(ids))
    need = len(ids) + budget
    if self.state is not None:
      room, kept = self._pair.decoder.buffer_length(self.state), self.held
    if need > room or ids[: len(kept)] != kept or len(ids) == len(kept):
      kept, self.state = [], None
      room = min(_power_of_two(max(need, _FIRST_BUFFER, room)), longest)
    more = ids[len(kept) :]
    width = min(_power_of_two(len(more)), room - bool(kept))
    if (shape := (bool(kept), width, room)) not in self._shapes:
      self._shapes.add(shape)
      self._say(f"compiling for {width} tokens in a context of {room} ...")
    tokens = np.pad(np.array(more, np.int32), (0, width - len(more)))
    params = self._pair.params
    how = dict(max_new_tokens=np.int32(budget), sampling=sampling)
    # Caches are donated: they are gone if anything breaks off.
    state, self.state = self.state, None
    if kept:
      state = self._extend(
        params, state, np.int32(0), tokens, np.int32(len(more)), **how
      )
    else:
      state = self._init(
        params, tokens[None], np.array([len(more)]), key[None],
        buffer_length=room, **how,
      )  # fmt: skip
    # So that what compiles does so before the answer's first token.
    self.state = jax.block_until_ready(self._steps(params, state, np.int32(0)))
    self.held = ids
    return len(more)

  def rounds(self) -> Iterator[tuple[int, Origin]]:
    """Continues: the tokens of one round after the other, and their origins."""
    reason = StopReason.RUNNING
    while reason == StopReason.RUNNING:
      state, self.state = self.state, None
      self.state = state = self._steps(self._pair.params, state, np.int32(1))
      tokens, origins, (length,), (reason,) = jax.device_get(
        (state.tokens, state.origins, state.length, state.stop_reason)
      )
      new = slice(len(self.held), int(length))
      self.held = tokens[0, : new.stop].tolist()
      yield from zip(
        self.held[new], map(Origin, origins[0, new].tolist()), strict=True
      )


class Chat:
  """A conversation with a pair.

  Attributes:
    messages: what was said, as templates read it.
    cache: the conversation on the device.
    pair: the models that answer.
  """

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    *,
    system: str | None = None,
    interactive: bool = False,
  ):
    """Loads the pair."""
    if config.mesh:
      raise ValueError("launch.chat runs on one device: give no config.mesh")
    drafting = registry.of(config)
    if drafting.lengths or drafting.learning:
      raise ValueError("launch.chat drafts without ladder and online")
    self.console = rich.console.Console(
      stderr=not interactive, highlight=False, markup=False
    )
    self._interactive = interactive
    self._config = ml_collections.ConfigDict(config.to_dict())
    self.pair = pair.build(self._config)
    self.pair.room(config.max_new_tokens)
    self.cache = Cache(self.pair, self.note)
    self._begun = [{"role": "system", "content": system}] if system else []
    self.messages = self._begun
    # It is asked once, so that what is wrong with the template is said now.
    question = {"role": "user", "content": "?"}
    templates.render(self.pair.tokenizer, [*self._begun, question])
    self._number = 0  # each conversation draws from a stream of its own

  def run(self, line: str) -> bool:
    """Obeys or answers a line; False ends the conversation."""
    match line.split():
      case []:
        pass
      case ["/quit"]:
        return False
      case ["/help"]:
        self.note(_COMMANDS)
      case ["/reset"]:
        self.messages = self._begun
        self._number += 1
        self.note("forgotten")
      case ["/temperature", text]:
        make_sampling(1, temperature=float(text))
        self._config.temperature = float(text)
        self.note(f"temperature {text}")
      case [word, *_] if word.startswith("/"):
        raise ValueError(
          f"no command {line.strip()}: there are {_COMMANDS} (a message that "
          "begins with a slash has a blank before it)"
        )
      case _:
        self.answer(line)
    return True

  def answer(self, text: str) -> None:
    """Asks a question, streams the answer, and keeps both."""
    config, tokenizer = self._config, self.pair.tokenizer
    asked = [*self.messages, {"role": "user", "content": text}]
    before = templates.encode(tokenizer, asked)
    self.cache.read(
      before,
      max_new_tokens=config.max_new_tokens,
      sampling=make_sampling(
        1,
        temperature=config.temperature,
        top_k=config.top_k or None,  # a filter that is off costs nothing
        top_p=config.top_p if config.top_p < 1 else None,
        min_p=config.min_p or None,
      ),
      key=random.row_keys(
        jax.random.key(config.seed), jax.numpy.array([self._number])
      )[0],
    )
    detokenizer, ids = Detokenizer(tokenizer, before), list[int]()
    start = time.perf_counter()
    try:
      for token, origin in self.cache.rounds():
        ids.append(token)
        self._write(detokenizer.add(token), origin)
    except KeyboardInterrupt:  # what was written stays, and is read again
      if not self._interactive:
        raise
    self._write(detokenizer.rest() + "\n", Origin.BONUS)
    said = tokenizer.decode(ids, after=before)
    self.messages = [*asked, {"role": "assistant", "content": said}]
    if self.cache.state is not None:  # else it was interrupted
      self._tell_end(len(ids), time.perf_counter() - start)

  def _tell_end(self, count: int, seconds: float) -> None:
    """Says how fast an answer was, and what cut it."""
    counters, (reason,) = jax.device_get(
      (self.cache.state.counters, self.cache.state.stop_reason)
    )
    parts = [f"{count} tokens", f"{count / seconds:.1f} a second"]
    if calls := int(counters.num_target_calls[0]):
      parts.append(f"{count / calls:.2f} a target call")
    if len(self.cache.held) >= self.pair.max_length:
      parts.append("the context is full: /reset begins a new conversation")
    elif reason == StopReason.LENGTH:
      parts.append("cut at --config.max_new_tokens")
    self.note(", ".join(parts))
    if reason == StopReason.NAN_LOGITS:
      raise ValueError("the model's logits are NaN: the answer ended")

  def _write(self, text: str, origin: Origin) -> None:
    if self._interactive:
      shown = rich.text.Text(display.visible(text), display.STYLES[origin])
      self.console.print(shown, end="", soft_wrap=True)
    else:
      sys.stdout.write(text)
      sys.stdout.flush()

  def note(self, text: str) -> None:
    """Shows something beside the answers; on stderr where they are piped."""
    self.console.print(rich.text.Text(text, style="dim"), soft_wrap=True)


def lines(interactive: bool) -> Iterator[str]:
  """Typed or piped lines; Ctrl-C gives up a line that is being typed."""
  if not interactive:
    yield from sys.stdin
    return
  with contextlib.suppress(ImportError):
    import readline  # noqa: F401  `input` then edits, and remembers
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
