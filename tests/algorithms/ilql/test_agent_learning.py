"""`ILQL` learns as its learner does, and its saved or cloned copies continue identically."""

import copy
import json
import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from raffia.algorithms.ilql import ILQL
from raffia.lm.lora import add_lora
from raffia.tensordict import DamagedFileError
from tests.marks import slow_among

from .agents import data, rows, same, small_agent, tensors_of, with_loss

SEPARATE = {"policy": "separate", "target": "trunk"}


@pytest.mark.parametrize("net", [{}, SEPARATE])
def test_an_update_is_that_of_torchs_adamw_on_the_loss(net):
    options = {"net": {"dropout": 0.0, **net}, "alpha": 0.25, "weight_decay": 0.1}
    # For a bias without effect (of keys) Adam would follow the rounding of its gradient
    agent, other = small_agent(**options).double(), small_agent(**options).double()
    optimizer = torch.optim.AdamW(other.model.parameters(), lr=1e-2, weight_decay=0.1)
    batches = agent.dataset.batches(0, 0, 4)
    for _ in range(3):
        batch = next(batches)
        agent.learn(batch)
        optimizer.zero_grad()
        other.get_loss(batch)[0].backward()
        optimizer.step()
        other.soft_update()
    for name, parameter in agent.named_parameters():
        torch.testing.assert_close(parameter, other.get_parameter(name), rtol=1e-6, atol=1e-7)


KINDS = {
    "plain": {"beta": 0.5},
    "separate": {"net": SEPARATE},
    "rotary": {"net": {"positions": "rotary"}},
    "one head": {"double_q": False, "clip_weight": 2.0},
    "utterances": {"per_token": False, "value_min": -1.0, "value_max": 1.0},
    "signs": {"exp_weights": False, "beta": 0.8, "transition_weight": 0.1},
    "detached": {"detach_v": True, "detach_q": True, "detach_pi": True, "net": SEPARATE},
    "decayed": {"weight_decay": 0.1, "dm_margin": 0.5, "cql_temp": 2.0, "gamma": 0.5},
}


@pytest.mark.parametrize("kind", slow_among(KINDS, "rotary", "one head", "signs", "decayed"))
def test_saved_and_cloned_agents_continue_bit_for_bit(tmp_path, kind):
    """In AgileRL the optimiser is empty after loading."""
    agent = small_agent(**KINDS[kind])
    agent.dm_weight = 0.0 if kind == "utterances" else 0.1
    agent.mc_returns = kind == "signs"
    agent.learn(), agent.learn()
    agent.save_checkpoint(tmp_path)
    saved = tensors_of(agent)
    others = [small_agent(seed=1, **KINDS[kind])]
    others.append(small_agent(seed=2, net={"n_layer": 1, "n_embd": 4}, double_q=False, tau=0.9))
    for other in others:
        other.load_checkpoint(tmp_path)
    others += [agent.clone(), ILQL.from_checkpoint(tmp_path, data())]
    agent.learn(), agent.learn()
    for again in others:
        assert same(tensors_of(again), saved) and again.config == agent.config
        assert again.learn()["loss"].isfinite()
        again.learn()
        assert same(tensors_of(again), tensors_of(agent))


def test_loaded_tensors_have_memory_of_their_own(tmp_path):
    """Within a file's memory they are not aligned, by which sums differ in the last bit."""
    agent = small_agent()
    agent.learn(), agent.save_checkpoint(tmp_path)
    again = ILQL.from_checkpoint(tmp_path)
    tensors = [*again.parameters(), *again.buffers()]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (*agent.parameters(), *tensors))
    sizes = [tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors]
    assert all(sizes)


