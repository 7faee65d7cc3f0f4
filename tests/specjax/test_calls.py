"""The grammar of calls: what is read, made, refused, and written again."""

import pytest

from specjax import calls, rules
from specjax.adaptive import policies
from specjax.calls import Call, Grammar


class Cup:
  """Parts of a drink."""

  def __init__(self, text):
    self.text = text


def tea(leaf: str = "", *, cups: int = 2, heat: float = 0.9) -> Cup:
  """Leaves in water."""
  return Cup(f"{cups} {leaf} {heat}")


def mixed(one: Cup, *sizes: int, strong: bool = False) -> Cup:
  """One drink in several sizes."""
  return Cup(f"{one.text} | {sizes} {strong}")


NESTED: dict[type, Grammar] = {}
DRINKS = Grammar(
  kind="drink",
  entries={"tea": tea, "mixed": mixed, "water": Cup("water")},
  nested=NESTED,
  literal="tea",
  custom=Cup,
)
NESTED[Cup] = DRINKS
OWN = Cup("mine")


def stranger(text: str):
  """A function that says nothing of what it returns."""
  return Cup(text)


@pytest.mark.parametrize(
  ("text", "made", "canonical"),
  [
    ("water", "water", "water"),
    ("tea", "2  0.9", "tea"),
    ("tea('oolong')", "2 oolong 0.9", 'tea("oolong")'),
    ("tea(oolong)", "2 oolong 0.9", 'tea("oolong")'),
    ('tea(heat=1, cups=3, leaf="a, (b")', "3 a, (b 1.0",
     'tea(leaf="a, (b", cups=3, heat=1)'),
    ("mixed(tea(cups=3), 1, 2)", "3  0.9 | (1, 2) False",
     "mixed(tea(cups=3), 1, 2)"),
    ("mixed(mixed(water), strong=True)", "water | () False | () True",
     "mixed(mixed(water), strong=True)"),
    (r'tea("a\"b\\c")', '2 a"b\\c 0.9', r'tea("a\"b\\c")'),
    ('"jasmine"', "2 jasmine 0.9", 'tea("jasmine")'),
    (f"{__name__}.OWN", "mine", f"{__name__}.OWN"),
  ],
)  # fmt: skip
def test_call_text_is_built_and_canonicalized(text, made, canonical):
  assert DRINKS.make(text).text == made
  assert DRINKS.canonical(text) == canonical
  assert DRINKS.canonical(canonical) == canonical


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("coffee", "unknown drink 'coffee', expected one of tea, mixed, water, or"),
    ("watr", "did you mean 'water'?"),
    ("tea(cup=3)", "no parameter 'cup' .did you mean 'cups'"),
    ("tea(cups=2.5)", "expected int, got 2.5"),
    ("tea(cups=1, cups=2)", "is given twice"),
    ("tea('a', 'b')", "too many positional"),
    ("mixed", "missing a required argument: 'one'"),
    ("tea(**x)", "no parameter 'None'"),
    ("1 + 1", "expected NAME or NAME"),
    ("", "expected NAME or NAME"),
    ("no_such_module.x", "no drink 'no_such_module.x'"),
    ("os.system('true')", "must be a Cup, or a function annotated"),
    (f"{__name__}.stranger('x')", "annotated"),
  ],
)  # fmt: skip
def test_invalid_calls_raise_short_descriptive_errors(text, words):
  with pytest.raises(ValueError, match=words) as caught:
    DRINKS.make(text)
  assert len(str(caught.value)) < 300


def test_parse_list_splits_only_at_top_level_commas():
  actual = calls.parse_list("plain, a(b=(1, 2), c='x,y'),m.n.f(d)")
  assert [str(call) for call in actual] == [
    "plain", 'a(b=(1, 2), c="x,y")', "m.n.f(d)"
  ]  # fmt: skip
  assert actual[1] == Call("a", (), {"b": (1, 2), "c": "x,y"})
  assert calls.parse_list(" ") == []


def test_help_lists_every_entry_with_defaults():
  assert DRINKS.help() == [
    ("tea(leaf, cups=2, heat=0.9)", "Leaves in water."),
    ("mixed(one, *sizes, strong=False)", "One drink in several sizes."),
    ("water", ""),
  ]


def test_rules_and_policies_parse_from_call_text():
  assert rules.get("typical(epsilon=0.1)").name == "typical(epsilon=0.1)"
  assert policies.get("4").name == policies.get("fixed(4)").name == "4"
  with pytest.raises(ValueError, match="must be a Rule"):
    rules.get("specjax.rules.RULES")
