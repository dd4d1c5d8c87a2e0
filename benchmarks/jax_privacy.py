"""One step of JAX Privacy and of plain JAX, both under `jit`, on networks of the sizes of `tasks.TASKS`.

A step is: clipped sum of the records' gradients, noise, average, SGD update, on one fixed batch. Nothing is
sampled and nothing is written down, as in the engine's row of `step_time.py` (`ours`). Products are float32.

    python benchmarks/jax_privacy.py                      # needs jax and jax_privacy; says so where they miss
    python benchmarks/jax_privacy.py --tasks mlp lm-64 --seconds 1

It prints a row for each network as it ends: milliseconds of both, their ratio, and steps that were timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# This file has the name of the package, and its folder comes first where it is run.
sys.path = [folder for folder in sys.path if Path(folder or ".").resolve() != Path(__file__).resolve().parent]
# The other libraries of a comparison need memory too; JAX would take three quarters of it at once.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax_privacy.clipping import clipped_grad
except ImportError as error:
    sys.exit(
        f"nothing measured: {error}. JAX and JAX Privacy are installed beside the library, never with it"
    )

Network = tuple[Any, Callable[[Any, Any], Any], tuple[Any, ...]]  # parameters, loss of a batch, the batch

NUMBERS = np.random.default_rng(0)
CLASSES = 10


def _normal(*shape: int, scale: float = 1.0) -> Any:
    return jnp.asarray(NUMBERS.normal(size=shape) * scale, jnp.float32)


def _dense(inputs: int, outputs: int) -> dict[str, Any]:
    return {"weight": _normal(inputs, outputs, scale=inputs**-0.5), "bias": jnp.zeros(outputs)}


def _apply(layer: dict[str, Any], x: Any) -> Any:
    return x @ layer["weight"] + layer["bias"]


def _cross_entropy(logits: Any, labels: Any) -> Any:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -chosen.mean()


def mlp(batch: int) -> Network:
    """784-512-512-10 with ReLU."""
    layers = [_dense(784, 512), _dense(512, 512), _dense(512, CLASSES)]

    def loss(parameters: Any, records: Any) -> Any:
        x, label = records
        for layer in parameters[:-1]:
            x = jax.nn.relu(_apply(layer, x))
        return _cross_entropy(_apply(parameters[-1], x), label)

    return layers, loss, (_normal(batch, 784), jnp.asarray(NUMBERS.integers(0, CLASSES, batch)))


def _convolution(layer: dict[str, Any], x: Any, stride: int, padding: int) -> Any:
    found = jax.lax.conv_general_dilated(
        x,
        layer["weight"],
        (stride, stride),
        [(padding, padding)] * 2,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )
    return found + layer["bias"][None, :, None, None]


def _largest(x: Any) -> Any:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 1, 1), "VALID")


def cnn(batch: int) -> Network:
    """The tanh network of the literature on private training, for 28 x 28 pixels."""

    def kernel(inputs: int, outputs: int, size: int) -> dict[str, Any]:
        scale = (inputs * size * size) ** -0.5
        return {"weight": _normal(outputs, inputs, size, size, scale=scale), "bias": jnp.zeros(outputs)}

    layers = [kernel(1, 16, 8), kernel(16, 32, 4), _dense(512, 32), _dense(32, CLASSES)]

    def loss(parameters: Any, records: Any) -> Any:
        x, label = records
        x = _largest(jnp.tanh(_convolution(parameters[0], x, 2, 3)))
        x = _largest(jnp.tanh(_convolution(parameters[1], x, 2, 0)))
        x = jnp.tanh(_apply(parameters[2], x.reshape(len(x), -1)))
        return _cross_entropy(_apply(parameters[3], x), label)

    return layers, loss, (_normal(batch, 1, 28, 28), jnp.asarray(NUMBERS.integers(0, CLASSES, batch)))


def _norm(layer: dict[str, Any], x: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["weight"] + layer["bias"]


def language(
    batch: int,
    length: int,
    width: int = 256,
    blocks: int = 4,
    words: int = 2000,
    heads: int = 4,
    tied: bool = False,
) -> Network:
    """A causal transformer that predicts the next token at each position."""

    def norm() -> dict[str, Any]:
        return {"weight": jnp.ones(width), "bias": jnp.zeros(width)}

    def block() -> dict[str, Any]:
        sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width)}
        dense = {name: _dense(*size) for name, size in sizes.items()}
        return {**dense, "down": _dense(4 * width, width), "norm1": norm(), "norm2": norm()}

    parameters: dict[str, Any] = {
        "tokens": _normal(words, width, scale=0.02),
        "positions": _normal(length, width, scale=0.02),
        "blocks": [block() for _ in range(blocks)],
        "norm": norm(),
    }
    if not tied:
        parameters["head"] = _dense(width, words)

    def attention(layer: Any, x: Any) -> Any:
        count, places, _ = x.shape
        split = _apply(layer["qkv"], x).reshape(count, places, 3, heads, -1).transpose(2, 0, 3, 1, 4)
        query, key, value = split
        scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((places, places), bool)), scores, -1e30)
        mixed = (jax.nn.softmax(scores) @ value).transpose(0, 2, 1, 3).reshape(x.shape)
        return _apply(layer["out"], mixed)

    def loss(given: Any, records: Any) -> Any:
        (tokens,) = records
        x = given["tokens"][tokens[:, :-1]] + given["positions"]
        for layer in given["blocks"]:
            x = x + attention(layer, _norm(layer["norm1"], x))
            x = x + _apply(layer["down"], jax.nn.gelu(_apply(layer["up"], _norm(layer["norm2"], x))))
        x = _norm(given["norm"], x)
        logits = x @ given["tokens"].T if tied else _apply(given["head"], x)
        return _cross_entropy(logits, tokens[:, 1:])

    return parameters, loss, (jnp.asarray(NUMBERS.integers(0, words, (batch, length + 1))),)


GPT2_SMALL = {"width": 768, "blocks": 12, "words": 50_257, "heads": 12, "tied": True}
TASKS: dict[str, Callable[[], Network]] = {
    "mlp-16": partial(mlp, 16),
    "mlp": partial(mlp, 256),
    "mlp-1024": partial(mlp, 1024),
    "cnn-16": partial(cnn, 16),
    "cnn": partial(cnn, 256),
    "cnn-1024": partial(cnn, 1024),
    "lm-64": partial(language, 16, 64),
    "lm-256": partial(language, 16, 256),
    "gpt2-small": partial(language, 4, 128, **GPT2_SMALL),
}


def plain(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step of SGD."""
    gradient = jax.grad(loss)

    def step(parameters: Any, records: Any, key: Any) -> Any:
        found = gradient(parameters, records)
        return jax.tree.map(lambda value, change: value - 0.01 * change, parameters, found)

    return jax.jit(step)


