"""A grammar of calls for settings: `typical(epsilon=0.1)`, `k_ary(2, 2)`.

A setting is a name, or a call with literals and other calls as arguments:
`repeats(eagle3(tokens=1), min_match=3)`. A bare name is a call without
arguments; a dotted one, `mine.DOUBLED("DIR")`, is from the user's own module.
Nothing is evaluated. A `Grammar` is a table of functions by name; their
signatures define the checks, the help and the canonical form.
"""

import ast
import dataclasses
import difflib
import inspect
import json
import math
import pkgutil
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints


@dataclasses.dataclass(frozen=True)
class Call:
  """A parsed call; its arguments are literals and calls."""

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
  if isinstance(value, str):
    return json.dumps(value, ensure_ascii=False)
  return str(value)


def parse(text: str) -> Any:
  """Parses a text into a call or a literal.

  Raises:
    ValueError: if it is neither.
  """
  parsed = parse_list(text)
  if len(parsed) != 1:
    raise ValueError(f"expected NAME or NAME(argument, ...), got {text!r:.80}")
  return parsed[0]


def parse_list(text: str) -> list[Any]:
  """Parses a comma-separated list of calls; raises like `parse`."""
  try:
    body = ast.parse(f"[{text.strip()}\n]", mode="eval").body
    if not isinstance(body, ast.List):
      raise ValueError("unbalanced brackets")
    return list(_value(body))
  except (SyntaxError, ValueError) as error:
    reason = getattr(error, "msg", error)
    raise ValueError(
      f"expected NAME or NAME(argument, ...), got {text!r:.80}: {reason!s:.120}"
    ) from None


def _value(node: ast.expr) -> Any:
  match node:
    case ast.Name() | ast.Attribute():
      return Call(_name(node))
    case ast.Call(func, args, keywords):
      named = {str(one.arg): _value(one.value) for one in keywords}
      if len(named) < len(keywords):
        raise ValueError("an argument is given twice")
      return Call(_name(func), tuple(map(_value, args)), named)
    case ast.Tuple(elements) | ast.List(elements):
      return tuple(map(_value, elements))
  return ast.literal_eval(node)


def _name(node: ast.expr) -> str:
  """The dotted name of a syntax node."""
  name = ast.unparse(node)
  if not all(part.isidentifier() for part in name.split(".")):
    raise ValueError("only NAME(value, name=value) can be called")
  return name


