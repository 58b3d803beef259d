"""`ILQL`: losses and values against the numeric cases; use as a keyed module; its settings."""

import inspect
import json
import math
from typing import get_type_hints

import pytest
import torch

from raffia.algorithms.ilql import ILQL
from raffia.algorithms.ilql.agent import SETTINGS
from raffia.algorithms.ilql.agent_networks import GPT2
from raffia.algorithms.ilql.generate import generate, stream
from raffia.lm import CausalLM, DialogueDataset, character_tokenizer, save_gpt2
from raffia.lm.data.dialogue import Vocabulary
from raffia.lm.decoding.config import DecodeConfig
from raffia.nn import TensorDictModule, TensorDictSequential
from raffia.tensordict import TensorDict
from tests.marks import refusals

from .agents import SMALL, oracle_agent, rows, same, small_agent, tensors_of
from .small import HERE, ORACLE, TOLERANCE, WEIGHTS, batch_of, float32, result_of

CASES = [(b, mask, torch.float64) for b in "AB" for mask in ("strict", "published")]
CASES += [("B", "published", torch.float32)]
NAMES = list(ORACLE["results"]["A"])
KEYS = ("tokens", "state_idxs", "action_idxs", "attn_mask")


def agent_of(kind, name):
    case = result_of("A", "strict", name)
    options = {"tau": 0.7, **case["hp"]}
    target = "trunk" if options.pop("separate_target", True) else "heads"
    model_options = {k: options.pop(k) for k in list(options) if k.startswith("detach")}
    return oracle_agent(
        target=target, model_options=model_options, mask=kind, mc_returns=case["mc_returns"],
        **options, **WEIGHTS,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("batch", "kind", "dtype"), CASES)
def test_losses_values_and_weights_are_the_recorded_ones(batch, kind, name, dtype):
    expected, agent = result_of(batch, kind, name), agent_of(kind, name).to(dtype)
    rows, rel, close = batch_of(batch), 1e-9, TOLERANCE
    if dtype == torch.float32:
        rows, rel, close = float32(rows), 1e-4, {"rtol": 1e-4, "atol": 1e-5}
    real = rows["action_mask"]
    loss, metrics = agent.get_loss(rows)
    assert loss.item() == pytest.approx(expected["total"], rel=rel)
    for term in ORACLE["loss_weights"]:
        assert metrics[term].item() == pytest.approx(expected[term], rel=rel), term
    loss.backward()
    for part, norm in expected["grad_norm"].items():
        grads = [p.grad for p in agent.model.get_submodule(part).parameters()]
        assert math.hypot(*(g.norm().item() for g in grads)) == pytest.approx(norm, rel=rel)
    assert all(p.grad is None for p in agent.target.parameters())

    with torch.no_grad():
        found, weights = agent.get_qvs(rows), agent.get_weights(rows)
    torch.testing.assert_close(weights, torch.tensor(expected["weights"], dtype=dtype), **close)
    names = {"vs": "v", "q1": "q1", "q2": "q2", "target_q": "target_q", "bellman_target": None}
    for key in names.keys() & expected.keys():
        recorded = torch.tensor(expected[key], dtype=dtype)[:, : real.shape[1]]
        torch.testing.assert_close(found[names[key] or key][real], recorded[real], **close)
    assert not found["q1"][~real].any() and not found["next_v"][~real].any()
    if "logits_row0" in expected:
        logits = agent(*(rows[key] for key in KEYS)).logits[0, ::9].detach()
        recorded = torch.tensor(expected["logits_row0"], dtype=dtype)
        torch.testing.assert_close(logits, recorded, **close)


def test_soft_and_hard_updates_of_the_target():
    expected = json.loads((HERE / "target_update.json").read_text())
    agent = oracle_agent()
    agent.alpha = expected["alpha"]
    agent.soft_update()
    state = dict(agent.target.named_parameters())
    for name, total in expected["after_soft"].items():
        ours = name.replace("target_trunk", "trunk").replace("tq", "q")
        assert state[ours].sum().item() == pytest.approx(total, rel=1e-9), name
        norm = expected["frobenius"][name]
        assert state[ours].norm().item() == pytest.approx(norm, rel=1e-9), name
    agent.hardUpdate()
    for name, parameter in agent.target.named_parameters():
        assert torch.equal(parameter, agent.model.get_parameter(name)), name


