"""Incremental text of a completion: whole characters, without stop strings.

Text that may still change is held back: the first bytes of a character, and
whatever may begin a stop string.
"""

from collections.abc import Sequence

from launch import stops
from models.tokenizers import Tokenizer


class Reader:
  """The text of one completion. Together its pieces are `stops.text_of`'s.

  Attributes:
    token_ids: of the completion so far.
    sent: the text that was given out.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    stop: Sequence[str] = (),
    before: Sequence[int] = (),
  ):
    """Nothing is read yet.

    Args:
      tokenizer: of the pair.
      stop: texts before the first of which the text ends.
      before: tokens of what is completed.
    """
    self._tokenizer, self._stop = tokenizer, tuple(stop)
    self._before = tuple(before)
    self._text = stops.Detokenizer(tokenizer, before)
    self._whole = ""  # characters that are
    self.token_ids: list[int] = []
    self.sent = ""

  def read(self, token_ids: Sequence[int]) -> str:
    """Takes tokens; the text that is certain with them, perhaps none."""
    self.token_ids += token_ids
    for token in token_ids:
      self._whole += self._text.add(token)
    end = len(self._whole) - self._begun(self._whole)
    return self._give(self._whole[:end])

  def finish(self, *, cut: bool) -> str:
    """The rest of the text.

    Args:
      cut: whether a stop string ended it.
    """
    text = self._tokenizer.decode(self.token_ids, after=self._before)
    return self._give(stops.before(text, self._stop) if cut else text)

  def _begun(self, text: str) -> int:
    """Characters at the end of a text that a stop string may begin with."""
    most = len(text) - len(stops.before(text, self._stop))
    for stop in () if most else self._stop:  # or it is about to end there
      for count in range(min(len(stop) - 1, len(text)), most, -1):
        if text.endswith(stop[:count]):
          most = count
          break
    return most

  def _give(self, text: str) -> str:
    new = text[len(self.sent) :]
    self.sent += new
    return new
