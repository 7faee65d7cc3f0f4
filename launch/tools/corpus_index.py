r"""Indexes texts in which drafts are looked up while decoding.

  python -m launch.tools.corpus_index --input=TEXTS --target=DIR \
    --output=I.safetensors
  python -m launch.decode --config=configs/smollm2.py --config.rule=match \
    --config.drafter='suffix(corpus="I.safetensors")' --prompts=IN.jsonl

TEXTS is a folder of *.txt, *.md, *.py and *.jsonl files, or a JSONL file whose
lines have a "completion", as launch.decode writes them, or a "text". DIR is the
target, whose tokenizer the index uses. Every token takes eight bytes, on disk
and in the memory of every device.
"""

import pathlib

from absl import flags

from launch import cli, results
from launch.assembly import files
from launch.evaluation import timing
from launch.training import data
from models import checkpoints
from specjax.drafters.shared import corpus

cli.reads(cli.OUTPUT, cli.TARGET)
_INPUT = flags.DEFINE_string("input", None, "A folder of texts, or JSONL.")


def run(_) -> int:
  """The command."""
  results.check(cli.OUTPUT.value)
  tokenizer = checkpoints.load_tokenizer(cli.TARGET.value)
  path = pathlib.Path(_INPUT.value)
  read = data.documents_in if path.is_dir() else data.documents_of
  kinds = ("completion", "text", "messages")
  texts = [data.text_of(document) for document in read(path, kinds)]
  encoded = lambda: [tokenizer.encode_text(text) for text in texts]
  seconds, index = timing.timed(lambda: corpus.build(encoded()))
  content = files.index_content(index, tokenizer, len(texts))
  results.write(cli.OUTPUT.value, content)
  print(
    f"{len(texts)} texts, {len(index.tokens) - len(texts):,} tokens in "
    f"{cli.OUTPUT.value} ({seconds:.1f} s)",
    file=results.messages(cli.OUTPUT.value),
  )
  return 0


if __name__ == "__main__":
  cli.run(run, required=("input", "target", "output"))