@pytest.mark.parametrize("arrangement", ["shared", "separate"])
def test_prefix_embeddings_are_attended_to_and_have_no_outputs(arrangement):
    """In AgileRL it is never cut off, and a mask for it raises."""
    agent = small_agent(net={"dropout": 0.0, "policy": arrangement})
    for trunk in (agent.model.trunk, agent.model.policy_trunk):
        trunk.load_state_dict(agent.model.trunk.state_dict())
    tokens = torch.tensor([[1, 5, 6, 2, 7, 3]])
    full = agent(tokens, torch.tensor([[3, 4, 5]]), torch.tensor([[3, 4]]))
    prefix = agent.model.trunk.wte(tokens[:, :2]).detach()
    index = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2]])
    cut = agent(tokens[:, 2:], *index, prefix_embs=prefix)
    assert cut.logits.shape[1] == 4
    torch.testing.assert_close(cut.logits, full.logits[:, 2:])
    torch.testing.assert_close(cut.v, full.v)
    # Other rows before them, which the mask hides, change nothing
    hidden = torch.cat([torch.randn(1, 3, 8), prefix], 1)
    mask = torch.tensor([[False, False, False, True, True]])
    masked = agent(tokens[:, 2:], *index, prefix_embs=hidden, prefix_attn_mask=mask)
    torch.testing.assert_close(masked.target_q[0], full.target_q[0])
    position_embs = agent.model.trunk.wpe.weight[:2]
    embs = dict(prefix_embs=prefix + position_embs, remove_prefix_position_embs=True)
    moved = agent(tokens[:, 2:], *index, **embs)
    torch.testing.assert_close(moved.q[1], full.q[1])


@pytest.mark.parametrize("policy", ["shared", "separate"])
def test_the_policy_can_be_left_out_in_training_and_be_without_gradients(policy):
    agent, batch = small_agent(net={"policy": policy}), small_agent().prepare_inputs(rows())
    inputs = [batch[key] for key in KEYS]
    assert agent(*inputs, skip_policy_on_train=True).logits is None
    assert agent.eval()(*inputs, skip_policy_on_train=True).logits is not None
    assert agent(*inputs).logits.requires_grad
    bare = agent(*inputs, detach_full_policy=True)
    assert not bare.logits.requires_grad and bare.v.requires_grad


def test_no_logits_are_computed_that_are_not_used():
    """AgileRL computes the logits of three language models and does not use them."""
    agent = small_agent(net={"policy": "separate", "target": "trunk"})
    calls = []
    for name in ("trunk", "policy"):
        trunk = agent.model.get_submodule(name)
        trunk.logits = lambda hidden, name=name, old=trunk.logits: (
            calls.append(name),
            old(hidden),
        )[1]
    agent.target.trunk.logits = None
    batch = agent.prepare_inputs(rows())
    agent.get_qvs(batch), agent.get_weights(batch), agent.get_scores(batch)
    agent.select_out_keys("v", "target_q1")(TensorDict(batch, batch_size=[12]))
    assert not calls
    agent.get_loss(batch)
    assert calls == ["policy"]


def test_it_works_among_keyed_modules():
    agent, batch = small_agent().eval(), small_agent().prepare_inputs(rows())
    least = TensorDictModule(torch.minimum, ["target_q1", "target_q2"], ["least"])
    sequence = TensorDictSequential(agent, least)
    assert sequence.in_keys == list(KEYS)
    found = sequence(batch.copy())
    assert {"v", "q1", "q2", "target_q1", "logits", "least"} <= set(found.keys())
    plain = agent(*(batch[key] for key in KEYS))
    assert torch.equal(found["least"], torch.minimum(*plain.target_q))
    assert torch.equal(found["v"], plain.v)
    agent.select_out_keys("q1")
    found = agent(batch.select("tokens", "state_idxs", "action_idxs"))
    assert set(found.keys()) == {"tokens", "state_idxs", "action_idxs", "q1"}
    with pytest.raises(KeyError, match="action_idxs"):
        agent(batch.select("tokens", "state_idxs"))
    assert small_agent(double_q=False).out_keys == ["v", "q1", "target_q1", "logits"]


def test_settings_are_declared_with_the_types_that_the_config_gives_them():
    types = {name: kind for name, (_, _, kind) in SETTINGS.items()}
    declared = get_type_hints(ILQL)
    assert {name: declared.get(name) for name in types} == types


