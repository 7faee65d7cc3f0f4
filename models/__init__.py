"""Flax (NNX) networks, their checkpoints and tokenizers, and the embedded pair.

Where things are:

  networks/   modules, one file a family of layers. `transformer` is the
              decoder-only network of all such families, `description` says what
              its layers are, `layers` makes them, `stacked` scans over
              them; `t5` is the encoder-decoder; `eagle`, `medusa`,
              `dflash`, `specdec` draft.
  formats/    files to configurations and parameters: `huggingface`, `gguf`,
              heads (`*_format`), and `weights`, from named tensors to
              parameters; `families` say which is which.
  checkpoints a path, in whichever format, to a `Network` or a head
  sharding, meshes    what is cut over which devices
  tokenizers, token_text, chat    text to ids and back, conversations
  head_shapes, head_starts    shapes of heads; their initial weights
  pretrained/ the pair and the heads that come with the code

How a decoder-only family is added: a file in `formats.families`, which says
what its `config.json` means for each layer (`networks.description`) and what
its tensors are called, a line in that folder's `__init__`, and small models in
tests/models/references.py, whose logits are compared with transformers'.
CONTRIBUTING.md, "A new model family", has the steps.
"""
