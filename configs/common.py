"""What every decoding experiment has: the fields and their defaults."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """The fields that `launch.decode` and `launch.benchmark` read."""
  config = ml_collections.ConfigDict()
  # Checkpoints: directories, or GGUF files. `draft` is a model or a head on the
  # target's features, and tells by itself which it is.
  config.target = ""
  config.draft = ""
  # Heads that drafters of those names take where `draft` is none, by name.
  config.heads = ml_collections.ConfigDict()
  config.dtype = "float32"
  # What proposes, and what verifies.
  config.drafter = "model"  # of launch/drafting.py, or module:make
  config.rule = "token"  # of docs/rules.md, "typical(epsilon=0.1)", module:RULE
  config.num_speculative_tokens = 5  # 0 is plain autoregressive decoding
  # When a row's draft ends before that: "" is never; else of
  # specjax/adaptive/policies.py, as 4, confidence, survival(threshold=0.3),
  # optimal(cost=0.1), or predicted(head=DIR, threshold=0.7), whose head
  # configs/train_depth.py trains. Of one path only.
  config.depth = ""
  # Numbers of drafted tokens, rising, as 0,1,2,4: each has programs of its own,
  # and the host changes between rounds to the one that is the fastest, by what
  # was accepted (specjax/adaptive/ladder.py). The last is
  # num_speculative_tokens then.
  config.ladder = ()
  config.num_drafts = 1  # separate paths of that many tokens
  # Any other tree, by the parents of its nodes, root first: (-1, 0, 0, 1, 1).
  # Then its depth counts, in place of num_speculative_tokens.
  config.tree = ()
  # A head's dynamic tree: nodes that are verified, 0 for a static tree, and
  # children of a node; num_speculative_tokens deep, verified by "match".
  config.num_nodes = 0
  config.num_children = 10
  config.siblings = "iid"  # a name in specjax.siblings
  # Tokens, rising, that have a pass of the target of their own, beside the
  # whole draft: a round whose draft is shorter takes the narrowest one that
  # holds it. Where a draft's form is fixed they do nothing.
  config.widths = ()
  config.max_ngram = 3  # for ngram, and repeats
  # Where at least so many of the last tokens have occurred together before,
  # what followed is drafted, in place of what a head or layer_skip would; 0:
  # never. A depth ends their drafts, and not what is looked up: `elsewhere` is
  # one of so many tokens, where there is no other, with a width of its own; 0
  # for all. Of one path only, of siblings "iid"; at most max_ngram. What looks
  # up itself does not read it.
  config.repeats = 0
  config.elsewhere = 0
  # For suffix, rest and rasd (docs/retrieval.md): num_nodes, or by default
  # twice num_speculative_tokens; the longest match; nodes for each matched
  # token, 0 for no such bound; a less likely node is not drafted; and a file of
  # launch.tools.corpus_index.
  config.max_match = 16
  config.nodes_per_match = 1.0
  config.min_prob_drafted = 0.1
  config.corpus = ""
  # For lookahead: columns of the window, and guesses, each as long as
  # num_speculative_tokens.
  config.window = 7
  config.num_guesses = 7
  config.skip_attention = ()  # for layer_skip: layer indices
  config.skip_mlp = ()
  config.skip_layers = ""  # or a file of launch.layer_search, in their place
  # Whether the draft learns while it decodes (docs/online.md): rounds between
  # two updates, tokens of each row that are learned from, the likeliest tokens
  # of each law that are kept (0: all), an objective of specjax.training.losses,
  # and the optimiser's rate.
  config.online = False
  config.online_rounds = 8
  config.online_entries = 512
  config.online_laws = 0
  config.online_objective = "forward_kl"
  config.online_rate = 5e-5
  # What is sampled. Temperature 0 is greedy; 0, 1.0 and 0.0 truncate nothing.
  config.temperature = 0.0
  config.top_k = 0
  config.top_p = 1.0
  config.min_p = 0.0
  config.seed = 0
  # When rows end, beside the tokenizer's end-of-text token.
  config.max_new_tokens = 128
  config.stop_token_ids = ()
  # Prompts and completions longer than this are refused.
  config.max_length = 2048
  config.batch_size = 1
  # Several devices: as in "data:2,model:4", rows cut over 'data' and models
  # over 'model'; "" is one device. And how many of 'model' each copy of the
  # draft is cut over; 0 is as many as its heads allow.
  config.mesh = ""
  config.draft_devices = 0
  return config