def guess(name: str, known: Iterable[str]) -> str:
  """` (did you mean NAME?)` for the nearest known name, or an empty string."""
  near = difflib.get_close_matches(name, list(known), n=1)
  return f" (did you mean {near[0]!r}?)" if near else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
  """Parses texts into objects of one kind, such as rules or trees.

  Attributes:
    kind: the kind, for messages.
    entries: by name, functions with typed parameters, or finished objects.
    nested: by the type of a parameter, the grammar of its argument.
    literal: the entry that a bare number or tuple is an argument of.
    custom: the type that `package.module.NAME` has, or is annotated to return.
    with_names: whether objects have a `name`, set to the canonical text.
  """

  kind: str
  entries: Mapping[str, Any]
  nested: Mapping[type, "Grammar"] = dataclasses.field(default_factory=dict)
  literal: str | None = None
  custom: type | None = None
  with_names: bool = False

  def make(self, written: Any) -> Any:
    """Makes the object that a text, a `Call` or a literal describes.

    Raises:
      ValueError: for an unknown name, or arguments that do not fit the
        signature or that the function rejects.
    """
    call = self._call(written)
    made = self._entry(call.name)
    try:
      bound = self._bound(call, made, Grammar.make)
      if callable(made):
        made = made(*bound.args, **bound.kwargs)
    except (TypeError, ValueError) as error:
      raise ValueError(f"{self.kind} {str(call)!r:.80}: {error}") from error
    if self.with_names:
      return dataclasses.replace(made, name=self.canonical(call))
    return made

  def canonical(self, written: Any) -> str:
    """The canonical text: in the signature's order, without defaults.

    Raises:
      ValueError: as in `make`.
    """
    return str(self._canonical(written))

  def _canonical(self, written: Any) -> Call:
    call = self._call(written)
    bound = self._bound(call, self._entry(call.name), Grammar._canonical)
    args, keywords = [], {}
    for name, value in bound.arguments.items():
      parameter = bound.signature.parameters[name]
      if name in call.keywords:
        if value != parameter.default:
          keywords[name] = value
      elif parameter.kind is parameter.VAR_POSITIONAL:
        args += value
      else:
        args.append(value)
    return Call(call.name, tuple(args), keywords)

  def help(self) -> list[tuple[str, str]]:
    """Each entry's call with its defaults, and the first line of its doc."""
    rows = []
    for name, entry in self.entries.items():
      inside, about = [], ""
      if callable(entry):
        about = (inspect.getdoc(entry) or "").partition("\n")[0]
        for one in inspect.signature(entry).parameters.values():
          star = "*" if one.kind is one.VAR_POSITIONAL else ""
          default = one.default
          if default is one.empty or default in ("", None) or star:
            inside.append(star + one.name)
          else:
            shown = getattr(default, "name", None) or write(default)
            inside.append(f"{one.name}={shown}")
      rows.append((f"{name}({', '.join(inside)})" if inside else name, about))
    return rows

  def _entry(self, name: str) -> Any:
    """The function or object of that name; ValueError if there is none."""
    if name in self.entries:
      return self.entries[name]
    if "." not in name or not self.custom:
      raise ValueError(
        f"unknown {self.kind} {name!r}{guess(name, self.entries)}, expected "
        f"one of {', '.join(self.entries)}"
        + (", or package.module.NAME" if self.custom else "")
      )
    try:
      value = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
      raise ValueError(f"no {self.kind} {name!r}: {error}") from error
    returned = getattr(value, "__annotations__", {}).get("return")
    if not isinstance(value, self.custom) and returned is not self.custom:
      raise ValueError(
        f"{name!r} must be a {self.custom.__name__}, or a function annotated "
        "to return one"
      )
    return value

  def _call(self, written: Any) -> Call:
    value = parse(written) if isinstance(written, str) else written
    if isinstance(value, Call):
      return value
    if self.literal and value is not None:
      return Call(self.literal, value if isinstance(value, tuple) else (value,))
    raise ValueError(f"expected a {self.kind}, got {write(value)}")

  def _bound(
    self, call: Call, entry: Any, nested: Callable[["Grammar", Any], Any]
  ) -> inspect.BoundArguments:
    """Binds a call's arguments; `nested` maps those that have a grammar."""
    hints, signature = {}, inspect.Signature()
    if callable(entry):
      hints, signature = get_type_hints(entry), inspect.signature(entry)
    for name in call.keywords:
      if name not in signature.parameters:
        near = guess(name, signature.parameters)
        raise ValueError(f"{call.name} has no parameter {name!r}{near}")
    try:
      bound = signature.bind(*call.args, **call.keywords)
    except TypeError as error:
      raise ValueError(f"{call.name}: {error}") from None

    def argument(hint: Any, value: Any) -> Any:
      kinds = typing.get_args(hint) or (hint,)
      grammar = next((self.nested[k] for k in kinds if k in self.nested), None)
      if grammar is None or value is None:
        return _checked(hint, value)
      return nested(grammar, value)

    for name, value in bound.arguments.items():
      hint, parameter = hints.get(name, Any), signature.parameters[name]
      bound.arguments[name] = (
        tuple(argument(hint, one) for one in value)
        if parameter.kind is parameter.VAR_POSITIONAL
        else argument(hint, value)
      )
    return bound


def _checked(hint: Any, value: Any) -> Any:
  """A literal converted to its parameter's type, if that loses nothing."""
  union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  kinds = typing.get_args(hint) if union else (hint,)
  for kind in kinds:
    if kind is Any or (value is None and kind is type(None)):
      return value
    if kind is str and isinstance(value, Call) and str(value) == value.name:
      return value.name
    if (typing.get_origin(kind) or kind) is tuple:
      of = (typing.get_args(kind) or (Any,))[0]
      rows = value if isinstance(value, tuple) else (value,)
      return tuple(_checked(of, x) for x in rows)
    if kind in (bool, str) and type(value) is kind:
      return value
    if kind in (int, float) and type(value) in (int, float):
      if math.isfinite(value) and kind(value) == value:
        return kind(value)
  names = " or ".join(
    "None" if kind is type(None) else getattr(kind, "__name__", str(kind))
    for kind in kinds
  )
  raise ValueError(f"expected {names}, got {write(value)}")
