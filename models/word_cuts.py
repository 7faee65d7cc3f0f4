"""Pre-tokenisation of byte-level BPEs: the regular expressions that cut words.

A cut has the name that llama.cpp gives it, after the model that first did so,
and is what that model's own `tokenizer.json` says: expressions that cut text
one after the other. "default" is llama.cpp's own.
"""

from collections.abc import Mapping, Sequence

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = _CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + _WORD + r"|\p{N}" + _REST
_UPPER, _LOWER = (
  r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
  r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
)
_TEKKEN = (
  rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
  rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
  r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
  rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
  rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
  r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = (
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
  r"|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
  r"\p{N}{1,3}",
  "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # of Chinese and Japanese
  r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
  r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
CUTS: Mapping[str, Sequence[str]] = {
  "default": (
    r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]",
  ),
  "dbrx": (_LLAMA3,),
  "deepseek-v3": _DEEPSEEK3,
  "glm4": (_LLAMA3,),
  "gpt-2": (_GPT2,),
  "gpt-4o": (_GPT4O,),
  "llama-bpe": (_LLAMA3,),
  "mpt": (_GPT2,),
  "olmo": (_GPT2,),
  "qwen2": (_QWEN2,),
  "smollm": (r"\p{N}", _GPT2),
  "starcoder": (r"\p{N}", _GPT2),
  "tekken": (_TEKKEN,),
}  # fmt: skip
