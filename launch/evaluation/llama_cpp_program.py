"""llama.cpp as a helper program of `launch.llama_cpp_reference`.

Run by the Python of an environment that has the package `llama_cpp`, which need
have nothing of this project: so this file imports nothing of it. The first line
is of arguments of `llama_cpp.Llama`, every other a prompt to complete.
"""

import json
import os
import sys
import time


def complete(model, prompt, most, stops, sampling):
  """A prompt's completion, and the seconds from its first pass on.

  Args:
    model: a `llama_cpp.Llama`.
    prompt: ids.
    most: how many tokens to emit, unless a stop token comes before.
    stops: ids that end a completion, which are emitted too.
    sampling: arguments of `Llama.generate`.
  """
  model.reset()  # else it would not read again what prompts have in common
  emitted, first = [], 0.0
  start = time.perf_counter()
  for token in model.generate(prompt, **sampling):
    first = first or time.perf_counter() - start
    emitted.append(token)
    if token in stops or len(emitted) == most:
      break
  seconds = time.perf_counter() - start
  return {"token_ids": emitted, "seconds": seconds, "first_seconds": first}


def main():
  """Serves stdin and stdout; what libraries print goes to stderr."""
  answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)

  def answer(**record):
    answers.write(json.dumps(record) + "\n")
    answers.flush()

  options = json.loads(sys.stdin.readline())
  try:
    import llama_cpp

    model = llama_cpp.Llama(**options, verbose=False)
    system = llama_cpp.llama_print_system_info().decode()
  except Exception as error:  # a library's, of whatever kind
    return answer(error=" ".join(f"{type(error).__name__}: {error}".split()))
  answer(llama_cpp=llama_cpp.__version__, system=system)
  for line in sys.stdin:
    answer(**complete(model, **json.loads(line)))


if __name__ == "__main__":
  main()
