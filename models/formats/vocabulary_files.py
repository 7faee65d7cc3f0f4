"""Files of a tokenizer beside `tokenizer.json`, or in its place.

`tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json` name
special and added tokens; `vocab.json` and `merges.txt` are a byte-level BPE,
whose class says how it cuts words. They are read as transformers reads them.
"""

import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tokenizers as hf
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from models.formats import json_files
from models.word_cuts import CUTS

_NAMED = (
  "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
  "mask_token",
)  # fmt: skip
_LISTS = ("additional_special_tokens", "extra_special_tokens")
# What is named where a config of these classes names nothing.
_END = "<|endoftext|>"
_GPT2 = {"unk_token": _END, "bos_token": _END, "eos_token": _END}
_DEFAULTS: Mapping[str, Mapping[str, str]] = {
  "CodeGen": _GPT2,
  "GPT2": _GPT2,
  "Qwen2": {"unk_token": _END, "eos_token": _END, "pad_token": _END},
}
# The class of a model whose tokenizer's files name none.
_MODELS = {
  **dict.fromkeys(
    ("codegen", "gpt2", "gpt_neo", "gptj", "opt", "phi", "starcoder2"), "GPT2"
  ),
  **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2"),
}


def read_config(path: pathlib.Path) -> dict[str, Any]:
  """Contents of `tokenizer_config.json`, completed from older files.

  `special_tokens_map.json` overrides a config that does not list the added
  tokens, and `added_tokens.json` is its list where there is no
  `tokenizer.json`; other configs are complete.

  Args:
    path: of the checkpoint's directory.

  Returns:
    The config; `name_in` has the names of its tokens, and
    "added_tokens_decoder" an object for every added token, by its id.

  Raises:
    ValueError: for files that are none.
  """
  config = dict(_read(path / "tokenizer_config.json"))
  config = {**_DEFAULTS.get(_kind(path, config), {}), **config}
  if "added_tokens_decoder" not in config:
    config |= _read(path / "special_tokens_map.json")
    config["added_tokens_decoder"] = _listed(path, config)
  for key in ("bos_token", "eos_token"):
    name = name_in(config, key)
    if not isinstance(name, str | None):
      raise ValueError(f"{key} in {path} must be a string, got {name!r:.40}")
  return config


def name_in(config: Mapping[str, Any], key: str) -> str | None:
  """The name of a config's token, be it a name or an object; None if none."""
  token = config.get(key)
  return token.get("content") if isinstance(token, Mapping) else token


def _listed(
  path: pathlib.Path, config: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
  """Tokens of `added_tokens.json` in a config's form.

  None where there is a `tokenizer.json`, which says more of the same tokens.
  """
  if (path / "tokenizer.json").exists():
    return {}
  special = {token["content"] for token in _special(config)}
  return {
    number: {
      "content": content,
      "special": content in special,
      "normalized": content not in special,
    }
    for content, number in _read(path / "added_tokens.json").items()
  }


def _read(file: pathlib.Path) -> Mapping[str, Any]:
  return json_files.read_object(file) if file.exists() else {}


def mark_special(backend: hf.Tokenizer, config: Mapping[str, Any]) -> None:
  """Adds what a config lists and names, as far as a vocabulary has it.

  Args:
    backend: of `tokenizer.json`, which says by itself which tokens there are.
    config: from `read_config`.
  """
  _add(backend, config, lambda name: backend.token_to_id(name) is not None)


def read(path: pathlib.Path, config: Mapping[str, Any]) -> hf.Tokenizer:
  """Reads `vocab.json` and `merges.txt`.

  Args:
    path: of the checkpoint's directory.
    config: from `read_config`.

  Raises:
    ValueError: for a class that is not supported, or added tokens that do not
      get the ids that they are said to have.
  """
  kind = _kind(path, config)
  if kind not in _DEFAULTS:
    raise ValueError(
      f"vocab.json and merges.txt of class {kind!r:.40}: expected "
      f"tokenizer.json, or a tokenizer_class of "
      f"{', '.join(f'{known}Tokenizer' for known in _DEFAULTS)}"
    )
  backend = hf.Tokenizer(
    hf.models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt"))
  )
  with_space = bool(config.get("add_prefix_space"))
  if kind == "Qwen2":
    (words,) = CUTS["qwen2"]
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
      [
        pre_tokenizers.Split(hf.Regex(words), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=with_space, use_regex=False),
      ]
    )
  else:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
      add_prefix_space=with_space
    )
  backend.decoder = decoders.ByteLevel()
  _add(backend, config, lambda _: True)
  for number, token in config["added_tokens_decoder"].items():
    known_id = backend.token_to_id(token["content"])
    if known_id != int(number):
      raise ValueError(
        f"the added token {token['content']!r:.40} is said to have the id "
        f"{number}, and would get {known_id}"
      )
  bos, eos = (
    name_in(config, f"{end}_token") if config.get(f"add_{end}_token") else None
    for end in ("bos", "eos")
  )
  frame(backend, bos, eos)
  return backend


