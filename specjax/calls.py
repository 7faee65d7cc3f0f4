"""A grammar of calls for settings: `typical(epsilon=0.1)`, `k_ary(2, 2)`.

A text is a name, or a call of a name with literals and other calls as its
arguments: `repeats(eagle3(tokens=1), min_match=3)`. A bare name is a call
without arguments. Texts are parsed and not evaluated. A `Grammar` is a table of
functions by name: their signatures are the check, the help and the canonical
form, in which defaults are left out.
"""

import ast
import dataclasses
import inspect
import math
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from specjax import suggestions

# What Python's parser says of many brackets, and arithmetic of many digits.
_TOO_MUCH = (RecursionError, MemoryError, OverflowError)
_QUOTED = re.compile(r"""("[^"]*"|'[^']*')""")
_OWN = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")
_DOT, _COLON = "ⵧ", "ꓽ"  # letters, that stand for signs while Python parses


@dataclasses.dataclass(frozen=True)
class Call:
  """A call, as it was written.

  Attributes:
    name: of the function; `package.module:function` of one's own.
    args: by position; literals and calls.
    keywords: by name.
  """

  name: str
  args: tuple[Any, ...] = ()
  keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __str__(self) -> str:
    inside = [write(value) for value in self.args]
    inside += [f"{name}={write(x)}" for name, x in self.keywords.items()]
    return f"{self.name}({', '.join(inside)})" if inside else self.name


def write(value: Any) -> str:
  """The text of an argument, which `parse` reads back."""
  if isinstance(value, tuple):
    return f"({', '.join(map(write, value))}{',' * (len(value) == 1)})"
  if isinstance(value, float):
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)
  return f'"{value}"' if isinstance(value, str) else str(value)


def parse(text: str) -> Any:
  """The call, or literal, of a text.

  Raises:
    ValueError: if it is neither.
  """
  parsed = _parsed(text)
  if len(parsed) != 1:
    raise ValueError(f"expected NAME or NAME(argument, ...), got {text!r:.80}")
  return parsed[0]


def parse_list(text: str) -> list[Any]:
  """The calls of a text, with commas between them; raises as `parse`."""
  return _parsed(text) if text.strip() else []


def _parsed(text: str) -> list[Any]:
  parts = _QUOTED.split(text)  # every second one is quoted
  parts[::2] = [_OWN.sub(_as_letters, part) for part in parts[::2]]
  try:
    body = ast.parse(f"[{''.join(parts).strip()}\n]", mode="eval").body
    if not isinstance(body, ast.List):
      raise ValueError("unbalanced brackets")
    return [_value(element) for element in body.elts]
  except (SyntaxError, ValueError, *_TOO_MUCH) as error:
    said = error.msg if isinstance(error, SyntaxError) else error
    raise ValueError(
      f"expected NAME or NAME(argument, ...), got {text!r:.80}: {said!s:.120}"
    ) from None


def modules(text: str) -> list[str]:
  """The modules of `package.module:NAME`s in a text."""
  parts = _QUOTED.split(text)[::2]
  return [match[1] for part in parts for match in _OWN.finditer(part)]


def _as_letters(match: re.Match) -> str:
  return f"{match[1].replace('.', _DOT)}{_COLON}{match[2]}"


def _value(node: ast.expr) -> Any:
  if isinstance(node, ast.Name):
    return Call(_name(node))
  if isinstance(node, ast.Call):
    names = [keyword.arg for keyword in node.keywords]
    if not isinstance(node.func, ast.Name) or None in names:
      raise ValueError("only NAME(value, name=value) can be called")
    if twice := {name for name in names if names.count(name) > 1}:
      raise ValueError(f"{min(map(str, twice))} is given twice")
    return Call(
      _name(node.func),
      tuple(map(_value, node.args)),
      {str(k.arg): _value(k.value) for k in node.keywords},
    )
  if isinstance(node, ast.Tuple | ast.List):
    return tuple(map(_value, node.elts))
  value = ast.literal_eval(node)
  if not isinstance(value, int | float | str | None):
    raise ValueError(f"{value!r} is no number, text or name")
  return value


