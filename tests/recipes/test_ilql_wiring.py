"""Every setting of ILQL acts where it should: what it changes is seen to change.

Each case is a setting, another value of it, and what else must be set for it to matter. A setting
that a case is missing for makes the last test fail.
"""

import json
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch

from raffia.algorithms.ilql.config import (
    DecodeConfig,
    ILQLConfig,
    ILQLLossConfig,
    ILQLModelConfig,
    OptimizerConfig,
    TargetConfig,
    TrunkConfig,
)
from raffia.algorithms.ilql.generate import generate
from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.algorithms.ilql.model import ILQLModel, make_target
from raffia.lm.data.dialogue import DataPoint, DialogueDataset, Vocabulary
from raffia.lm.decoding.config import TokenPlanConfig
from raffia.recipes.ilql.config import (
    BranchingSettings,
    DialogueDataConfig,
    ILQLEvaluateConfig,
    ILQLRun,
    LoRAConfig,
    ScriptsConfig,
    WordleConfig,
)
from raffia.recipes.ilql.data import make_corpus
from raffia.recipes.ilql.presets import ILQL_PRESETS

NUM_TOKENS = 9
POINTS = [
    DataPoint.from_tokens([0, 3, 1, 5, 2, 4, 6, 2], [2, 3, 5, 6], [0.0, 1.0, 0.5, -1.0]),
    DataPoint.from_tokens([0, 4, 1, 6, 2], [2, 3], [0.0, -1.0], terminal=False),
    DataPoint.from_tokens([0, 3, 1, 6, 2, 5], [2, 3], [0.25, 0.0]),
]
BATCH = DialogueDataset.of_points(POINTS, Vocabulary(NUM_TOKENS)).collate(POINTS)
UTTERANCES = DialogueDataset.of_points(POINTS, Vocabulary(NUM_TOKENS)).collate(
    POINTS, per_token=False
)


def changed(config, **settings):
    """By names with points: model.trunk.n_layer is model__trunk__n_layer."""
    for name, value in settings.items():
        first, _, rest = name.partition("__")
        own = changed(getattr(config, first), **{rest: value}) if rest else value
        config = replace(config, **{first: own})
    return config


# -- what is learnt

LEARNER = ILQLConfig(
    model=ILQLModelConfig(
        trunk=TrunkConfig(vocab_size=NUM_TOKENS, n_layer=1, n_head=2, n_embd=8, block_size=16)
    ),
    optimizer=OptimizerConfig(learning_rate=1e-2),
)
LEARNT = [
    ("loss__gamma", 0.5, {}),
    ("loss__tau", 0.9, {}),
    ("loss__beta", 1.0, {}),
    ("loss__exp_weights", False, {"loss__beta": 0.7}),
    ("loss__transition_weight", 0.5, {}),
    ("loss__clip_weight", 0.9, {"loss__beta": 2.0}),
    ("loss__value_min", 0.5, {}),
    ("loss__value_max", -0.5, {}),
    ("loss__awac_weight", 0.5, {}),
    ("loss__v_weight", 0.5, {}),
    ("loss__q_weight", 0.5, {}),
    ("loss__cql_weight", 0.5, {}),
    ("loss__cql_temp", 0.5, {}),
    ("loss__dm_weight", 0.5, {}),
    ("loss__dm_margin", 0.5, {"loss__dm_weight": 0.5}),
    ("loss__mc_returns", True, {}),
    ("loss__backup", "max", {}),
    ("loss__mask", "published", {}),
    ("target__alpha", 0.5, {}),
    ("target__interval", 2, {}),
    ("optimizer__learning_rate", 1e-3, {}),
    ("optimizer__value_rate", 3.0, {}),
    ("optimizer__weight_decay", 0.5, {}),
    ("optimizer__beta1", 0.5, {}),
    ("optimizer__beta2", 0.5, {}),
    ("optimizer__max_grad_norm", 1e-9, {}),
    ("optimizer__warmup_updates", 2, {}),
    ("optimizer__decay", "linear", {}),
    ("optimizer__final_share", 0.9, {"optimizer__decay": "cosine"}),
    ("model__policy", "separate", {}),
    ("model__target", "trunk", {}),
    ("model__double_q", False, {}),
    ("model__detach_v", True, {}),
    ("model__detach_q", True, {}),
    ("model__detach_pi", True, {}),
    ("model__per_token", False, {"loss__cql_weight": 0.0}),
    ("model__evolvable_heads", True, {}),
    ("model__max_head_layers", 2, {"model__evolvable_heads": True}),
    ("model__max_head_nodes", 20, {"model__evolvable_heads": True}),
    ("model__trunk__vocab_size", 11, {}),
    ("model__trunk__n_layer", 2, {}),
    ("model__trunk__n_head", 1, {}),
    ("model__trunk__n_embd", 12, {}),
    ("model__trunk__block_size", 20, {}),
    ("model__trunk__dim_feedfwd", 5, {}),
    ("model__trunk__dropout", 0.5, {}),
    ("model__trunk__layer_norm_eps", 0.1, {}),
    ("model__trunk__bias", False, {}),
    ("model__trunk__positions", "rotary", {}),
    ("model__trunk__activation", "ReLU", {}),
    ("precision", "bfloat16", {}),
]


