"""What is typed: messages, and commands that begin with a slash."""

import re

from specjax import suggestions

COMMANDS = {
  "temperature": ("X", "of what is sampled; 0 takes the likeliest token"),
  "rule": ("NAME", "what verifies drafts; the conversation stays"),
  "drafter": (
    "CALL",
    "what drafts, as ngram(tokens=8); the rest stays",
  ),
  "system": ("TEXT", "the system's message; none without TEXT"),
  "stats": (
    "",
    "what was read and written, and how fast beside plain",
  ),
  "reset": ("", "forgets what was said"),
  "help": ("", "this list"),
  "quit": ("", "ends (so does Ctrl-D; Ctrl-C ends an answer)"),
}


def parse(line: str) -> tuple[str, str] | None:
  """The command of a line and what follows it; None if it is a message.

  Raises:
    ValueError: for a command that there is not.
  """
  line = line.strip()
  if not line.startswith("/") or line.startswith("//"):
    return None
  name, _, rest = line[1:].partition(" ")
  if name not in COMMANDS:
    guess = suggestions.guess(name, COMMANDS, write="/{}")
    raise ValueError(
      f"unknown command /{name}{guess}, /help lists them (a message that "
      "begins with a slash begins with two)"
    )
  wanted, rest = COMMANDS[name][0], rest.strip()
  if rest and not wanted:
    raise ValueError(f"/{name} takes nothing after it, got {rest!r}")
  if wanted not in ("", "TEXT") and not rest:
    raise ValueError(
      f"/{name} takes {wanted} after it, got nothing ({COMMANDS[name][1]})"
    )
  return name, rest


def here(text: str) -> str:
  """An error with commands in place of the flags that it names."""
  names = "|".join(COMMANDS)
  return re.sub(rf"(?:--)?\b(?:config\.)?({names})=(\S*\w)", r"/\1 \2", text)


def message(line: str) -> str:
  """The message of a line that is no command."""
  return line[1:] if line.startswith("//") else line


def help_text() -> str:
  """A line for each command."""
  heads = {name: f"/{name} {wants}" for name, (wants, _) in COMMANDS.items()}
  width = max(map(len, heads.values()))
  lines = [f"{heads[name]:{width}}  {COMMANDS[name][1]}" for name in COMMANDS]
  return "\n".join(
    [
      *lines,
      "A line that ends in a backslash goes on in the next; a message that "
      "begins with a slash begins with two.",
    ]
  )
