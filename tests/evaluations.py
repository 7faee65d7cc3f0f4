"""Records of groups as `measure` makes them, by hand."""


def part(seconds, tokens, calls, **more):
  """A system's numbers on a turn."""
  known = {
    "seconds": seconds, "first_seconds": 0.5, "prefill_seconds": 0.25,
    "rounds": max(calls), "fed": 3 * max(calls), "tokens": tokens,
    "calls": calls, "drafted": None,
    "accepted": None, "accept_counts": None, "total_variation": 0.0,
  }  # fmt: skip
  return known | more


def turn(questions, **systems):
  """A turn of a group."""
  return {
    "questions": questions,
    "prompt_tokens": [9] * len(questions),
    "refused": [],
    "systems": systems,
    "differences": [],
  }


def group(category, *turns, temperature=0.0, batch_size=2, task=None):
  """A group's record."""
  ids = ",".join(map(str, turns[0]["questions"]))
  return {
    "batch": f"T={temperature:g} B={batch_size} {ids}",
    "temperature": temperature,
    "batch_size": batch_size,
    "category": category,
    "task": task or category,
    "compile_seconds": {"plain": 1.0, "ngram": 2.0},
    "turns": list(turns),
  }


def example():
  """Two groups; the first has two turns, and only one question the second."""
  ngram = dict(
    prefill_seconds=0.5,
    drafted=[12, 6],
    accepted=[6, 0],
    accept_counts=[4, 0, 3],
  )
  return [
    group(
      "math",
      turn(
        [1, 2],
        plain=part(4.0, [10, 4], [10, 4]),
        ngram=part(2.0, [10, 4], [4, 3], **ngram,
                   identical_to_plain=[True, False]),
      ),
      turn(
        [1],
        plain=part(3.0, [6], [6]),
        ngram=part(1.5, [6], [3], drafted=[6], accepted=[3],
                   accept_counts=[1, 1, 1], identical_to_plain=[True]),
      ),
    ),
    group(
      "code",
      turn(
        [3],
        plain=part(2.0, [8], [8]),
        ngram=part(2.5, [8], [5], drafted=[10], accepted=[3],
                   accept_counts=[3, 1, 1], identical_to_plain=[True]),
      ),
    ),
  ]  # fmt: skip


def thrice():
  """The example of nine questions, in six groups: enough for an interval."""
  groups = []
  for number in range(3):
    for one in example():
      for part in one["turns"]:
        part["questions"] = [3 * number + q for q in part["questions"]]
      groups.append(one | {"batch": f"{one['batch']} {number}"})
  return groups