def test_the_published_arguments():
    names = inspect.signature(ILQL).parameters
    assert " ".join(names) == (
        "dataset net_config index batch_size lr alpha beta gamma tau mutation transition_weight "
        "clip_weight value_max value_min detach_v detach_q detach_pi double_q per_token "
        "exp_weights dm_margin cql_temp weight_decay device"
    )
    defaults = [p.default for p in names.values()][2:]
    assert defaults == [
        0, 64, 1e-5, 0.005, 0.0, 0.99, 0.6, None, 0.0, None, None, None, False, False, False, True,
        True, True, 0.0, 1.0, 0.0, "cpu",
    ]  # fmt: skip
    forward = list(inspect.signature(ILQL.forward).parameters)[1:]
    assert " ".join(forward) == (
        "tokens state_idxs action_idxs attn_mask prefix_embs prefix_attn_mask "
        "remove_prefix_position_embs qv_kwargs policy_kwargs target_kwargs skip_policy_on_train "
        "detach_full_policy"
    )


def test_the_published_description_is_gpt2s():
    assert inspect.signature(ILQL).parameters["net_config"].default is GPT2
    assert GPT2["vocab_size"] == 50257 and GPT2["dropout"] == 0.1 and GPT2["max_layers"] == 16
    small = ILQL(None, {**GPT2, "vocab_size": 9, "n_layer": 1, "n_embd": 24, "dim_feedfwd": 40})
    assert small.model.trunk.dropout == 0.1 and small.model.trunk.dim_feedfwd == 40
    assert small.net_config["min_layers"] == 8
    again = ILQL(None, small.net_config)
    assert again.config.model == small.config.model and again.layer_bounds == small.layer_bounds


def test_a_folder_of_gpt2_weights_or_a_language_model_is_a_trunk(tmp_path):
    trunk = CausalLM(11, n_layer=2, n_head=2, n_embd=8, block_size=32, dropout=0.0)
    save_gpt2(tmp_path, trunk.settings(), trunk.state_dict())
    tokens = torch.tensor([[1, 5, 6]])
    for net in (tmp_path, str(tmp_path), trunk):
        agent = ILQL(None, net)
        logits = agent(tokens, torch.tensor([[0, 1]]), torch.tensor([[0]])).logits
        torch.testing.assert_close(logits, trunk.logits(trunk(tokens)))
    assert agent.model.trunk is trunk and agent.config.model.trunk.n_layer == 2
    with pytest.raises(FileNotFoundError, match="no folder"):
        ILQL(None, tmp_path / "nothing")


