"""Flax (NNX) networks, their checkpoints and tokenizers, and the embedded pair.

Where things are:

  networks/   modules, one file a family of layers. `transformer` is the
              decoder-only network of all such families, `layers` its parts and
              switches, `stacked` the same scanned over; `t5` is the
              encoder-decoder; `eagle`, `medusa`, `dflash`, `specdec` draft.
  formats/    files to configurations and parameters: `huggingface`, `gguf`,
              `trained` (runs of `launch.train`), heads (`*_format`), and
              `weights`, which maps tensor names to parameters for all.
  checkpoints a path, in whichever format, to a `Network` or a head
  sharding, meshes    what is cut over which devices
  tokenizers, token_text, chat    text to ids and back, conversations
  head_shapes, head_starts    what a head is; how an untrained one begins
  pretrained/ the pair and the heads that come with the code

How a decoder-only family is added: its `model_type`, defaults and switches in
`formats.huggingface_config`, a switch in `networks.layers.TransformerConfig`
for what no family had, a table of tensors' names in `formats.weights` (none
with Llama's names), and small models in tests/references.py, whose logits are
compared with those of transformers. CONTRIBUTING.md, "A new model family", has
the steps.
"""
