"""The worker of `benchmarks.search` that plans with mctx, compiled by jax for the CPU, on one core.

Runs in the virtual environment that mctx lives in. mctx knows no value prefixes: what the model
predicts is taken as the reward. Its MLP is of the same sizes, its normalisation is folded into the
weights, and its two LSTM matrices are one.
"""

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mctx

from benchmarks.search_models import DISCOUNT, HEAD, LATENT, LSTM, OBSERVATION, SUPPORT
from benchmarks.search_worker import Case, Shares, clocked, serve

CACHE = Path.home() / ".cache" / "raffia-benchmarks" / "jax"  # compiling takes seconds a shape
POLICIES = {"muzero": mctx.muzero_policy, "gumbel": mctx.gumbel_muzero_policy}
EPSILON = 0.001

Parameters = dict[str, Any]


def layers_of(sizes: list[int], key: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    keys = jax.random.split(key, len(sizes))
    return [
        (jax.random.uniform(k, (n, m), minval=-1, maxval=1) * n**-0.5, jnp.zeros(m))
        for k, n, m in zip(keys, sizes, sizes[1:], strict=False)
    ]


def mlp_parameters(actions: int) -> Parameters:
    sizes = {
        "representation": [OBSERVATION, LATENT, LATENT],
        "dynamics": [LATENT + actions, LATENT, LATENT],
        "to_lstm": [LATENT, LATENT, LATENT],
        "lstm": [LATENT + LSTM, 4 * LSTM],
        "reward": [LSTM, HEAD, SUPPORT],
        "common": [LATENT, LATENT, LATENT],
        "value": [LATENT, HEAD, SUPPORT],
        "policy": [LATENT, HEAD, actions],
    }
    keys = jax.random.split(jax.random.key(0), len(sizes))
    return {name: layers_of(s, key) for (name, s), key in zip(sizes.items(), keys, strict=True)}


def mlp(layers: Any, x: jax.Array, last: Callable = jax.nn.relu) -> jax.Array:
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = layers[-1]
    return last(x @ weight + bias)


def linear(x: jax.Array) -> jax.Array:
    return x


def decoded(logits: jax.Array) -> jax.Array:
    v = jax.nn.softmax(logits) @ jnp.arange(-(SUPPORT // 2), SUPPORT // 2 + 1, dtype=jnp.float32)
    t = 2 * (abs(v) + 1 + EPSILON) / (jnp.sqrt(1 + 4 * EPSILON * (abs(v) + 1 + EPSILON)) + 1)
    return jnp.sign(v) * (t * t - 1)


def lstm_step(layer: Any, x: jax.Array, h: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    [(weight, bias)] = layer
    i, f, g, o = jnp.split(jnp.concatenate([x, h], 1) @ weight + bias, 4, axis=1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def predict(p: Parameters, latent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = mlp(p["common"], latent)
    return mlp(p["policy"], x, linear), decoded(mlp(p["value"], x, linear))


def mlp_root(p: Parameters, obs: jax.Array) -> mctx.RootFnOutput:
    x = mlp(p["representation"], obs, linear)
    latent = (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-5)
    policy_logits, value = predict(p, latent)
    zeros = jnp.zeros((len(obs), LSTM))
    return mctx.RootFnOutput(
        prior_logits=policy_logits, value=value, embedding=(latent, zeros, zeros)
    )


def mlp_step(
    p: Parameters, key: jax.Array, action: jax.Array, embedding: Any
) -> tuple[mctx.RecurrentFnOutput, Any]:
    latent, h, c = embedding
    num_actions = p["policy"][-1][1].shape[0]
    one_hot = jax.nn.one_hot(action, num_actions)
    latent = mlp(p["dynamics"], jnp.concatenate([latent, one_hot], 1)) + latent
    h, c = lstm_step(p["lstm"], mlp(p["to_lstm"], latent), h, c)
    policy_logits, value = predict(p, latent)
    output = mctx.RecurrentFnOutput(
        reward=decoded(mlp(p["reward"], h, linear)),
        discount=jnp.full(value.shape, DISCOUNT),
        prior_logits=policy_logits,
        value=value,
    )
    return output, (latent, h, c)


def null_root(p: Parameters, obs: jax.Array) -> mctx.RootFnOutput:
    batch = len(obs)
    embedding = tuple(jnp.zeros((batch, width)) for width in (LATENT, LSTM, LSTM))
    logits = jnp.broadcast_to(p["policy_logits"], (batch, len(p["policy_logits"])))
    return mctx.RootFnOutput(prior_logits=logits, value=jnp.zeros(batch), embedding=embedding)


def null_step(
    p: Parameters, key: jax.Array, action: jax.Array, embedding: Any
) -> tuple[mctx.RecurrentFnOutput, Any]:
    zeros = jnp.zeros(len(action))
    output = mctx.RecurrentFnOutput(
        reward=zeros,
        discount=zeros + DISCOUNT,
        prior_logits=jnp.broadcast_to(p["policy_logits"], (len(action), len(p["policy_logits"]))),
        value=zeros,
    )
    return output, embedding


class MctxSearch:
    def __init__(self, case: Case):
        root, step = {"null": (null_root, null_step), "mlp": (mlp_root, mlp_step)}[case.model]
        policy = POLICIES[case.policy]
        if case.model == "null":
            self.parameters: Parameters = {"policy_logits": jnp.zeros(case.actions)}
        else:
            self.parameters = mlp_parameters(case.actions)
        self.obs = jax.random.uniform(jax.random.key(1), (case.batch, OBSERVATION))
        self.key = jax.random.key(2)

        def search(p: Parameters, key: jax.Array, obs: jax.Array) -> Any:
            out = policy(p, key, root(p, obs), step, num_simulations=case.simulations)
            return out.action, out.action_weights, out.search_tree.summary().value

        def model_alone(p: Parameters, key: jax.Array, obs: jax.Array) -> Any:
            start = root(p, obs)

            def again(i: int, carry: Any) -> Any:
                output, embedding = step(p, key, jnp.zeros(len(obs), jnp.int32) + i % 2, carry[1])
                return output, embedding

            output, _ = step(p, key, jnp.zeros(len(obs), jnp.int32), start.embedding)
            return jax.lax.fori_loop(1, case.simulations, again, (output, start.embedding))

        self.search = jax.jit(search)
        self.model_alone = jax.jit(model_alone) if case.model != "null" else None
        if self.model_alone:
            self.call_model()

    def __call__(self) -> Any:
        return jax.block_until_ready(self.search(self.parameters, self.key, self.obs))

    def call_model(self) -> Any:
        assert self.model_alone
        return jax.block_until_ready(self.model_alone(self.parameters, self.key, self.obs))

    def shares(self) -> Shares:
        """The search is one program: what the model takes alone is the model's, the rest tree."""
        if not self.model_alone:
            return {"model": 0.0, "tree": 1.0, "glue": 0.0}
        whole = clocked(self, 1).cpu
        model = min(1.0, clocked(self.call_model, 1).cpu / whole)
        return {"model": model, "tree": 1.0 - model, "glue": 0.0}


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("mctx", "jax")}


if __name__ == "__main__":
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before jax counts the cores
    CACHE.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    serve(MctxSearch, versions)