def test_a_model_of_transformers_is_a_trunk(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = transformers.LlamaConfig(
        vocab_size=11, num_hidden_layers=1, hidden_size=8, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(shape).save_pretrained(tmp_path)
    agent = ILQL(small_agent().dataset, tmp_path, batch_size=4, lr=1e-2)
    before = agent.get_loss(rows())[0].item()
    for _ in range(5):
        agent.learn()
    assert agent.get_loss(rows())[0].item() < before
    agent.save_checkpoint(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"trunk=HFTrunk\.from_folder"):
        ILQL.from_checkpoint(tmp_path / "saved")
    again = agent.clone()
    again.load_checkpoint(tmp_path / "saved")
    parts = dict(trunk=ILQL(None, tmp_path).model.trunk, dataset=agent.dataset)
    other = ILQL.from_checkpoint(tmp_path / "saved", **parts)
    agent.learn(), again.learn(), other.learn()
    assert same(tensors_of(again), tensors_of(agent))
    assert same(tensors_of(other), tensors_of(agent))


class Plain(torch.utils.data.Dataset):
    """A torch dataset over a list of any items."""

    def __init__(self, points):
        self.points = points

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index]


@pytest.mark.parametrize("kind", [Plain, list])
def test_a_plain_dataset_of_points_is_learnt_from(kind):
    points, vocabulary = rows(), Vocabulary(SMALL["vocab_size"])
    plain, own = (
        small_agent(dataset, batch_size=2)
        for dataset in (kind(points), DialogueDataset.of_points(points, vocabulary))
    )
    for _ in range(5):
        assert plain.learn()["loss"] == own.learn()["loss"]
    assert torch.isfinite(plain.get_loss(points)[0])


STREAM = type("Stream", (torch.utils.data.IterableDataset,), {"__iter__": None})()
WITHOUT_DATA = ILQL(None, SMALL)
LONG = DialogueDataset.of_points(rows(), Vocabulary(11), max_len=64)


def described(**wrong):
    return lambda: ILQL(None, {**SMALL, **wrong})


def without_rewards():
    agent = small_agent()
    agent.get_loss(agent.prepare_inputs(rows()).exclude("rewards"))


test_what_does_not_fit_is_refused = refusals(
    [
        # settings
        (lambda: setattr(small_agent(), "tau", 1.5), r"tau=1\.5"),
        (lambda: setattr(small_agent(), "double_q", False), r"ILQL\.from_config"),
        (lambda: small_agent(batch_size=0), "batch_size=0"),
        (
            lambda: setattr(small_agent(per_token=False), "cql_weight", 0.1),
            ValueError,
            "one number",
        ),
        # descriptions of networks
        (described(n_layers=2), "unknown entry 'n_layers'.*n_layer"),
        (described(arch="mlp"), "only 'gpt'"),
        (described(activation="Relu"), "'Relu' must be one of 'GELU', 'ReLU'"),
        (described(min_layers=4, max_layers=2), "1 <= min_layers <= max_layers"),
        (lambda: ILQL(None, {"n_layer": 2}), "lacks 'vocab_size'"),
        # data
        (lambda: small_agent(net={"vocab_size": 9}), "11 tokens, but the model has 9"),
        (lambda: small_agent(LONG), "context is block_size=32"),
        (without_rewards, r"lacks \['rewards'\].*collate"),
        (lambda: small_agent(net={"block_size": 8}).learn(), "context holds 8"),
        (lambda: WITHOUT_DATA.prepare_inputs(rows()), "without a dataset"),
        (lambda: WITHOUT_DATA.learn(), "without a dataset"),
        (lambda: ILQL(STREAM, SMALL), TypeError, "no __len__ and no __getitem__: .*Iterable_RL_D"),
        (lambda: ILQL(Plain(["hi", "ho"]), SMALL), TypeError, "row 0 of the dataset is a str, not"),
        (lambda: ILQL(Plain([]), SMALL), "the dataset has no rows"),
    ]
)


def test_a_text_ends_where_the_tokenizer_says():
    """No token follows the end of an utterance."""
    tokenizer = character_tokenizer(["abc"])
    torch.manual_seed(0)
    agent = ILQL(None, {**SMALL, "vocab_size": tokenizer.num_tokens})
    end, pad = tokenizer.eoa_token_id, tokenizer.pad_token_id
    config = DecodeConfig(max_new_tokens=25, include_adv=False)

    def draws():
        return torch.Generator().manual_seed(0)

    arguments = agent.model, agent.target, [[1]] * 20, config
    texts = generate(*arguments, tokenizer=tokenizer, generator=draws()).tokens
    generated = [tokens for (tokens,) in texts]
    assert all(end not in tokens[:-1] and pad not in tokens for tokens in generated)
    assert sum(tokens[-1] == end for tokens in generated) > 10
    assert agent.generate([[1]] * 20, tokenizer, config, generator=draws()).tokens == texts
    (text,) = agent.generate([[1]], tokenizer, config, generator=draws()).tokens
    steps = stream(agent.model, None, [1], config, tokenizer=tokenizer, generator=draws())
    assert [step.token for step in steps] == text[0]


def test_a_cache_is_handed_to_the_language_models():
    agent = small_agent(net={"dropout": 0.0, "policy": "separate", "target": "trunk"})
    tokens = torch.tensor([[1, 5, 6, 2, 7]])
    index = torch.tensor([[0, 1]]), torch.tensor([[0]])
    full = agent(tokens, *index)
    trunks = agent.model.trunk, agent.model.policy, agent.target.trunk
    names = "qv_kwargs", "policy_kwargs", "target_kwargs"
    caches = {n: {"cache": trunk.new_cache(1)} for n, trunk in zip(names, trunks, strict=True)}
    with torch.no_grad():
        agent(tokens[:, :3], *index, **caches)
        rest = agent(tokens[:, 3:], *index, **caches)
    torch.testing.assert_close(rest.logits, full.logits[:, 3:])
    with pytest.raises(ValueError, match="called with qv_kwargs"):
        small_agent()(tokens, *index, policy_kwargs={"cache": None})
    with pytest.raises(ValueError, match="called with qv_kwargs"):
        small_agent().get_qvs(rows(), target_kwargs={"cache": None})
