"""A conversation with a pair: questions, answers, and commands between them."""

import dataclasses

import jax
import ml_collections

from launch import cli
from launch.build import drafters, pair
from launch.chatting import commands
from launch.chatting.screen import Screen
from launch.chatting.talk import Reading, Talk
from launch.chatting.turns import Conversation
from launch.tables import loss_in_words
from models import chat as templates
from specjax import intervals, random
from specjax.state import StopReason
from specjax.warp import make_sampling

# What a user can mend: one line, and the conversation goes on.
MISTAKES = (ValueError, OSError, cli.UserError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """What is known of an answer.

  Attributes:
    begins: tokens of the text before it.
    reading: what was read for it.
    num_tokens: of it.
    seconds: its rounds took.
    num_target_calls, num_drafted, num_accepted, total_variation: see
      `specjax.state.Counters`.
  """

  begins: int
  reading: Reading
  num_tokens: int
  seconds: float
  num_target_calls: int
  num_drafted: int
  num_accepted: int
  total_variation: float | None

  @property
  def tokens_per_second(self) -> float:
    """Of its rounds; what was read before it does not count."""
    return self.num_tokens / max(self.seconds, 1e-9)


class Chat:
  """A conversation.

  Attributes:
    conversation: what was said.
    pair: what answers.
    talk: its text on the device.
    last: of the last answer, or None.
  """

  def __init__(self, config: ml_collections.ConfigDict, screen: Screen):
    """Loads the pair.

    Raises:
      ValueError: if it cannot be talked with, or not here.
    """
    if config.mesh:
      raise ValueError("launch.chat runs on one device: give no config.mesh")
    config = ml_collections.ConfigDict(config.to_dict())
    self._config, self._screen = config, screen
    self._models = pair.load(config)
    self.pair = pair.assemble(config, self._models)
    self.pair.room(config.max_new_tokens)
    self.conversation = Conversation(
      tokenizer=self.pair.tokenizer, stop_tokens=self.pair.stop_tokens
    )
    # It is asked once, so that what is wrong with it is said now.
    templates.render(self.pair.tokenizer, [{"role": "user", "content": "?"}])
    self._number = 0  # of this conversation: it draws from a stream of its own
    self.last: Answer | None = None
    self._plain: Talk | None = None
    self._plain_rate: float | None = None
    self._measured: Answer | None = None  # the answer that it is of
    self.talk = self._new_talk()

  def _new_talk(self, *, plain: bool = False, **more) -> Talk:
    config = self._config
    return Talk(
      self.pair.baseline if plain else self.pair.decoder,
      self.pair.params,
      stop_tokens=self.pair.stop_tokens,
      max_length=self.pair.max_length,
      say=self._screen.passing,
      truncation=dict(
        top_k=config.top_k or None,
        top_p=config.top_p if config.top_p < 1 else None,
        min_p=config.min_p or None,
      ),
      **more,
    )

  def headline(self) -> str:
    """What answers, in one line."""
    config, drafter = self._config, self.pair.decoder.drafter
    drafted = drafter.name if self.pair.drafting.drafts else "nothing"
    return (
      f"{config.target}: drafted by {drafted}, rule "
      f"{self.pair.decoder.rule.name}, temperature {config.temperature:g}"
    )

  def run(self, line: str) -> bool:
    """Does what a line says; whether the conversation goes on.

    Raises:
      ValueError, OSError, cli.UserError: what the user can mend; nothing has
        changed then.
    """
    found = commands.parse(line)
    if found is None:
      if text := commands.message(line):
        self.answer(text)
      return True
    name, rest = found
    if name == "quit":
      return False
    getattr(self, f"_{name}")(rest)
    return True

  def answer(self, text: str) -> None:
    """Asks, shows the answer as it comes, and keeps both."""
    turn = self.conversation.ask(text)
    config = self._config
    reading = self.talk.read(
      turn.ids,
      max_new_tokens=config.max_new_tokens,
      temperature=config.temperature,
      key=self._key(),
    )
    if reading.why and turn.anew:
      reading = dataclasses.replace(reading, why=turn.anew)
    ids = self._screen.answer(self.pair.tokenizer, self.talk.rounds(), turn.ids)
    self.conversation = self.conversation.answered(turn, ids)
    self.last = None
    state = self.talk.state()
    if state is None:  # broken off in the middle of a round
      return
    counters, reason = jax.device_get((state.counters, state.stop_reason))
    self.last = Answer(
      begins=len(turn.ids),
      reading=reading,
      num_tokens=len(ids),
      seconds=self.talk.seconds,
      num_target_calls=int(counters.num_target_calls[0]),
      num_drafted=int(counters.num_drafted[0]),
      num_accepted=int(counters.num_accepted[0]),
      total_variation=intervals.known(counters.total_variation[0]),
    )
    self._screen.note(self._speed(self.last))
    self._say_why_it_ended(StopReason(int(reason[0])))

  def _key(self) -> jax.Array:
    seed = jax.random.key(self._config.seed)
    return random.row_keys(seed, jax.numpy.array([self._number]))[0]

  def _say_why_it_ended(self, reason: StopReason) -> None:
    if reason == StopReason.NAN_LOGITS:
      raise ValueError("the model's numbers are none (NaN): the answer ended")
    if reason == StopReason.LENGTH:
      if len(self.talk.held) < self.pair.max_length:
        self._screen.note(
          f"(cut at {self._config.max_new_tokens} tokens, which "
          "--config.max_new_tokens of the command sets)"
        )
      else:
        raise ValueError(
          f"the context of {self.pair.max_length} tokens is full, and the "
          "answer was cut: /reset begins a new conversation"
        )

  def _speed(self, last: Answer) -> str:
    """The line after an answer."""
    parts = [
      f"{last.num_tokens} token{'s' if last.num_tokens != 1 else ''}",
      f"{last.tokens_per_second:.1f} a second",
    ]
    if last.num_target_calls:
      each = last.num_tokens / last.num_target_calls
      parts.append(f"{each:.2f} a target call")
    return ", ".join([*parts, *self._speedup(last)])

  def _speedup(self, last: Answer) -> list[str]:
    """The speed-up of an answer if it was measured, and what was lost."""
    rule = self.pair.decoder.rule
    if not self.pair.drafting.drafts:
      return ["plain decoding"]
    away = last.total_variation
    loss = loss_in_words(
      rule.name,
      rule.lossless,
      None if away is None else away / max(last.num_tokens, 1),
    )
    if self._plain_rate is None or self._measured is not last:
      return [] if rule.lossless else [loss]
    speedup = last.tokens_per_second / self._plain_rate
    return [f"speed-up {speedup:.2f}", loss]

  def _plain_is_old(self) -> bool:
    """Whether plain decoding was measured on smaller or larger caches."""
    plain = self._plain
    return not plain or plain.buffer_length != self.talk.buffer_length

  # --------------------------------------------------------------- commands

  def _help(self, rest: str) -> None:
    del rest
    self._screen.note(commands.help_text())

  def _temperature(self, rest: str) -> None:
    try:
      value = float(rest)
    except ValueError:
      raise ValueError(f"/temperature takes a number, got {rest!r}") from None
    make_sampling(1, temperature=value)
    self._config.temperature = value
    self._screen.note(f"temperature {value:g}")

  def _rule(self, rest: str) -> None:
    self._change(rule=rest)

  def _drafter(self, rest: str) -> None:
    self._change(drafter=rest)

  def _change(self, **settings: str) -> None:
    """Another pair for the same conversation.

    Raises:
      ValueError, OSError, cli.UserError: hints name what can be typed here.
    """
    try:
      self._become(**settings)
    except (ValueError, cli.UserError) as error:
      raise ValueError(commands.here(str(error))) from error

  def _become(self, **settings: str) -> None:
    config = ml_collections.ConfigDict(self._config.to_dict())
    config.update(settings)
    models = self._models
    if drafters.of(config).checkpoint != self.pair.drafting.checkpoint:
      models = pair.load(config, beside=models)
    made = pair.assemble(config, models)
    self._config, self._models, self.pair = config, models, made
    (what,) = settings
    self.talk = self._new_talk(because=f"the {what} is another")
    self.last = None
    self._screen.note(self.headline())

  def _system(self, rest: str) -> None:
    self.conversation = self.conversation.with_system(rest)
    self._screen.note("the system says that" if rest else "no system message")

  def _reset(self, rest: str) -> None:
    del rest
    self.conversation = self.conversation.begun_anew()
    self._number += 1
    self.last = None
    self.talk.forget()
    self._screen.note("forgotten")

  def _stats(self, rest: str) -> None:
    del rest
    lines, last = [self.headline()], self.last
    lines.append(
      f"context: {len(self.talk.held)} of {self.pair.max_length} tokens, "
      f"caches for {self.talk.buffer_length}"
    )
    if last is None:
      self._screen.note("\n".join([*lines, "no answer yet"]))
      return
    read = last.reading
    lines.append(
      f"read: all {read.read} tokens, because {read.why}"
      if read.why
      else f"read: {read.read} new tokens after {read.kept} that were kept"
    )
    self._measure_plain(last)
    lines.append(f"last answer: {self._speed(last)}")
    if last.num_drafted:
      lines.append(
        f"accepted: {last.num_accepted} of {last.num_drafted} drafted tokens "
        f"({last.num_accepted / last.num_drafted:.0%})"
      )
    if self._plain_rate and self._measured is last:
      lines.append(
        f"plain decoding after the same text: {self._plain_rate:.1f} tokens a "
        "second"
      )
    self._screen.note("\n".join(lines))

  def _measure_plain(self, last: Answer) -> None:
    """Decodes as many tokens plainly after the same text, and times them."""
    if not (last.num_tokens and self.pair.drafting.drafts):
      return
    if len(self.talk.held) < last.begins:  # it was given up while reading
      return
    if self._plain is None or self._plain_is_old():
      self._plain = self._new_talk(
        plain=True, first_buffer=self.talk.buffer_length
      )
    self._plain.read(
      self.talk.held[: last.begins],
      max_new_tokens=last.num_tokens,
      temperature=self._config.temperature,
      key=self._key(),
    )
    written = sum(len(new) for new in self._plain.rounds())
    self._plain_rate = written / max(self._plain.seconds, 1e-9)
    self._measured = last
