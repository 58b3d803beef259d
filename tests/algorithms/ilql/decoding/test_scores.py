"""`get_scores` and the sums of forced utterances, against the recorded cases."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from raffia.algorithms.ilql import ILQLModel, make_target
from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
from raffia.algorithms.ilql.generate import generate
from raffia.algorithms.ilql.scores import get_scores, score_utterances
from raffia.lm.decoding.config import DecodeConfig

PAD, END = 29, 30


def batch(oracle):
    rows = oracle.scores["batch"]

    def padded(name, fill):
        return pad_sequence([torch.tensor(r[name]).long() for r in rows], True, padding_value=fill)

    tokens, actions = padded("tokens", PAD), padded("action_idxs", 0)
    real = torch.tensor([len(row["action_idxs"]) for row in rows])
    return tokens, actions, tokens != PAD, torch.arange(actions.shape[1]) < real[:, None]


@pytest.mark.parametrize("name", ["adv", "both", "binary"])
def test_scores_are_the_recorded_ones(oracle, name):
    case = dict(oracle.scores["options"][name])
    sums = {name: case.pop(name) for name in ("sum", "norm") if name in case}
    row0, row2 = case.pop("row0_pos5"), case.pop("row2_pos4")
    tokens, actions, mask, action_mask = batch(oracle)
    networks, masks = (oracle.model, oracle.target), dict(attn_mask=mask, action_mask=action_mask)
    scores = get_scores(*networks, tokens, actions, **masks, **case)
    assert scores[0, 5].tolist() == pytest.approx(row0, abs=1e-9)
    assert scores[2, 4].tolist() == pytest.approx(row2, abs=1e-9)
    found = {"sum": scores.sum().item(), "norm": scores.norm().item()}
    assert {name: found[name] for name in sums} == pytest.approx(sums, rel=1e-9)


def test_scores_compute_nothing_at_padding(oracle):
    tokens, actions, mask, action_mask = batch(oracle)
    trunk, sizes = oracle.model.trunk, []
    count = lambda _, inputs, out: sizes.append(inputs[0].numel())  # noqa: E731
    hook = trunk.h[0].ln1.register_forward_hook(count)
    masks = dict(attn_mask=mask, action_mask=action_mask, include_logits=True)
    get_scores(oracle.model, oracle.target, tokens, actions, **masks)
    hook.remove()
    assert sizes and max(sizes) < tokens.numel() * trunk.n_embd


@pytest.mark.parametrize("number", range(3))
def test_forced_utterances(oracle, number):
    case = oracle.utterances[number]
    options = {"temperature" if k == "temp" else k: v for k, v in case["options"].items()}
    options = {"top_p": 1.0} | options  # recorded without a filter
    utterance = [ord(letter) - ord("a") for letter in case["word"]] + [END]
    sums = score_utterances(
        *(oracle.model, oracle.target, [case["prompt"]], [[utterance]], DecodeConfig(**options)),
        pad_token=PAD,
    )
    assert sums.log_prob.item() == pytest.approx(case["log_prob"], abs=1e-9)
    assert sums.kl.item() == pytest.approx(case["kl_term"], abs=1e-9)
    assert sums.advantage.item() == pytest.approx(case["advantage"], abs=1e-9)


def test_whole_utterances_have_one_value():
    shape = TrunkConfig(vocab_size=9, n_layer=1, n_head=1, n_embd=6, block_size=8)
    model = ILQLModel(ILQLModelConfig(trunk=shape, per_token=False)).double()
    target = make_target(model)
    config = DecodeConfig(include_adv=False)
    sums = score_utterances(model, target, [[1, 2], [3]], [[[4, 8]], [[5, 6, 8]]], config)
    with torch.no_grad():
        hidden = model.trunk(torch.tensor([[3, 5, 6, 8]]))[0]
        q = torch.minimum(target.q1(hidden[3]), target.q2(hidden[3]))
        v = model.v(hidden[0])
    assert sums.value[1].item() == pytest.approx(q.item())
    assert sums.advantage[1].item() == pytest.approx((q - v).item())
    with pytest.raises(ValueError, match="score utterances with score_utterances"):
        get_scores(model, target, torch.tensor([[1, 2]]), torch.tensor([[0]]))


def test_utterances_that_do_not_fit_the_prompts_are_refused(oracle):
    arguments = oracle.model, oracle.target, [[1], [2]], [[[3]], [[4], [5]]], DecodeConfig()
    with pytest.raises(ValueError, match="one list for each prompt, all of the same length"):
        score_utterances(*arguments)


def test_sums_equal_those_of_generate(oracle):
    config = DecodeConfig(adv_weight=2.0, num_generations=3, max_new_tokens=7)
    prompts = [[33], [32, 27, 27, 31], [33, 0, 17]]
    draws = torch.Generator().manual_seed(3)
    networks = oracle.model, oracle.target
    generated = generate(*networks, prompts, config, generator=draws, pad_token=PAD)
    forced = score_utterances(*networks, prompts, generated.tokens, config, pad_token=PAD)
    for name in ("log_prob", "kl", "advantage", "value"):
        found, expected = (getattr(sums, name) for sums in (forced, generated))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
