"""The audit's claims about transformers, on the installed one.

Its verification draws coins and a token: both are taken out of its hands, so
that the installed code itself is summed.
"""

import types

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel
from transformers.generation import candidate_generator, utils
from transformers.generation.logits_process import (
  LogitsProcessorList,
  TemperatureLogitsWarper,
)

from launch.studies.audit import __main__ as audit
from launch.studies.audit import shape

BY_NAME = {method.name: method for method in audit.METHODS}
_REJECTED = 1e30  # above every ratio


def verified(monkeypatch, tokens, said, target):
  """Entries of the installed verification of a path, given the coins."""
  logits = lambda laws: torch.tensor(np.log(np.maximum(laws, 1e-300)))[None]
  told = logits([said(tokens[:i]) for i in range(len(tokens))])
  new = logits([target(tokens[:i]) for i in range(len(tokens) + 1)])
  weight = 1.0
  for kept in range(len(tokens) + 1):
    seen = {}

    def coins(ratio, kept=kept, seen=seen):
      seen["ratio"] = ratio.flatten().tolist()
      forced = torch.full_like(ratio, _REJECTED)
      forced.flatten()[:kept] = 0
      return forced

    def draw(law, num_samples, seen=seen):
      seen["law"] = law.flatten().numpy()
      return torch.zeros((1, num_samples), dtype=torch.long)

    monkeypatch.setattr(torch, "rand_like", coins)
    monkeypatch.setattr(torch, "multinomial", draw)
    _, matches = utils._speculative_sampling(
      torch.tensor([[0, *tokens]]), told, len(tokens), new
    )
    monkeypatch.undo()
    assert int(matches) == kept
    accept = min(1.0, seen["ratio"][kept]) if kept < len(tokens) else 0.0
    if weight * (1 - accept) > 1e-14:
      yield weight * (1 - accept), tokens[:kept], seen["law"]
    weight *= accept


def installed(monkeypatch, paths, said):
  """The installed verification, as a method."""

  def rounds(draft, target, depth):
    for weight, tokens in paths(draft, depth):
      for mass, kept, law in verified(monkeypatch, tokens, said(draft), target):
        yield weight * mass, kept, law

  return shape.Method(
    name="installed", source="", claim="", finding="", depth=2, rounds=rounds
  )


@pytest.mark.parametrize("instance", shape.INSTANCES, ids=lambda i: i.name)
def test_the_installed_verification_is_exact_if_it_is_told_the_truth(
  monkeypatch, instance
):
  method = installed(monkeypatch, shape.paths, lambda draft: draft)
  assert shape.outcome(method, instance).distance < 1e-12


@pytest.mark.parametrize("instance", shape.INSTANCES, ids=lambda i: i.name)
def test_the_installed_verification_of_gemma_4s_drafts_is_as_far_off_as_said(
  monkeypatch, instance
):
  greedy = lambda draft, depth: [(1.0, shape.most_likely(draft, depth))]
  method = installed(monkeypatch, greedy, lambda draft: draft)
  expected = shape.outcome(BY_NAME["transformers, Gemma 4 assistant"], instance)
  actual = shape.outcome(method, instance)
  assert actual.distance == pytest.approx(expected.distance, abs=1e-12)


class Gemma4AssistantStub(torch.nn.Module):
  """Gemma 4's assistant as the generator sees it: the same law always."""

  device = torch.device("cpu")
  generation_config = GenerationConfig(num_assistant_tokens=2)
  logits = torch.tensor([0.1, 1.0, 0.9])

  def forward(self, inputs_embeds, **_):
    return types.SimpleNamespace(
      logits=self.logits[None, None], last_hidden_state=torch.zeros(1, 1, 4)
    )


def test_the_installed_gemma_4_generator_reports_a_law_it_did_not_draw_from():
  stub = Gemma4AssistantStub()
  kind = candidate_generator.SinglePositionMultiTokenCandidateGenerator
  generator = kind(
    stub, torch.nn.Embedding(3, 4), GenerationConfig(max_length=20)
  )
  tokens, logits = generator.get_candidates(
    torch.tensor([[0, 2]]),
    model_kwargs={},
    model_outputs=types.SimpleNamespace(
      hidden_states=[torch.zeros(1, 2, 4)], shared_kv_states={}
    ),
    is_first_iteration=False,
    n_last_matches=0,
  )
  assert tokens[0, 2:].tolist() == [1, 1]  # the likeliest, whatever the seed
  torch.testing.assert_close(logits[0], stub.logits.expand(2, 3))


def test_the_installed_assistant_model_is_warped_twice_and_says_so():
  torch.manual_seed(0)
  config = GPT2Config(
    vocab_size=11,
    n_embd=8,
    n_layer=1,
    n_head=1,
    bos_token_id=None,
    eos_token_id=None,
  )
  model = GPT2LMHeadModel(config).eval()
  model.generation_config.num_assistant_tokens = 2
  model.generation_config.assistant_confidence_threshold = 0.0
  text = torch.tensor([[1, 2, 3]])
  generator = candidate_generator.AssistedCandidateGenerator(
    input_ids=text,
    assistant_model=model,
    generation_config=GenerationConfig(
      do_sample=True, temperature=0.5, top_k=0, min_length=0, max_length=20
    ),
    model_kwargs={"attention_mask": torch.ones_like(text)},
    logits_processor=LogitsProcessorList([TemperatureLogitsWarper(0.5)]),
  )
  _, logits = generator.get_candidates(text)
  with torch.no_grad():
    raw = model(text).logits[0, -1]
  torch.testing.assert_close(logits[0, 0], 4 * raw, rtol=1e-4, atol=1e-5)