def _name(node: ast.Name) -> str:
  return node.id.replace(_DOT, ".").replace(_COLON, ":")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
  """Parses texts to things of one kind, such as rules or trees.

  Attributes:
    kind: what they are, for messages.
    entries: by name, functions whose parameters are typed, or finished things
      that take no arguments.
    nested: by the type of a parameter, the grammar of its argument.
    literal: the entry that a bare number or tuple is an argument of.
    custom: what `package.module:NAME` must be, or be annotated to return, where
      that names one that is not in the table.
  """

  kind: str
  entries: Mapping[str, Any]
  nested: Mapping[type, "Grammar"] = dataclasses.field(default_factory=dict)
  literal: str | None = None
  custom: type | None = None

  def make(self, written: Any) -> Any:
    """The thing that a text, a `Call` or a literal names.

    Raises:
      ValueError: if there is none, its arguments are no such, or its function
        refuses them.
    """
    call = self._call(written)
    entry = self.entry(call.name)
    try:
      if not callable(entry):
        if call.args or call.keywords:
          raise ValueError("it takes no arguments")
        return entry
      args, keywords = self._bind(call, entry)
      return entry(
        *(self._make_argument(hint, x) for _, hint, x in args),
        **{name: self._make_argument(hint, x) for name, hint, x in keywords},
      )
    except (TypeError, ValueError, OverflowError) as error:
      raise ValueError(f"{self.kind} {str(call)!r:.80}: {error}") from error

  def canonical(self, written: Any) -> str:
    """The canonical text: defaults left out, in the signature's order.

    Raises:
      ValueError: as `make`.
    """
    call = self._call(written)
    entry = self.entry(call.name)
    if not callable(entry):
      return call.name
    args, keywords = self._bind(call, entry)
    signature = inspect.signature(entry).parameters
    inside = [self._write_argument(hint, x) for _, hint, x in args]
    for name, hint, value in keywords:
      default = signature[name].default
      if self._grammar(hint) is None and value == default:
        continue
      if value is not None or default is not None:
        inside.append(f"{name}={self._write_argument(hint, value)}")
    return f"{call.name}({', '.join(inside)})" if inside else call.name

  def entry(self, name: str) -> Any:
    """The function or thing of that name; ValueError if there is none."""
    if name in self.entries:
      return self.entries[name]
    if ":" not in name or not self.custom:
      raise ValueError(
        f"unknown {self.kind} {name!r}"
        f"{suggestions.guess(name, self.entries)}, expected one of "
        f"{', '.join(self.entries)}"
        + (", or package.module:NAME" if self.custom else "")
      )
    try:
      value = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
      raise ValueError(f"no {self.kind} {name!r}: {error}") from error
    returned = getattr(value, "__annotations__", {}).get("return")
    if not isinstance(value, self.custom) and returned is not self.custom:
      raise ValueError(
        f"{name!r} must be a {self.custom.__name__}, or a function that is "
        f"annotated to return one"
      )
    return value

  def help(self) -> list[tuple[str, str]]:
    """Each entry as it is written with its defaults, and what it is."""
    rows = []
    for name, entry in self.entries.items():
      inside = []
      if callable(entry):
        for one in inspect.signature(entry).parameters.values():
          star = "*" if one.kind is one.VAR_POSITIONAL else ""
          default = one.default
          if default is one.empty or default in ("", None) or star:
            inside.append(star + one.name)
          else:
            shown = getattr(default, "name", None) or write(default)
            inside.append(f"{one.name}={shown}")
      about = (inspect.getdoc(entry) if callable(entry) else "") or ""
      rows.append(
        (
          f"{name}({', '.join(inside)})" if inside else name,
          about.partition("\n")[0],
        )
      )
    return rows

  def _call(self, written: Any) -> Call:
    value = parse(written) if isinstance(written, str) else written
    if isinstance(value, Call):
      return value
    if self.literal and value is not None:
      return Call(self.literal, value if isinstance(value, tuple) else (value,))
    raise ValueError(f"expected a {self.kind}, got {write(value)}")

  def _grammar(self, hint: Any) -> "Grammar | None":
    for one in typing.get_args(hint) or (hint,):
      if one in self.nested:
        return self.nested[one]
    return None

  def _bind(self, call: Call, entry: Callable):
    """Arguments with their types, in the order of the signature."""
    signature = inspect.signature(entry)
    hints = typing.get_type_hints(entry)
    known = signature.parameters
    for name in call.keywords:
      if name not in known:
        raise ValueError(
          f"{call.name} has no parameter {name!r}"
          f"{suggestions.guess(name, known)}, only {', '.join(known) or 'none'}"
        )
    try:
      bound = signature.bind(*call.args, **call.keywords).arguments
    except TypeError as error:
      raise ValueError(f"{call.name}: {error}") from None
    args, keywords = [], []
    for name, value in bound.items():
      one, hint = known[name], hints.get(name, Any)
      if one.kind is one.VAR_POSITIONAL:
        args += [(name, hint, x) for x in value]
      elif one.kind is one.KEYWORD_ONLY or name in call.keywords:
        keywords.append((name, hint, value))
      else:
        args.append((name, hint, value))
    order = list(known)
    return args, sorted(keywords, key=lambda x: order.index(x[0]))

  def _make_argument(self, hint: Any, value: Any) -> Any:
    grammar = self._grammar(hint)
    if grammar is None:
      return _checked(hint, value)
    return None if value is None else grammar.make(value)

  def _write_argument(self, hint: Any, value: Any) -> str:
    grammar = self._grammar(hint)
    if grammar is None:
      return write(_checked(hint, value))
    return "None" if value is None else grammar.canonical(value)


def _checked(hint: Any, value: Any) -> Any:
  """A literal as its parameter's type, without losing any of it."""
  union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  kinds = typing.get_args(hint) if union else (hint,)
  if value is None and type(None) in kinds:
    return None
  for kind in kinds:
    origin = typing.get_origin(kind) or kind
    if kind is str and isinstance(value, Call) and not value.args:
      if not value.keywords:
        return value.name
    elif origin is tuple:
      of = (typing.get_args(kind) or (Any,))[0]
      rows = value if isinstance(value, tuple) else (value,)
      return tuple(_checked(of, x) for x in rows)
    elif kind is Any or (kind in (bool, str) and type(value) is kind):
      return value
    elif kind in (int, float) and type(value) in (int, float):
      if math.isfinite(value) and kind(value) == value:
        return kind(value)
  called = lambda k: "None" if k is type(None) else getattr(k, "__name__", k)
  names = " or ".join(str(called(k)) for k in kinds)
  raise ValueError(f"expected {names}, got {write(value)}")
