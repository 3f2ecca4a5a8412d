"""Datasets: Fashion-MNIST, found or fetched and verified, and any folder of MNIST-format files."""

from xentflow.data.fashion import CLASS_NAMES, load_fashion_mnist
from xentflow.data.idx import LabelledImages, load_mnist_format, read_idx

__all__ = ["CLASS_NAMES", "LabelledImages", "load_fashion_mnist", "load_mnist_format", "read_idx"]
