"""For all arrangements of the networks: generation equals scoring each text alone, uncached."""

import pytest
import torch

from raffia.algorithms.ilql import ILQLModel, make_target
from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
from raffia.algorithms.ilql.generate import generate
from raffia.algorithms.ilql.model_scorer import ModelScorer
from raffia.lm.decoding.beam import beam_search
from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.decoding.generations import Request, Stop
from raffia.lm.decoding.scorer import perturb

PAD, STOP = 0, Stop(tokens=(3, 7))
PROMPTS = [[1, 5, 6, 2], [4], [8, 9, 10, 11, 2, 4, 4, 1]]
SHAPES = {  # of the trunk
    "learned": {},
    "rotary": {"positions": "rotary"},
    "without biases": {"bias": False},
    "wide": {"n_embd": 64, "n_head": 4, "n_layer": 1},
    "narrow inside": {"dim_feedfwd": 12, "n_embd": 32},
}
NETWORKS = {
    "shared": {},
    "separate": {"policy": "separate", "target": "trunk"},
    "one head": {"double_q": False, "target": "trunk"},
    "own policy": {"policy": "separate", "double_q": False},
}
CONFIGS = {
    "greedy": DecodeConfig(adv_weight=3.0, num_beams=1, max_new_tokens=5),
    "sign": DecodeConfig(exp_adv=False, adv_weight=0.8, num_beams=1, max_new_tokens=5),
    "few": DecodeConfig(adv_weight=3.0, top_k=2, num_beams=1, max_new_tokens=5),
    "clipped": DecodeConfig(adv_weight=3.0, adv_clip=0.2, temperature=0.7, num_beams=1,
                            top_p=0.9, max_new_tokens=5),
    "policy": DecodeConfig(include_adv=False, num_beams=1, max_new_tokens=5),
    "values": DecodeConfig(include_logits=False, num_beams=1, max_new_tokens=5),
}  # fmt: skip


def networks(shape, names, dtype):
    trunk = {"vocab_size": 23, "n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 24}
    config = ILQLModelConfig(trunk=TrunkConfig(**(trunk | SHAPES[shape])), **NETWORKS[names])
    torch.manual_seed(3)
    model = ILQLModel(config)
    target = make_target(model)
    generator = torch.Generator().manual_seed(4)
    for module in (model, target):
        for parameter in module.parameters():
            scale = 1.8 if parameter.dim() > 1 else 0.9
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(scale / parameter.shape[-1] ** 0.5 * noise)
    return model.to(dtype).eval(), target.to(dtype)


@torch.no_grad()
def next_log_probs(model, target, text, config):
    """Log-probabilities of the next token of one text, from its start, without a cache."""
    tokens = torch.tensor([text])
    hidden = model.trunk(tokens)[:, -1]
    policy_hidden = model.policy(tokens)[:, -1] if model.config.policy == "separate" else hidden
    target_hidden = hidden if target.trunk is None else target.trunk(tokens)[:, -1]
    logits = model.policy_trunk.logits(policy_hidden).clone()
    logits[:, PAD] = -torch.inf
    q = torch.stack([head(target_hidden) for head in target.q_heads]).amin(0)
    advantage = q - model.v(hidden)
    forbidden = torch.zeros(logits.shape[-1], dtype=logits.dtype)
    forbidden[PAD] = -torch.inf
    return perturb(logits, advantage, config, forbidden)[0]


ARRANGEMENTS = [
    ("wide", "shared", torch.float32),
    ("wide", "separate", torch.float32),
    ("learned", "own policy", torch.float64),
    ("rotary", "one head", torch.float64),
    ("without biases", "one head", torch.float32),
    ("narrow inside", "own policy", torch.float32),
]


@pytest.mark.parametrize(("shape", "names", "dtype"), ARRANGEMENTS)
def test_a_beam_of_one_is_greedy_and_batched_beams_equal_single_ones(shape, names, dtype):
    model, target = networks(shape, names, dtype)
    scorer = ModelScorer(model, target)
    for config in CONFIGS.values():
        with torch.no_grad():
            beam = beam_search(Request.of(scorer, PROMPTS, config, stop=STOP, pad_token=PAD))
        greedy = generate(model, target, PROMPTS, config, stop=STOP, pad_token=PAD)
        assert beam.tokens == greedy.tokens
        torch.testing.assert_close(beam.log_prob, greedy.log_prob)
        for prompt, (tokens,), log_prob in zip(
            PROMPTS, greedy.tokens, greedy.log_prob, strict=True
        ):
            total = 0.0
            for position, token in enumerate(tokens):
                before = [*prompt, *tokens[:position]]
                log_probs = next_log_probs(model, target, before, config)
                assert log_probs[token] >= log_probs.max() - 1e-4
                total += log_probs[token].item()
            assert log_prob.item() == pytest.approx(total, abs=2e-3)
    config = DecodeConfig(adv_weight=2.0, num_beams=3, num_generations=3, max_new_tokens=6)
    together = generate(model, target, PROMPTS, config, stop=STOP, pad_token=PAD)
    for index, prompt in enumerate(PROMPTS):
        alone = generate(model, target, [prompt], config, stop=STOP, pad_token=PAD)
        assert alone.tokens[0] == together.tokens[index]
        for tokens, log_prob in zip(alone.tokens[0], together.log_prob[index], strict=True):
            total = 0.0
            for position, token in enumerate(tokens):
                before = [*prompt, *tokens[:position]]
                total += next_log_probs(model, target, before, config)[token].item()
            assert log_prob.item() == pytest.approx(total, abs=2e-3)