def learnt(config):
    """All numbers of the state after three updates, by their names."""
    learner = ILQLLearner(config, num_updates=3)
    state = learner.init(0)
    batch = BATCH if config.model.per_token else UTTERANCES
    for _ in range(3):
        state = learner.apply(state, learner.grads(state, batch)[0])
    return {
        (entry, *((key,) if isinstance(key, str) else key)): tensor
        for entry in ("params", "target")
        for key, tensor in state[entry].items(True, True)
    }


def alike(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(("name", "value", "beside"), LEARNT)
def test_what_is_learnt_depends_on_it(name, value, beside):
    base = changed(LEARNER, **beside)
    before = learnt(base)
    assert alike(before, learnt(base))
    assert not alike(before, learnt(changed(base, **{name: value})))


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("alpha", [0.05, 1.0])
def test_the_slow_copy_moves_at_each_interval_as_in_a_plain_loop(alpha, interval):
    learner = ILQLLearner(changed(LEARNER, target=TargetConfig(alpha=alpha, interval=interval)))
    state = learner.init(0)
    slow = {key: tensor.clone() for key, tensor in state["target"].items(True, True)}
    for update in range(1, 8):
        state = learner.apply(state, learner.grads(state, BATCH)[0])
        if update % interval == 0:
            for key in slow:
                slow[key] = (1 - alpha) * slow[key] + alpha * state["params"][key]
        for key, tensor in state["target"].items(True, True):
            torch.testing.assert_close(tensor, slow[key], atol=1e-6, rtol=0)
    assert not torch.equal(slow[key], learner.init(0)["target"][key])


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_the_rate_of_each_update_as_in_a_plain_loop(decay):
    optimizer = OptimizerConfig(
        learning_rate=0.5, warmup_updates=4, decay=decay, final_share=0.2, value_rate=3.0
    )
    learner = ILQLLearner(changed(LEARNER, optimizer=optimizer), num_updates=20)
    for step in range(1, 21):
        done = max(0.0, (step - 4) / 16)
        share = {
            "constant": 1.0,
            "linear": 1 - 0.8 * done,
            "cosine": 0.2 + 0.8 * (1 + np.cos(np.pi * done)) / 2,
        }[decay]
        wanted = 0.5 * min(1.0, step / 4) * share
        assert learner.learning_rate(step) == pytest.approx(wanted, rel=1e-5)


# -- what is learnt from

SCRIPTS = [(f"wordle__scripts__{name.name}", 9.0, {}) for name in fields(ScriptsConfig)]
BRANCHES = [
    (f"wordle__branching__{name.name}", 2, {"wordle__games": "branching"})
    for name in fields(BranchingSettings)
]
GAMES = [
    ("wordle__num_words", 13, {}),
    ("wordle__words", "words.txt", {}),
    ("wordle__layout", "letters", {}),
    ("wordle__num_held_out", 4, {}),
    ("wordle__games", "branching", {}),
    ("wordle__num_games", 31, {}),
    ("wordle__data_seed", 1, {}),
    ("keep_best", 0.5, {}),
    *SCRIPTS,
    *BRANCHES,
]
DATA = [
    ("data__files", ("chats.jsonl", "others.jsonl"), {}),
    ("data__columns", ("chat=messages", "messages="), {}),
    ("data__roles", ("user=agent",), {}),
    ("data__tokenizer", "words", {}),
    ("data__max_len", 10, {"data__too_long": "cut"}),
    ("data__too_long", "skip", {"data__max_len": 10, "data__too_long": "cut"}),
    ("data__token_reward", -0.5, {}),
    ("data__held_out", 0.5, {}),
    ("data__split_seed", 1, {}),
    ("data__buckets", (40,), {}),
    ("data__sort_window", 8, {}),
]


def chat(number, text):
    return [
        {"role": "user", "content": f"say {number}"},
        {"role": "assistant", "content": text, "reward": float(number % 3)},
    ]


def write_files(folder):
    for name, numbers in (("chats", range(24)), ("others", range(24, 30))):
        rows = [
            {"messages": chat(n, "a" * (n % 5 + 1)), "chat": chat(n, "b" * (n % 3 + 1))}
            for n in numbers
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "words.txt").write_text(
        "\n".join(["crane", "slate", "adieu", "robot", "abbey", "tulip"])
    )


def seen_data(config):
    """The rows of both parts, and the first batches."""
    corpus = make_corpus(config, None)
    batches = corpus.learnt.batches(0, 0, 4)
    first = [next(batches)["tokens"].tolist() for _ in range(3)]
    rows = [point.tokens for point in corpus.learnt]
    held = [] if corpus.held_out is None else [point.tokens for point in corpus.held_out]
    rewards = [point.rewards for point in corpus.learnt]
    return corpus.tokenizer.num_tokens, rows, rewards, held, first


@pytest.mark.parametrize(("name", "value", "beside"), GAMES + DATA)
def test_what_is_learnt_from_depends_on_it(name, value, beside, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    config = replace(
        ILQL_PRESETS["ilql-smoke"],
        model=changed(ILQL_PRESETS["ilql-smoke"].model, trunk__block_size=96),
        wordle=WordleConfig(num_words=12, num_games=30),
    )
    if name.startswith("data"):
        data = DialogueDataConfig(files=("chats.jsonl",), columns=("chat=",), held_out=0.25)
        config = replace(config, task="data", data=data)
    if name == "wordle__words":
        config = changed(config, wordle__num_words=0)
    base = changed(config, **beside)
    before = seen_data(base)
    assert before == seen_data(base)
    assert before != seen_data(changed(base, **{name: value}))


# -- what is said

SPOKEN = [
    ("temperature", 0.2, {}),
    ("top_k", 2, {}),
    ("top_p", 0.3, {}),
    ("include_logits", False, {}),
    ("include_adv", False, {}),
    ("exp_adv", False, {"adv_weight": 0.9}),
    ("adv_weight", 5.0, {}),
    ("adv_clip", 0.0, {}),
    ("num_beams", 3, {}),
    ("num_generations", 2, {}),
    ("rerank", "value", {"num_generations": 4}),
    ("max_new_tokens", 3, {}),
    ("report_all", True, {"include_adv": False}),
    ("plan__num_simulations", 4, {}),
    ("plan__num_candidates", 2, {"plan__num_simulations": 24}),
    ("plan__max_depth", 1, {"plan__num_simulations": 24}),
    ("plan__discount", 0.1, {"plan__num_simulations": 24}),
    ("plan__policy", "muzero", {"plan__num_simulations": 24}),
    ("plan__inner_reward", "implied", {"plan__num_simulations": 24}),
    ("plan__noise", 5.0, {"plan__num_simulations": 24}),
]


def speakers():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ILQLModel(LEARNER.model)
        target = make_target(model)
        for head in (model.v, *target.q_heads):
            torch.nn.init.normal_(head[2].weight)
        torch.nn.init.normal_(model.trunk.wte.weight, std=0.4)
    return model, target


def said(config):
    """Texts after many prompts, and what is told of them."""
    draws = torch.Generator().manual_seed(0)
    prompts = [[a, b] for a in range(NUM_TOKENS) for b in range(NUM_TOKENS)]
    found = generate(*speakers(), prompts, config, generator=draws)
    return found.tokens, found.kl is None, found.value is None


@pytest.mark.parametrize(("name", "value", "beside"), SPOKEN)
def test_what_is_said_depends_on_it(name, value, beside):
    base = changed(DecodeConfig(adv_weight=1.0, max_new_tokens=6), **beside)
    before = said(base)
    assert before == said(base)
    assert before != said(changed(base, **{name: value}))


# -- all of them

ELSEWHERE = {
    TrunkConfig: {"kind", "gradient_checkpointing"},  # test_ilql_language_models
    DialogueDataConfig: {"malformed", "add_special_tokens"},  # test_ilql_settings
    LoRAConfig: {"rank", "alpha", "dropout", "layers", "learn_embeddings"},  # ..._language_models
    ILQLEvaluateConfig: {"every_updates", "num_episodes", "batch_size", "adv_weights"}
    | {"target_return", "env"},  # test_ilql, test_ilql_own_environment
    ILQLConfig: set(),
    ILQLRun: {"seed", "device", "num_threads", "task", "language_model", "num_updates"}
    | {"batch_size", "num_micro_batches", "compile"}  # test_ilql, test_ilql_settings
    | {"evaluators"},  # test_ilql_evaluators
}


def settings_of(kind):
    nested = {"trunk", "scripts", "branching", "plan"}
    nested |= {"model", "loss", "target", "optimizer", "decode", "wordle", "data", "lora"}
    nested |= {"evaluate", "population", "checkpoint", "learners", "engine"}
    return {entry.name for entry in fields(kind) if entry.name not in nested}


@pytest.mark.parametrize(
    "kind",
    [
        *(TrunkConfig, ILQLModelConfig, ILQLLossConfig, TargetConfig, OptimizerConfig),
        *(DecodeConfig, TokenPlanConfig, ILQLRun, DialogueDataConfig, WordleConfig, LoRAConfig),
        *(ScriptsConfig, BranchingSettings, ILQLEvaluateConfig),
    ],
)
def test_no_setting_is_without_a_case(kind):
    assert is_dataclass(kind)
    named = {name.rpartition("__")[2] for name, *_ in LEARNT + GAMES + DATA + SPOKEN}
    wanted = settings_of(kind) - ELSEWHERE.get(kind, set())
    assert wanted - named == set()
