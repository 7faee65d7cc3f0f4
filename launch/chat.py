r"""A conversation with a chat model in the terminal, decoded speculatively.

  python -m launch.tools.fetch_smollm2
  python -m launch.chat --config=configs/smollm2.py
  echo "What is 2+2?" | python -m launch.chat --config=configs/smollm2.py
  python -m launch.chat --config=configs/huggingface.py:target=DIR,draft=DIR \
    --config.max_new_tokens=512

DIR is a model with a chat template. Tokens appear as they are accepted, in the
colours of launch.decode; the line after an answer says how fast it came. The
caches keep the conversation: only what is new is read, unless the model's
template rewrites what was said (/stats says which). /help lists the commands;
Ctrl-C ends an answer, Ctrl-D the conversation. Piped, every line is a message
(or a command), the answers alone go to stdout, and exit code 2 says that a line
was no good (said on stderr); the others are answered all the same.
"""

import sys

from launch import cli, display
from launch.chatting.chat import MISTAKES, Chat
from launch.chatting.screen import Screen

cli.reads(cli.CONFIG)


def run(_) -> int:
  """The command."""
  screen = Screen(sys.stdin.isatty() and sys.stdout.isatty())
  chat = Chat(cli.CONFIG.value, screen)
  if screen.interactive:
    screen.note(f"{chat.headline()}; /help")
    display.show_legend(screen.console)
  good = True
  for line in screen.lines():
    try:
      if not chat.run(line):
        break
    except KeyboardInterrupt:  # the second one, while something was compiled
      if not screen.interactive:
        raise
      screen.note("interrupted")
    except MISTAKES as error:
      good = False
      screen.error(str(error))
  return 0 if good or screen.interactive else 2


if __name__ == "__main__":
  cli.run(run)