def private(loss: Callable[..., Any], batch: int) -> Callable[..., Any]:
    """A step of DP-SGD with clip norm 1 and noise multiplier 1."""
    gradient = clipped_grad(loss, l2_clip_norm=1.0, normalize_by=float(batch), batch_argnums=1)

    def step(parameters: Any, records: Any, key: Any) -> Any:
        leaves, form = jax.tree.flatten(gradient(parameters, records))
        keys = jax.random.split(jax.random.fold_in(key, 1), len(leaves))
        noised = [
            leaf + jax.random.normal(one, leaf.shape) / batch for leaf, one in zip(leaves, keys, strict=True)
        ]
        change = jax.tree.unflatten(form, noised)
        return jax.tree.map(lambda value, moved: value - 0.01 * moved, parameters, change)

    return jax.jit(step)


def milliseconds(step: Callable[..., Any], parameters: Any, records: Any, seconds: float) -> list[float]:
    """Each step's time, once compiled."""
    key = jax.random.key(0)
    for _ in range(3):
        parameters = step(parameters, records, key)
    jax.block_until_ready(parameters)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        started = time.perf_counter()
        parameters = jax.block_until_ready(step(parameters, records, key))
        times.append(1e3 * (time.perf_counter() - started))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--seconds", type=float, default=0.3, help="time of each of a row's two measurements")
    given = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}", flush=True)
    for name in given.tasks:
        parameters, loss, records = TASKS[name]()
        batch = len(records[0])
        each = [
            milliseconds(step, parameters, records, given.seconds)
            for step in (plain(loss), private(loss, batch))
        ]
        own, noised = map(statistics.median, each)
        print(
            f"{name:12} plain {own:8.3f} ms, JAX Privacy {noised:8.3f} ms, ratio {noised / own:5.2f}, "
            f"{len(each[1])} steps",
            flush=True,
        )


if __name__ == "__main__":
    main()
