"""Every recorded case: next-token log-probabilities, greedy and beam continuations."""

import pytest
import torch

from raffia.algorithms.ilql.generate import generate
from raffia.algorithms.ilql.model_scorer import ModelScorer
from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.decoding.generations import forbid
from raffia.lm.decoding.scorer import Choice, Needs

PAD = 29
CASES = range(18)


def config_of(case, **more):
    options = {"temperature" if k == "temp" else k: v for k, v in case["options"].items()}
    return DecodeConfig(**{"top_p": 1.0} | options, **more)  # recorded without a filter


@pytest.mark.parametrize("number", CASES)
def test_recorded_cases(oracle, number):
    case = oracle.decode[number]
    scorer = ModelScorer(oracle.model, oracle.target)
    _, outputs = scorer.start([case["prompt"]], Needs(policy=True, values=True), 1)
    choice = Choice.of(outputs, config_of(case), forbid(PAD, scorer))
    expected = [-torch.inf if x is None else x for x in case["next_log_probs"]]
    assert choice.log_probs[0].tolist() == pytest.approx(expected, abs=1e-9)
    assert outputs.v.item() == pytest.approx(case["v"], abs=1e-9)
    assert outputs.target_q.max().item() == pytest.approx(case["max_target_q"], abs=1e-9)

    def texts(**options):
        prompts = [case["prompt"]]
        options = config_of(case, **options)
        return generate(oracle.model, oracle.target, prompts, options, pad_token=PAD)

    greedy = texts(num_beams=1, max_new_tokens=len(case["greedy"]))
    assert greedy.best() == [case["greedy"]]
    assert greedy.log_prob.item() == pytest.approx(case["greedy_logp"], abs=1e-9)
    assert "beam4" in case or not case["options"]["exp_adv"]  # binary ones have none on record
    if "beam4" in case:
        beams = texts(num_beams=4, num_generations=4, max_new_tokens=6)
        assert beams.tokens[0] == [beam["tokens"] for beam in case["beam4"]]
        log_probs = [beam["logp"] for beam in case["beam4"]]
        assert beams.log_prob[0].tolist() == pytest.approx(log_probs, abs=1e-9)
