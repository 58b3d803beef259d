"""Whatever the networks: what is generated is what they say of each text by itself, read anew."""

import pytest
import torch

from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
from raffia.algorithms.ilql.generate import generate
from raffia.algorithms.ilql.model import ILQLModel, make_target
from raffia.algorithms.ilql.model_scorer import ModelScorer
from raffia.lm.decoding.beam import beam_search
from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.decoding.generations import Stop
from raffia.lm.decoding.perturb import perturb
from raffia.lm.decoding.request import Request
from raffia.lm.lora import add_lora

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


def networks(shape, names, dtype, lora=False):
    trunk = {"vocab_size": 23, "n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 24}
    config = ILQLModelConfig(trunk=TrunkConfig(**(trunk | SHAPES[shape])), **NETWORKS[names])
    torch.manual_seed(3)
    model = ILQLModel(config)
    if lora:
        add_lora(model.trunk, rank=2)
    target = make_target(model)
    generator = torch.Generator().manual_seed(4)
    for module in (model, target):
        for parameter in module.parameters():
            if parameter.requires_grad or module is target:
                scale = 0.6 if parameter.dim() > 1 else 0.3
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.add_(scale / parameter.shape[-1] ** 0.5 * noise * 3)
    return model.to(dtype).eval(), target.to(dtype)


@torch.no_grad()
def next_log_probs(model, target, text, config):
    """Of one text, from its beginning on, without anything kept."""
    tokens = torch.tensor([text])
    hidden = model.trunk(tokens)[:, -1]
    spoken = model.policy(tokens)[:, -1] if model.config.policy == "separate" else hidden
    slow = hidden if target.trunk is None else target.trunk(tokens)[:, -1]
    logits = model.policy_trunk.logits(spoken).clone()
    logits[:, PAD] = -torch.inf
    q = torch.stack([head(slow) for head in target.q_heads]).amin(0)
    advantage = q - model.v(hidden)
    forbidden = torch.zeros(logits.shape[-1], dtype=logits.dtype)
    forbidden[PAD] = -torch.inf
    return perturb(logits, advantage, config, forbidden)[0]


def plain_greedy(model, target, prompt, config):
    text, total = list(prompt), 0.0
    for _ in range(config.max_new_tokens):
        log_probs = next_log_probs(model, target, text, config)
        text.append(int(log_probs.argmax()))
        total += log_probs.max().item()
        if text[-1] in STOP.tokens:
            break
    return text[len(prompt) :], total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "names", "dtype"),
    [
        ("learned", "separate", torch.float64),
        ("rotary", "shared", torch.float64),
        ("wide", "one head", torch.float64),
        ("learned", "shared", torch.float32),
        ("rotary", "own policy", torch.float32),
        ("without biases", "one head", torch.float32),
        ("wide", "shared", torch.float32),
        ("wide", "separate", torch.float32),
        ("narrow inside", "own policy", torch.float32),
    ],
)
def test_greedy_texts_are_those_read_anew_one_by_one(shape, names, dtype):
    model, target = networks(shape, names, dtype)
    close = 1e-9 if dtype == torch.float64 else 2e-3
    for config in CONFIGS.values():
        said = generate(model, target, PROMPTS, config, stop=STOP, pad_token=PAD)
        for number, prompt in enumerate(PROMPTS):
            tokens, total = plain_greedy(model, target, prompt, config)
            assert said.tokens[number] == [tokens]
            assert said.log_prob[number].item() == pytest.approx(total, abs=close)


@pytest.mark.parametrize("names", ["shared", "separate"])
def test_a_beam_of_one_is_greedy_and_more_beams_are_batched_as_alone(names):
    model, target = networks("wide", names, torch.float32)
    scorer = ModelScorer(model, target)
    for config in CONFIGS.values():
        with torch.no_grad():
            beam = beam_search(Request.of(scorer, PROMPTS, config, stop=STOP, pad_token=PAD))
        greedy = generate(model, target, PROMPTS, config, stop=STOP, pad_token=PAD)
        assert beam.tokens == greedy.tokens
        torch.testing.assert_close(beam.log_prob, greedy.log_prob)
    config = DecodeConfig(adv_weight=2.0, num_beams=3, num_generations=3, max_new_tokens=6)
    together = generate(model, target, PROMPTS, config, stop=STOP, pad_token=PAD)
    for number, prompt in enumerate(PROMPTS):
        alone = generate(model, target, [prompt], config, stop=STOP, pad_token=PAD)
        assert alone.tokens[0] == together.tokens[number]
        for tokens, log_prob in zip(alone.tokens[0], together.log_prob[number], strict=True):
            total = 0.0
            for place, token in enumerate(tokens):
                before = [*prompt, *tokens[:place]]
                total += next_log_probs(model, target, before, config)[token].item()
            assert log_prob.item() == pytest.approx(total, abs=2e-3)
