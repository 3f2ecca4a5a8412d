"""A small training run on files, as the command does it."""

import struct
from pathlib import Path

import numpy as np
from small import images

from xentflow.experiments.train import TrainConfig, run


def write_both_splits(folder):
    """Training and test images in MNIST's format; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data = images(360)
    for stem, part in (("train", slice(0, 300)), ("t10k", slice(300, 360))):
        for name, tensor in (("images-idx3", data.images[part]), ("labels-idx1", data.labels[part])):
            array = tensor.numpy().astype(np.uint8)
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{stem}-{name}-ubyte").write_bytes(header + array.tobytes())
    return folder


def config(folder, **changes):
    settings = {"task": "files", "data_dir": str(folder), "network": "paper", "patch": 4, "steps": 120, "batch": 27}
    return TrainConfig(**settings | {"save_every": 3, "shift": 1, "learning_rate": 3e-3} | changes)


def train(folder, output):
    """The whole run, in a process that may be killed."""
    assert run(config(folder), Path(output)) == 0
