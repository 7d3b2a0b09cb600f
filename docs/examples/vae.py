"""A variational autoencoder on eight devices, each of which draws noise of its own.

The model holds a stream of random numbers, and takes a key from it with `self.rngs.noise()`, as on
one device.  Under "shard_map" every device sees its own part of the batch, and its key is another
than its neighbours', so no two images are encoded with the same noise.  The stream that is left
in the model is the one that a single device would have left.

    python docs/examples/vae.py [--steps 600] [--out vae.png]
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from rich.progress import track
from sklearn.datasets import load_digits

import nnx_dp

BATCH, WIDTH, LATENT = 128, 128, 8


class VAE(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.encode = nnx.Sequential(
            nnx.Linear(64, WIDTH, rngs=rngs), nnx.relu, nnx.Linear(WIDTH, 2 * LATENT, rngs=rngs)
        )
        self.decode = nnx.Sequential(
            nnx.Linear(LATENT, WIDTH, rngs=rngs), nnx.relu, nnx.Linear(WIDTH, 64, rngs=rngs)
        )
        self.rngs = nnx.Rngs(noise=rngs.noise())

    def noise(self, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(self.rngs.noise(), shape)

    def __call__(self, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, 64] -> the logits of the decoded pixels, [B, 64], and the divergences, [B]"""
        mean, log_variance = jnp.split(self.encode(images), 2, axis=-1)
        latent = mean + jnp.exp(log_variance / 2) * self.noise(mean.shape)
        divergence = (jnp.exp(log_variance) + mean**2 - 1 - log_variance).sum(axis=-1) / 2
        return self.decode(latent), divergence


@nnx_dp.data_parallel(strategy="shard_map")
def train_step(model, optimizer, images):
    def loss_fn(model):
        logits, divergence = model(images)
        reconstruction = optax.sigmoid_binary_cross_entropy(logits, images).sum(axis=-1)
        return (reconstruction + divergence).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@nnx_dp.data_parallel(strategy="shard_map")
def noise_for(model, images):
    return model.noise((len(images), LATENT))


@nnx_dp.data_parallel(strategy="shard_map")
def reconstruct(model, images):
    return nnx.sigmoid(model(images)[0])


def plot(losses: list[float], images: np.ndarray, decoded: np.ndarray, path: Path) -> None:
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    left.plot(np.arange(len(losses)) + 1, losses, color="#0072b2", linewidth=1.2)
    left.set(title="Negative evidence lower bound", xlabel="step", ylabel="nats for each image")
    left.grid(axis="y", color="0.92")
    left.spines[["top", "right"]].set_visible(False)
    # One row of digits above the row of what they became, and so on: [2n, 8, 8, 8] is 2n by 8.
    tiles = np.stack([images.reshape(-1, 8, 8, 8), decoded.reshape(-1, 8, 8, 8)], axis=1)
    tiles = np.pad(tiles.reshape(-1, 8, 8, 8), ((0, 0), (0, 0), (1, 1), (1, 1)))
    right.imshow(tiles.swapaxes(1, 2).reshape(len(tiles) * 10, -1), cmap="gray_r")
    right.set(title="Digits above their reconstructions", xticks=[], yticks=[])
    right.spines[:].set_visible(False)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a VAE with noise of each device's own.")
    parser.add_argument("--steps", type=int, default=600, help="training steps")
    parser.add_argument("--out", type=Path, default=Path("vae.png"), help="the plot")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    images = (load_digits().data / 16).astype(np.float32)
    model = VAE(nnx.Rngs(0, noise=1))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    order = np.random.default_rng(0)
    losses = []
    for _ in track(range(arguments.steps), "training"):
        rows = order.choice(len(images), BATCH, replace=False)
        losses.append(float(train_step(model, optimizer, images[rows])))
    assert losses[-1] < losses[0]
    assert model.rngs.noise.count[...] == arguments.steps

    noise = np.asarray(noise_for(model, images[:BATCH]))
    assert len(np.unique(noise, axis=0)) == BATCH
    print(f"{jax.device_count()} devices drew {BATCH} rows of noise, and no two are the same.")

    shown = images[:32]
    plot(losses, shown, np.asarray(reconstruct(model, shown)), arguments.out)
    print(f"The loss fell from {losses[0]:.1f} to {losses[-1]:.1f}; see {arguments.out}.")


if __name__ == "__main__":
    main()
