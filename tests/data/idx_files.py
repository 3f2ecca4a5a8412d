"""Small IDX files, made by hand from the format's definition."""

import gzip
import struct

import numpy as np


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def small_files(seed: int = 0, n: int = 12) -> dict[str, bytes]:
    """The four files of a dataset in MNIST's format: n training images of 28 × 28, n/2 test images, labels 0 to 9."""
    rng = np.random.default_rng(seed)
    files = {}
    for stem, count in (("train", n), ("t10k", n // 2)):
        files[f"{stem}-images-idx3-ubyte"] = idx_bytes(rng.integers(0, 256, (count, 28, 28)))
        files[f"{stem}-labels-idx1-ubyte"] = idx_bytes(rng.integers(0, 10, count))
    return files


def write_folder(folder, files, compressed=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if compressed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder
