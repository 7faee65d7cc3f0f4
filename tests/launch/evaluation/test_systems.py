"""Systems: how they are written, and what they share."""

import pathlib

import pytest

from configs import common, smollm2
from launch.evaluation import systems


def config(**changes):
  found = common.get_config()
  found.target, found.draft = "T", "D"
  found.update(changes)
  return found


def test_smollm2_takes_what_everybody_asks_for_first(monkeypatch):
  monkeypatch.setattr(smollm2, "path", lambda: pathlib.Path(__file__))
  wanted = [
    "plain", "eagle3", "ngram", "layer_skip", "hf", "hf_prompt_lookup",
    "ngram:ladder=0,2,4", "eagle3:num_speculative_tokens=1",
    "eagle3:num_speculative_tokens=3,num_nodes=8,num_children=4,rule=match",
  ]  # fmt: skip
  found = systems.parse(",".join(wanted), smollm2.get_config())
  assert [s.name for s in found] == wanted
  reads = [(s.config.repeats, s.config.elsewhere) for s in found]
  assert reads[1] == (3, 1)  # and all others by themselves
  assert {*reads[:1], *reads[2:]} == {(0, 0)}
  assert found[1].config.draft == "models/pretrained/smollm2-eagle3"


def test_names_and_settings_are_told_apart():
  found = systems.parse(
    "ngram, plain,ngram:max_ngram=2,num_speculative_tokens=8,"
    "layer_skip:skip_attention=3,4,skip_mlp=4,model:draft=E,"
    "model:rule=typical(epsilon=0.1,delta=0.2),hf",
    config(num_speculative_tokens=4),
  )
  assert [s.name for s in found] == [
    "plain", "ngram", "ngram:max_ngram=2,num_speculative_tokens=8",
    "layer_skip:skip_attention=3,4,skip_mlp=4", "model:draft=E",
    "model:rule=typical(epsilon=0.1,delta=0.2)", "hf",
  ]  # fmt: skip
  plain, ngram, longer, skip, other, lossy, hf = (s.config for s in found)
  assert plain.num_speculative_tokens == 0
  assert (ngram.drafter, ngram.num_speculative_tokens) == ("ngram", 4)
  assert (longer.max_ngram, longer.num_speculative_tokens) == (2, 8)
  assert ngram.max_ngram == 3
  assert (skip.drafter, skip.skip_attention, skip.skip_mlp) == (
    "layer_skip", (3, 4), (4,),
  )  # fmt: skip
  assert (other.drafter, other.draft) == ("model", "E")
  assert lossy.rule == "typical(epsilon=0.1,delta=0.2)"
  assert hf.num_speculative_tokens == 4


def test_what_repeats_is_of_the_configs_own_drafter():
  own = config(
    drafter="layer_skip", repeats=3, elsewhere=1, skip_mlp=(4,),
    num_speculative_tokens=4,
  )  # fmt: skip
  plain, same, wide, ngram, model, chain, other = (
    s.config for s in systems.parse(
      "layer_skip,layer_skip:widths=2,ngram,model,"
      "layer_skip:num_speculative_tokens=4,"
      "layer_skip:depth=2,repeats=2",
      own,
    )
  )  # fmt: skip
  of = lambda c: (c.repeats, c.elsewhere)
  assert of(plain) == of(ngram) == of(model) == of(chain) == (0, 0)
  assert of(same) == of(wide) == (3, 1)
  assert of(other) == (2, 0)
  # Where it is of none yet, every system that can has it.
  own = config(drafter="ngram", repeats=3, skip_mlp=(4,))
  *_, ngram, skip = systems.parse("ngram,layer_skip", own)
  assert skip.config.repeats == 3


def test_a_head_that_the_config_knows_is_a_system():
  own = config(drafter="ngram", draft="", num_speculative_tokens=4)
  own.heads.eagle3 = "models/pretrained/eagle3"
  _, found = systems.parse("eagle3", own)
  assert found.config.draft == "models/pretrained/eagle3"


def test_a_function_that_makes_a_drafter_is_a_system():
  name = "launch.build.drafters:_ngram"
  plain, found = systems.parse(f"{name}:max_ngram=2", config())
  assert (found.kind, found.config.max_ngram) == (name, 2)
  assert not found.is_reference
  assert plain.kind == "plain"


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("ngrams", "did you mean 'ngram'"),
    ("ngram:max_gram=2", "no field 'max_gram' .did you mean 'max_ngram'"),
    ("ngram:max_ngram=two", "max_ngram must be int, got 'two'"),
    ("layer_skip:skip_mlp=a", "skip_mlp must be integers"),
    ("ngram:temperature=1", "temperature is the same for all systems"),
    ("ngram:max_ngram=1,max_ngram=2", "max_ngram is there twice"),
    ("ngram,ngram", "a system is there twice"),
    ("plain:max_ngram=2", "it has no settings"),
    ("ngram:num_speculative_tokens=0", "nothing would be drafted"),
    ("hf_prompt_lookup:num_speculative_tokens=0", "nothing would be drafted"),
    ("ngram:num_drafts=2", "one path"),
    ("model:draft=", "needs a draft checkpoint"),
    ("no.module:make", "no drafter 'no.module:make'"),
  ],
)
def test_what_is_no_system_is_refused_in_words(text, words):
  with pytest.raises(ValueError, match=words):
    systems.parse(text, config())


def test_settings_of_drafters_do_not_trouble_plain_decoding_and_transformers():
  tree = config(tree=(-1, 0, 0), siblings="without_replacement",
                rule="recursive")  # fmt: skip
  found = systems.parse("model,hf,hf_prompt_lookup", tree)
  assert [s.config.rule for s in found] == [
    "token", "recursive", "token", "token"
  ]  # fmt: skip


def test_what_drafts_in_transformers_takes_one_prompt_at_a_time():
  found = systems.parse("ngram,hf,hf_assisted,hf_prompt_lookup", config())
  assert [s.takes(8) for s in found] == [True, True, True, False, False]
  assert all(s.takes(1) for s in found)


def test_all_pairs_share_one_target_and_have_their_own_drafts(pair):
  target, draft = pair
  given = config(target=target, draft=draft, max_new_tokens=8)
  given.num_speculative_tokens = 2
  found = systems.parse(f"ngram,model,model:draft={target},hf", given)
  pairs = systems.assemble(found)
  assert list(pairs) == ["plain", "ngram", "model", f"model:draft={target}"]
  assert len({id(p.params.target) for p in pairs.values()}) == 1
  assert pairs["ngram"].params.draft is None
  assert pairs["model"].params.draft is not None
  engines = systems.engines(found, pairs, 0.5)
  assert {e.temperature for e in engines.values()} == {0.5}
  assert engines["plain"].decoder.drafter.tree.num_nodes == 1
  assert engines["model"].decoder.drafter.tree.num_nodes == 3
