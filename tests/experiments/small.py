"""A small dataset in MNIST's format, and settings that run through it in a moment."""

import struct

import numpy as np
import torch

from xentflow.data import LabelledImages
from xentflow.experiments.reproduce import ReproduceConfig

NAMES = ("T-shirt/top", "Trouser", "Bag")


def images(n=300, side=8, seed=0, names=NAMES):
    """One prototype for each class and much pixel noise: a linear classifier gets about four in five right."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(names), (n,), generator=generator)
    centres = torch.randint(90, 166, (len(names), side, side), generator=generator)
    pixels = centres[labels] + 90 * torch.randn(n, side, side, generator=generator)
    return LabelledImages(pixels.clamp(0, 255).to(torch.uint8), labels, names)


def write_files(folder, n=300):
    """The same as files; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data = images(n)
    for name, tensor in (("images-idx3", data.images), ("labels-idx1", data.labels)):
        array = tensor.numpy().astype(np.uint8)
        header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        (folder / f"train-{name}-ubyte").write_bytes(header + array.tobytes())
    return folder


def config(folder, **changes):
    settings = {"seeds": 2, "epochs": 4, "dataset": "files", "data_dir": str(folder), "neighbour_images": 20}
    return ReproduceConfig(**settings | changes)
