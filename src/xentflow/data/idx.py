"""IDX files, the format of MNIST and its successors: read whole, checked against their own header, or refused.

An IDX file is two zero bytes, the type of an entry (8: unsigned byte), the number d of dimensions, d sizes as 32-bit
big-endian integers, and the entries. A file may be compressed by gzip. Every message starts with the file's path and
says what was expected and what came.
"""

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xentflow.errors import XentflowError

Split = Literal["train", "test"]
Bytes = NDArray[np.uint8]

_STEMS = {"train": "train", "test": "t10k"}
_PLURAL = {1: "1 dimension (labels)", 3: "3 dimensions (images)"}


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images ``(n, height, width)`` uint8, labels ``(n,)`` int64, and what each label is called."""

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.ndim != 3 or images.numel() == 0:
            raise XentflowError(
                f"images: expected non-empty uint8 (n, height, width), got {images.dtype} {tuple(images.shape)}"
            )
        if labels.dtype != torch.int64 or labels.shape != (len(images),):
            raise XentflowError(f"labels: expected int64 ({len(images)},), got {labels.dtype} {tuple(labels.shape)}")
        if labels.min() < 0 or labels.max() >= len(self.class_names):
            raise XentflowError(
                f"labels: expected 0 to {len(self.class_names) - 1}, got {int(labels.min())} to {int(labels.max())}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> int:
        """K, the number of classes."""
        return len(self.class_names)


def file_names(split: Split) -> tuple[str, str]:
    """The names, without ``.gz``, that the images and the labels of a split go by in every MNIST-format dataset."""
    if not isinstance(split, str) or split not in _STEMS:
        raise XentflowError(f'split: expected "train" or "test", got {split!r}')
    return f"{_STEMS[split]}-images-idx3-ubyte", f"{_STEMS[split]}-labels-idx1-ubyte"


def find(folder: Path, name: str) -> Path | None:
    """The file ``name`` in a folder, plain or else with ``.gz``; None where there is neither."""
    candidates = (folder / name, folder / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def read_bytes(path: Path) -> Bytes:
    """The content of a file, decompressed where its name ends in ``.gz``."""
    try:
        if path.suffix != ".gz":
            return np.fromfile(path, dtype=np.uint8)
        # bytearray makes the array writable, as torch wants its memory to be.
        return np.frombuffer(bytearray(gzip.decompress(path.read_bytes())), dtype=np.uint8)
    except EOFError:
        raise XentflowError(f"{path}: expected a whole gzip file, got one that is truncated") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise XentflowError(f"{path}: expected a gzip file, got one that is corrupt ({error})") from None
    except OSError as error:
        raise XentflowError(f"{path}: expected a readable file, got {error.strerror or error}") from None


def parse(content: Bytes, name: str, ndim: Literal[1, 3]) -> Bytes:
    """The entries of an IDX file of unsigned bytes, as an array of ``ndim`` dimensions without empty ones."""
    header = 4 + 4 * ndim
    if len(content) < header:
        raise XentflowError(f"{name}: expected an IDX header of {header} bytes, got a file of {len(content)} bytes")
    magic = bytes(content[:4])
    if magic != bytes((0, 0, 8, ndim)):
        raise XentflowError(
            f"{name}: expected an IDX file of unsigned bytes in {_PLURAL[ndim]}, magic 0000080{ndim}, got {magic.hex()}"
        )
    shape = tuple(int(size) for size in content[4:header].view(">u4"))
    expected = int(np.prod(shape, dtype=object))
    if expected == 0:
        raise XentflowError(f"{name}: expected at least one entry, got the shape {shape}")
    if len(content) - header != expected:
        state = "truncated" if len(content) - header < expected else "followed by something else"
        raise XentflowError(
            f"{name}: expected {expected} bytes for the shape {shape}, got {len(content) - header}: the file is {state}"
        )
    return content[header:].reshape(shape)


def read_idx(path: Path | str, ndim: Literal[1, 3]) -> Bytes:
    """Read and check one IDX file of unsigned bytes, plain or ``.gz``."""
    path = Path(path)
    return parse(read_bytes(path), str(path), ndim)


def pair(images: Bytes, labels: Bytes, class_names: Sequence[str], names: tuple[str, str]) -> LabelledImages:
    """Images with their labels, refused where they do not belong together."""
    if len(images) != len(labels):
        raise XentflowError(
            f"{names[1]}: expected one label for each of the {len(images)} images of {names[0]}, got {len(labels)}"
        )
    if labels.max() >= len(class_names):
        raise XentflowError(f"{names[1]}: expected labels from 0 to {len(class_names) - 1}, got {int(labels.max())}")
    return LabelledImages(torch.from_numpy(images), torch.from_numpy(labels).long(), tuple(class_names))


def load_mnist_format(
    folder: Path | str, split: Split = "train", class_names: Sequence[str] | None = None
) -> LabelledImages:
    """One split of any dataset in MNIST's four files, with structure checked and no checksum.

    folder: holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and the same with ``t10k``, each plain or
    ``.gz``; class_names: one for each class, by default "0", "1", … up to the largest label.
    """
    folder = Path(folder)
    found = [(name, find(folder, name)) for name in file_names(split)]
    for name, path in found:
        if path is None:
            raise XentflowError(f"{folder}: expected a file {name} or {name}.gz, got neither")
    images_path, labels_path = (cast(Path, path) for _, path in found)
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if class_names is None:
        class_names = [str(label) for label in range(int(labels.max()) + 1)]
    return pair(images, labels, class_names, (str(images_path), str(labels_path)))
