"""Flax (NNX) networks, their checkpoints and tokenizers, and the embedded pair.

Where things are:

  networks/   Flax modules. `transformer` is the network of all decoder-only
              families: `description` specifies its layers, `layers` builds
              them, `stacked` scans over them. `t5` is the encoder-decoder;
              `eagle`, `medusa`, `dflash` and `specdec` are draft heads.
  formats/    reads and writes files: `huggingface`, `gguf`, heads
              (`*_format`). `weights` maps named tensors to parameters with
              the tables in `families`.
  checkpoints loads a `Network` or a head from a path in any format
  sharding, meshes    how parameters are partitioned over devices
  tokenizers, token_text, chat    text to ids and back; conversations
  head_shapes, head_starts    shapes of heads; their initial weights
  pretrained/ the pair and the heads that come with the code

To add a decoder-only family, write a file in `formats.families` that maps its
`config.json` to layers (`networks.description`) and names its tensors, list it
in that folder's `__init__`, and add small models to
tests/models/references.py, which compares their logits with transformers'.
See CONTRIBUTING.md, "A new model family".
"""
