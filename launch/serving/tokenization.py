"""`/tokenize` and `/detokenize`, with the fields that vLLM gives them."""

from typing import Any

from launch.serving import asked_prompts, asking
from launch.serving.asking import Defaults
from launch.serving.refusals import RefusalError
from models.tokenizers import Tokenizer

_FLAGS = {
  "add_special_tokens", "add_generation_prompt", "return_token_strs",
}  # fmt: skip


def tokenize(
  body: bytes, tokenizer: Tokenizer, defaults: Defaults
) -> dict[str, Any]:
  """Ids of a `prompt`, or of `messages` by the chat template.

  Raises:
    RefusalError: for any other body.
  """
  record = asking.record_of(body)
  _check(record, {"prompt", "messages", *_FLAGS}, defaults)
  flag = lambda name, usual: asking.flag(record, name, usual)
  names = flag("return_token_strs", False)
  if "messages" in record:
    if flag("add_special_tokens", False):
      raise RefusalError(
        "a chat template has the special tokens itself",
        param="add_special_tokens",
      )
    asks = flag("add_generation_prompt", True)
    ids = asked_prompts.conversation(record, tokenizer, asks=asks)
  else:
    text, more = record.get("prompt"), flag("add_special_tokens", True)
    if not isinstance(text, str):
      raise RefusalError("prompt must be a text", param="prompt")
    ids = asked_prompts.encoded(
      lambda: tokenizer.backend.encode(text, add_special_tokens=more).ids,
      "prompt",
    )
  return {
    "count": len(ids),
    "max_model_len": defaults.max_length,
    "tokens": list(ids),
    "token_strs": [tokenizer.backend.id_to_token(i) for i in ids]
    if names
    else None,
  }


def detokenize(
  body: bytes, tokenizer: Tokenizer, defaults: Defaults
) -> dict[str, Any]:
  """The text of `tokens`, special ones by their names.

  Raises:
    RefusalError: for any other body.
  """
  record = asking.record_of(body)
  _check(record, {"tokens"}, defaults)
  ids = asked_prompts.ids(record.get("tokens"), defaults.vocab_size, "tokens")
  return {"prompt": tokenizer.backend.decode(ids, skip_special_tokens=False)}


def _check(record: dict[str, Any], known: set[str], defaults: Defaults) -> None:
  for name in record.keys() - known - {"model"}:
    raise RefusalError(f"unknown field {name[:80]!r}", param=name[:80])
  asking.check_model(record, defaults)
