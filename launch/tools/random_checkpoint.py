r"""Writes a checkpoint of a known shape with random weights, for timing.

  python -m launch.tools.random_checkpoint --shape=pythia-160m --output=NEOX
  python -m launch.evaluate --config=configs/huggingface.py:target=NEOX \
    --config.drafter=plain

Needs torch and transformers (the `test` extra): the files are transformers'
own. The tokenizer is the embedded pair's; ids beyond it are padding.
"""

from absl import flags

from launch import cli, results
from models import tokenizers

# The public shape of EleutherAI/pythia-160m: 162 million parameters.
_SHAPES = {
  "pythia-160m": dict(
    vocab_size=50304,
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    intermediate_size=3072,
    max_position_embeddings=2048,
    rotary_pct=0.25,
  )
}
cli.reads(cli.OUTPUT)
_SHAPE = flags.DEFINE_enum(
  "shape", "pythia-160m", sorted(_SHAPES), "Which shape."
)


def run(_) -> int:
  """The command."""
  try:
    import torch
    import transformers
  except ImportError as error:
    raise cli.UserError(f"{error}: pip install -e '.[test]'") from error
  results.check_folder("--output", cli.OUTPUT.value, model=True)
  torch.manual_seed(0)
  config = transformers.GPTNeoXConfig(**_SHAPES[_SHAPE.value])
  model = transformers.GPTNeoXForCausalLM(config)
  model.save_pretrained(cli.OUTPUT.value)
  tokenizers.save(tokenizers.load("models/pretrained/target"), cli.OUTPUT.value)
  count = sum(p.numel() for p in model.parameters())
  print(f"{count} parameters in {cli.OUTPUT.value}")
  return 0


if __name__ == "__main__":
  cli.run(run, required=("output",))
