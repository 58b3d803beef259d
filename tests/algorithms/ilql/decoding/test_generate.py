"""Properties of generation that hold for any weights."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from raffia.algorithms.ilql import ILQLModel, make_target
from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
from raffia.algorithms.ilql.generate import decode, generate, stream
from raffia.algorithms.ilql.model_scorer import ModelScorer
from raffia.algorithms.ilql.policy import ILQL_Policy
from raffia.algorithms.ilql.scores import score_utterances
from raffia.lm.data.rl_dataset import Vocabulary
from raffia.lm.decoding.config import DecodeConfig, TokenPlanConfig
from raffia.lm.decoding.generations import Request, Stop
from raffia.lm.transformer import CausalLM
from tests.marks import refusals

PAD = 29
PROMPTS = [[33, 0, 17, 14, 18, 4], [32], [33, 27, 27, 31, 4, 4, 4, 4, 2], [31, 5]]
STOP = Stop(tokens=(20, 15))  # tokens that come soon, at different steps
CONFIGS = {
    "greedy": DecodeConfig(adv_weight=2.0, num_beams=1, max_new_tokens=9),
    "sample": DecodeConfig(adv_weight=0.5, temperature=2.0, max_new_tokens=9),
    "several": DecodeConfig(adv_weight=0.5, num_generations=3, max_new_tokens=9),
    "filters": DecodeConfig(top_k=9, top_p=0.9, max_new_tokens=9),
    "few": DecodeConfig(adv_weight=2.0, top_k=4, top_p=0.95, max_new_tokens=9),  # Q of 4 tokens
    "beam": DecodeConfig(num_beams=3, num_generations=3, max_new_tokens=9),
    "policy": DecodeConfig(include_adv=False, num_beams=3, max_new_tokens=9),
    "values": DecodeConfig(include_logits=False, num_beams=2, max_new_tokens=9),
}


def draws():
    return torch.Generator().manual_seed(11)


def small(**options):
    shape = TrunkConfig(vocab_size=12, n_layer=2, n_head=2, n_embd=8, block_size=24, dropout=0.3)
    torch.manual_seed(1)
    model = ILQLModel(ILQLModelConfig(trunk=shape, **options)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # so that texts differ
    return model, make_target(model)


def assert_same(one, other, tolerance=1e-9):
    assert one.tokens == other.tokens
    for part in fields(one):
        a, b = getattr(one, part.name), getattr(other, part.name)
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
        elif part.name != "tokens":
            assert a is None and b is None


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_equals_uncached(oracle, uncached, name):
    config = replace(CONFIGS[name], report_all=True)
    cached = generate(
        *(oracle.model, oracle.target, PROMPTS, config), generator=draws(), stop=STOP, pad_token=PAD
    )
    expected = decode(Request.of(uncached, PROMPTS, config, stop=STOP, pad_token=PAD), draws())
    assert_same(cached, expected)
    lengths = {len(text) for texts in cached.tokens for text in texts}
    assert len(lengths) > 1  # the texts ended at different steps


@pytest.mark.parametrize("name", CONFIGS)
def test_batched_equals_one_by_one(oracle, name):
    assert_batched_equals_one_by_one(
        *(oracle.model, oracle.target, PROMPTS, CONFIGS[name]), stop=STOP, pad_token=PAD
    )


def assert_batched_equals_one_by_one(model, target, prompts, config, **options):
    """Checks one prompt at a time against the batch, which is returned."""
    batch = generate(model, target, prompts, config, generator=draws(), **options)
    generator = draws()
    for index, prompt in enumerate(prompts):
        alone = generate(model, target, [prompt], config, generator=generator, **options)
        assert alone.tokens[0] == batch.tokens[index]
        close = {"rtol": 0, "atol": 1e-9}
        torch.testing.assert_close(alone.log_prob[0], batch.log_prob[index], **close)
        assert alone.stopped[0].tolist() == batch.stopped[index].tolist()
    return batch


@pytest.mark.parametrize("seed", range(4))
def test_beam_search_with_enough_beams_is_exhaustive(seed):
    """With as many beams as there are texts, all texts are found."""
    shape = TrunkConfig(vocab_size=4, n_layer=1, n_head=1, n_embd=6, block_size=9)
    torch.manual_seed(seed)
    model = ILQLModel(ILQLModelConfig(trunk=shape)).double()
    target, end = make_target(model), 3
    config = DecodeConfig(num_beams=64, num_generations=64, max_new_tokens=3, adv_weight=3.0)
    found = generate(model, target, [[1, 2]], config, stop=Stop(tokens=(end,)))
    texts = [[a] for a in range(4)]
    for _ in range(2):
        texts = [
            longer
            for text in texts
            for longer in ([text] if text[-1] == end else [[*text, a] for a in range(4)])
        ]
    filled = found.log_prob[0] > -torch.inf
    assert sorted(texts) == sorted(text for text in found.tokens[0] if text)
    assert int(filled.sum()) == len(texts) == 40
    assert found.log_prob[0, filled].exp().sum().item() == pytest.approx(1.0)
    assert found.log_prob[0, filled].diff().max() <= 0


def test_beams_without_a_text_have_no_tokens():
    """Where only one token can follow at each step, there is one text for four beams."""
    torch.manual_seed(0)
    shape = TrunkConfig(vocab_size=130, n_layer=1, n_head=1, n_embd=6, block_size=9)
    model = ILQLModel(ILQLModelConfig(trunk=shape)).double()
    target = make_target(model)
    settings = {"top_k": 1, "max_new_tokens": 5, "report_all": True}
    config = DecodeConfig(num_beams=4, num_generations=4, **settings)
    found = generate(model, target, [[1, 2], [3]], config)
    greedy = generate(model, target, [[1, 2], [3]], DecodeConfig(num_beams=1, **settings))
    assert found.tokens == [[text, [], [], []] for text in greedy.best()]
    assert bool((found.log_prob[:, 1:] == -torch.inf).all()) and not bool(found.stopped.any())
    assert bool((found.advantage[:, 1:] == 0).all())
    assert_same(found.first(1), greedy)


def test_a_model_of_other_sizes_than_its_config_speaks():
    """As one from a folder may be: its own vocabulary and context count."""
    trunk = CausalLM(7, n_layer=1, n_head=2, n_embd=8, block_size=6)
    model = ILQLModel(ILQLModelConfig(), trunk=trunk)
    found = generate(model, make_target(model), [[1, 2]], DecodeConfig(), pad_token=0)
    [[text]] = found.tokens
    assert len(text) == 4 and not bool(found.stopped) and 1 <= min(text) <= max(text) <= 6
    policy = ILQL_Policy(SimpleNamespace(model=model, target=None), Vocabulary(7))
    assert policy.block_size == 6
    with pytest.raises(ValueError, match="the tokenizer has 8 tokens, but the model has 7"):
        ILQL_Policy(policy.agent, Vocabulary(8))


@pytest.mark.parametrize("broken", ["trunk", "q1"])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 1}, {"num_beams": 3}, {"plan": TokenPlanConfig()}]
)
def test_weights_that_are_not_finite_are_an_error(broken, options):
    model, target = small()
    parameter = model.trunk.ln_f.bias if broken == "trunk" else target.q1[2].bias
    with torch.no_grad():
        parameter[0] = torch.nan
    with pytest.raises(ValueError, match="the scores of the next token are NaN or infinite: look"):
        generate(model, target, [[1, 2], [3]], DecodeConfig(**options))


def test_hooks_of_heads_count():
    torch.manual_seed(0)
    shape = TrunkConfig(vocab_size=30, n_layer=1, n_head=2, n_embd=64, block_size=9)
    model = ILQLModel(ILQLModelConfig(trunk=shape))
    target, config = make_target(model), DecodeConfig(adv_weight=5.0, max_new_tokens=5)
    for head in target.q_heads:
        head.register_forward_hook(lambda head, hidden, found: 3 * found)
    found = generate(model, target, [[1, 2]], config, generator=draws())
    again = score_utterances(model, target, [[1, 2]], found.tokens, config)
    torch.testing.assert_close(found.log_prob, again.log_prob)


class Counting(ModelScorer):
    """Counts rows of each pass."""

    def start(self, *arguments):
        self.rows, outputs = super().start(*arguments)
        self.num_rows = [self.rows.num_rows]
        advance = self.rows.advance

        def counted(tokens):
            self.num_rows.append(len(tokens))
            return advance(tokens)

        self.rows.advance = counted
        return self.rows, outputs


PASSES = [
    (dict(), dict(), 6),
    (dict(), dict(include_adv=False), 6),
    (dict(), dict(num_beams=4), 6),
    (dict(policy="separate"), dict(), 12),
    (dict(policy="separate"), dict(include_adv=False), 6),
    (dict(policy="separate"), dict(adv_weight=0.0), 6),
    (dict(policy="separate"), dict(include_logits=False), 6),
    (dict(policy="separate", target="trunk"), dict(), 18),
    (dict(policy="separate", target="trunk"), dict(include_logits=False), 12),
    (dict(policy="separate", target="trunk"), dict(include_adv=False), 6),
    (dict(policy="separate", target="trunk"), dict(include_adv=False, report_all=True), 18),
    (dict(policy="separate", target="trunk"), dict(include_adv=False, rerank="value"), 18),
]


@pytest.mark.parametrize("arrangement, options, passes", PASSES)
def test_passes_for_six_tokens(arrangement, options, passes):
    """Each network that is needed reads the prompt once and each token but the last once."""
    model, target = small(**arrangement)
    runs, trunks = [], [model.trunk, getattr(model, "policy", None), target.trunk]
    for trunk in filter(None, trunks):
        trunk.ln_f.register_forward_hook(lambda *_: runs.append(1))
    scorer = Counting(model.eval(), target)
    config = DecodeConfig(**options, max_new_tokens=6)
    decode(Request(scorer, [[1, 2, 3]], config), draws())
    assert len(runs) == scorer.rows.num_passes == passes


@pytest.mark.parametrize("name", ["sample", "beam"])
def test_complete_texts_leave_the_batch_and_the_prompt_is_read_once(oracle, name):
    scorer = Counting(oracle.model, oracle.target)
    config = DecodeConfig(max_new_tokens=3, num_generations=4)
    found = decode(Request(scorer, [[33, 4], [32]], config), draws())
    assert scorer.num_rows == [2, 8, 8]
    assert len({tuple(text) for text in found.tokens[0]}) > 1
    scorer = Counting(oracle.model, oracle.target)
    config = CONFIGS[name]
    found = decode(Request.of(scorer, PROMPTS, config, stop=STOP, pad_token=PAD), draws())
    assert scorer.num_rows[-1] < max(scorer.num_rows)
    if name == "sample":
        lengths = [len(text) for text in found.best()]
        longer = [sum(length > at for length in lengths) for at in range(max(lengths))]
        assert scorer.num_rows == longer


def test_dropout_is_off_and_the_mode_is_as_before():
    model, target = small()
    model.train()
    config = DecodeConfig(max_new_tokens=6)
    one = generate(model, target, [[1]], config, generator=draws())
    assert model.training and model.trunk.h[0].training
    other = generate(model.eval(), target, [[1]], config, generator=draws())
    assert_same(one, other)
    assert not model.training and not one.log_prob.requires_grad


def test_dropout_is_off_until_the_last_of_several_streams_ends():
    model, target = small()
    model.train()
    first, second = (stream(model, target, [1], DecodeConfig(max_new_tokens=num)) for num in (1, 3))
    assert next(first) and next(second) and not list(first)
    assert not model.training
    assert len(list(second)) == 2 and model.training


def test_stops_at_tokens_a_condition_and_the_limit(oracle):
    def text(**options):
        config = DecodeConfig(num_beams=1, include_adv=False, max_new_tokens=6)
        prompt = oracle.decode[0]["prompt"]  # continues with 15 7 33 20 20 30
        return generate(oracle.model, None, [prompt], config, stop=Stop(**options), pad_token=PAD)

    assert text().best() == [[15, 7, 33, 20, 20, 30]] and not text().stopped.any()
    assert text(tokens=(7, 20)).best() == [[15, 7]] and text(tokens=(7, 20)).stopped.all()
    twice = text(condition=lambda tokens: tokens[-2:] == [20, 20])
    assert twice.best() == [[15, 7, 33, 20, 20]] and twice.stopped.all()


@pytest.mark.parametrize("num_beams", [None, 1])
def test_a_stream_gives_the_tokens_of_generate(oracle, num_beams):
    config = DecodeConfig(adv_weight=2.0, num_beams=num_beams, max_new_tokens=12)
    options = dict(stop=STOP, pad_token=PAD)
    arguments = oracle.model, oracle.target
    expected = generate(*arguments, [[33, 4]], config, generator=draws(), **options)
    steps = list(stream(*arguments, [33, 4], config, generator=draws(), **options))
    assert [step.token for step in steps] == expected.best()[0]
    assert sum(step.log_prob for step in steps) == pytest.approx(expected.log_prob.item())
    assert sum(step.advantage for step in steps) == pytest.approx(expected.advantage.item())
    assert steps[0].value - steps[0].v == pytest.approx(steps[0].advantage)
    assert steps[-1].value == pytest.approx(expected.value.item())


def test_without_prompts_or_without_values():
    model, target = small()
    found = generate(model, target, [], DecodeConfig(num_generations=2))
    assert found.tokens == [] and found.log_prob.shape == (0, 2)
    found = generate(model, None, [[1]], DecodeConfig(include_adv=False, max_new_tokens=2))
    assert len(found.best()[0]) == 2 and found.advantage is None
    assert found.kl.abs().max() < 1e-6  # the policy unchanged


NETWORKS, PLAIN = small(), DecodeConfig()
BEAMS, SEVERAL = DecodeConfig(num_beams=2), DecodeConfig(num_generations=2)
WRONG = [  # a call, and words of its error
    (lambda: generate(NETWORKS[0], None, [[1]], PLAIN), r"pass target=make_target\(model\)"),
    (lambda: generate(*NETWORKS, [[1], []], PLAIN), "prompt 1 has no tokens"),
    (lambda: generate(*NETWORKS, [[12]], PLAIN), "prompt 0 contains token 12, .* has 12 tokens"),
    (lambda: generate(*NETWORKS, [[1] * 24], PLAIN), "the model's context holds 24"),
    (lambda: generate(*NETWORKS, [[1]], PLAIN, pad_token=12), "pad_token=12 is not among"),
    (lambda: generate(*NETWORKS, [[1]], BEAMS, num_generations=3), "one text for each beam"),
    (lambda: generate(*small(per_token=False), [[1]], PLAIN), "one number for a whole utterance"),
    (lambda: stream(*NETWORKS, [1], BEAMS), "stream"),
    (lambda: stream(*NETWORKS, [1], SEVERAL), "stream"),
    (lambda: stream(*NETWORKS, [], PLAIN), "prompt 0 has no tokens"),
    (lambda: DecodeConfig(num_beams=2, plan=TokenPlanConfig()), "planning, which chooses the tok"),
]
test_wrong_arguments_are_refused = refusals(WRONG)


@pytest.mark.parametrize("by", ["log_prob", "advantage", "value"])
@pytest.mark.parametrize("num_beams", [None, 4])
def test_generations_are_re_ranked(oracle, by, num_beams):
    config = DecodeConfig(num_generations=4, num_beams=num_beams, max_new_tokens=5)
    plain, ordered = (
        generate(oracle.model, oracle.target, PROMPTS, c, generator=draws(), stop=STOP)
        for c in (config, replace(config, rerank=by))
    )
    scores = getattr(ordered, by)
    assert (scores.diff(dim=-1) <= 0).all()
    for row, (one, other) in enumerate(zip(plain.tokens, ordered.tokens, strict=True)):
        assert sorted(one) == sorted(other)
        best = getattr(plain, by)[row].argmax()
        assert other[0] == one[best]