def test_a_checkpoint_is_safetensors_and_json_and_has_no_data(tmp_path):
    agent = small_agent(index=3, mutation="tau", net={"max_layers": 4}).eval()
    agent.fitness = [1.0, 2.5]
    agent.learn(), agent.save_checkpoint(tmp_path / "a")
    kinds = {path.suffix for path in (tmp_path / "a").iterdir()}
    assert kinds == {".safetensors", ".json"}
    assert sum(path.stat().st_size for path in (tmp_path / "a").iterdir()) < 400_000
    json.loads((tmp_path / "a" / "manifest.json").read_text())
    again = ILQL.from_checkpoint(tmp_path / "a")
    attributes = [(a.index, a.mutation, a.fitness, a.step, a.batch_size) for a in (agent, again)]
    assert attributes[0] == attributes[1] and again.net_config == agent.net_config
    assert again.dataset is None and not again.training
    found = load_file(next((tmp_path / "a").glob("weights*.safetensors")))
    assert found.keys() == dict(agent.named_parameters()).keys()
    for name, parameter in agent.named_parameters():
        assert torch.equal(found[name], parameter), name  # each under its own name


def test_a_checkpoint_is_replaced_and_nothing_else_is(tmp_path):
    agent = small_agent()
    agent.save_checkpoint(tmp_path / "a")
    agent.learn(), agent.save_checkpoint(tmp_path / "a")
    assert ILQL.from_checkpoint(tmp_path / "a").step == 1
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("text")
    with pytest.raises(FileExistsError, match=r"thesis\.txt"):
        agent.save_checkpoint(tmp_path / "b")


def test_an_agent_stays_as_it_is_if_loading_fails(tmp_path):
    agent, other = small_agent(), small_agent(seed=1)
    other.learn()
    before = tensors_of(other)
    agent.learn(), agent.save_checkpoint(tmp_path)
    (file,) = tmp_path.glob("optimiser*")
    bytes_ = bytearray(file.read_bytes())
    bytes_[-5] ^= 1
    file.write_bytes(bytes_)
    with pytest.raises(DamagedFileError, match="not what was saved"):
        other.load_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="nothing"):
        other.load_checkpoint(tmp_path / "nothing")
    assert same(tensors_of(other), before)


def test_from_config_takes_all_settings_and_a_language_model():
    base = small_agent()
    config = replace(base.config, precision="bfloat16")
    trunk = copy.deepcopy(base.model.trunk)
    agent = ILQL.from_config(config, data(), trunk=trunk, index=4, batch_size=2)
    assert agent.model.trunk is trunk and (agent.index, agent.batch_size) == (4, 2)
    assert agent.learn()["loss"].isfinite()
    assert with_loss(agent, cql_weight=0.0).config.precision == "bfloat16"


def test_agents_learn_in_threads_as_they_do_alone():
    alone = [small_agent(net={"dropout": 0.0}, lr=rate) for rate in (1e-2, 1e-3)]
    together = [agent.clone() for agent in alone]
    for agent in alone:
        agent.learn(rows())
    threads = [threading.Thread(target=agent.learn, args=(rows(),)) for agent in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, together, strict=True):
        assert same(tensors_of(one), tensors_of(other))


def test_the_optimiser_s_moments_change_dtype_with_the_weights():
    agent = small_agent()
    agent.learn()
    agent.double().learn()
    assert all(p.dtype == torch.float64 for p in agent.parameters())
    assert agent.opt["language", "mean", "trunk", "wte", "weight"].dtype == torch.float64


def test_low_rank_changes_are_learnt_saved_and_loaded(tmp_path):
    def adapted(seed):
        agent = small_agent(seed=seed)
        add_lora(agent.model.trunk, rank=2)
        return agent

    agent = adapted(0)
    before = tensors_of(agent)
    agent.learn(), agent.learn()
    moved = {
        n for n, p in agent.model.named_parameters() if not torch.equal(p, before[f"model.{n}"])
    }
    assert moved == {n for n, p in agent.model.named_parameters() if p.requires_grad}
    agent.save_checkpoint(tmp_path)
    other = adapted(1)
    other.load_checkpoint(tmp_path)
    agent.learn(), other.learn()
    assert same(tensors_of(agent), tensors_of(other))
    with pytest.raises(ValueError, match="only in the checkpoint"):
        small_agent().load_checkpoint(tmp_path)