def frame(backend: hf.Tokenizer, bos: str | None, eos: str | None) -> None:
  """Makes every text begin and end with these tokens, where there are any."""
  around = {"BOS": bos, "EOS": eos}
  given = {name: token for name, token in around.items() if token is not None}
  if given:
    single = [name for name in ("BOS", "$A", "EOS") if name in {*given, "$A"}]
    backend.post_processor = processors.TemplateProcessing(
      single=single,
      special_tokens=[
        {"id": name, "ids": [backend.token_to_id(token)], "tokens": [token]}
        for name, token in given.items()
      ],
    )


def _kind(path: pathlib.Path, config: Mapping[str, Any]) -> str:
  """The name of the tokenizer's class in transformers."""
  model = _read(path / "config.json")
  named = config.get("tokenizer_class") or model.get("tokenizer_class")
  if named is None:
    of_model = model.get("model_type", "gpt2")
    named = _MODELS.get(of_model, of_model)
  return str(named).removesuffix("Fast").removesuffix("Tokenizer")


def _add(
  backend: hf.Tokenizer,
  config: Mapping[str, Any],
  wanted: Callable[[str], bool],
) -> None:
  """Adds those tokens that are wanted; the named ones are special.

  What is listed says how a token is looked for, before what was there already.
  """
  named = {token["content"] for token in _named(config)}
  listed = sorted(
    config["added_tokens_decoder"].items(), key=lambda item: int(item[0])
  )
  known = {
    token.content: {
      "content": token.content, "special": token.special,
      "single_word": token.single_word, "lstrip": token.lstrip,
      "rstrip": token.rstrip, "normalized": token.normalized,
    }
    for token in backend.get_added_tokens_decoder().values()
  }  # fmt: skip
  known |= {token["content"]: token for _, token in listed}
  added = {
    name: _added(token, special=bool(token.get("special")) or name in named)
    for name, token in known.items()
  }
  for token in _special(config):
    added.setdefault(token["content"], _added(token, special=True))
  # At once: every call builds anew what looks for all of them.
  backend.add_tokens([token for name, token in added.items() if wanted(name)])


def _named(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
  """The config's named tokens (`bos_token`, ...), each as an object."""
  others = sorted(k for k in config if k.endswith("_token") and k not in _NAMED)
  return _objects(config.get(key) for key in (*_NAMED, *others))


def _special(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
  """The named tokens, and those that are listed by name alone."""
  yield from _named(config)
  for key in _LISTS:
    more = config.get(key) or ()
    yield from _objects(more.values() if isinstance(more, Mapping) else more)


def _objects(tokens: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
  for token in tokens:
    if isinstance(token, str):
      yield {"content": token}
    elif isinstance(token, Mapping) and isinstance(token.get("content"), str):
      yield token


def _added(token: Mapping[str, Any], *, special: bool) -> hf.AddedToken:
  return hf.AddedToken(
    token["content"],
    special=special,
    single_word=bool(token.get("single_word")),
    lstrip=bool(token.get("lstrip")),
    rstrip=bool(token.get("rstrip")),
    normalized=bool(token.get("normalized", not special)),
  )
