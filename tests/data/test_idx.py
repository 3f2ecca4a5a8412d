"""IDX files: read right, or refused by a message that names the file and what is wrong with it."""

import gzip
import re

import numpy as np
import pytest
import torch
from idx_files import idx_bytes, small_files, write_folder

from xentflow.data import LabelledImages, load_mnist_format, read_idx
from xentflow.errors import XentflowError

IMAGES = np.arange(2 * 3 * 5).reshape(2, 3, 5)


def refused(path, ndim, message):
    with pytest.raises(XentflowError, match=re.escape(message)) as caught:
        read_idx(path, ndim)
    assert str(caught.value).startswith(str(path))


class TestRead:
    @pytest.mark.parametrize("name", ["file", "file.gz"])
    def test_plain_and_compressed(self, tmp_path, name):
        content = idx_bytes(IMAGES)
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        np.testing.assert_array_equal(read_idx(tmp_path / name, 3), IMAGES)

    def test_the_array_is_writable(self, tmp_path):
        # torch warns about memory it must not write to.
        (tmp_path / "file.gz").write_bytes(gzip.compress(idx_bytes(IMAGES)))
        torch.from_numpy(read_idx(tmp_path / "file.gz", 3))


class TestRefused:
    @pytest.mark.parametrize("kept", [0, 3, 15])
    def test_truncated_header(self, tmp_path, kept):
        (tmp_path / "file").write_bytes(idx_bytes(IMAGES)[:kept])
        refused(tmp_path / "file", 3, f"expected an IDX header of 16 bytes, got a file of {kept} bytes")

    def test_truncated_entries(self, tmp_path):
        (tmp_path / "file").write_bytes(idx_bytes(IMAGES)[:-1])
        refused(tmp_path / "file", 3, "expected 30 bytes for the shape (2, 3, 5), got 29: the file is truncated")

    def test_trailing_bytes(self, tmp_path):
        (tmp_path / "file").write_bytes(idx_bytes(IMAGES) + b"x")
        refused(tmp_path / "file", 3, "got 31: the file is followed by something else")

    def test_labels_where_images_belong(self, tmp_path):
        (tmp_path / "file").write_bytes(idx_bytes(np.arange(40)))
        refused(tmp_path / "file", 3, "unsigned bytes in 3 dimensions (images), magic 00000803, got 00000801")

    def test_another_type_of_entries(self, tmp_path):
        content = bytearray(idx_bytes(np.arange(4)))
        content[2] = 0x0D
        (tmp_path / "file").write_bytes(content)
        refused(tmp_path / "file", 1, "magic 00000801, got 00000d01")

    def test_an_empty_dimension(self, tmp_path):
        (tmp_path / "file").write_bytes(idx_bytes(np.zeros((0, 28, 28))))
        refused(tmp_path / "file", 3, "expected at least one entry, got the shape (0, 28, 28)")

    def test_sizes_whose_product_overflows(self, tmp_path):
        content = bytearray(idx_bytes(IMAGES))
        content[4:16] = b"\xff" * 12
        (tmp_path / "file").write_bytes(content)
        refused(tmp_path / "file", 3, f"expected {(2**32 - 1) ** 3} bytes")

    def test_truncated_gzip(self, tmp_path):
        (tmp_path / "file.gz").write_bytes(gzip.compress(idx_bytes(IMAGES))[:-5])
        refused(tmp_path / "file.gz", 3, "expected a whole gzip file, got one that is truncated")

    def test_corrupt_gzip(self, tmp_path):
        content = bytearray(gzip.compress(idx_bytes(IMAGES)))
        content[-6] ^= 0xFF
        (tmp_path / "file.gz").write_bytes(content)
        refused(tmp_path / "file.gz", 3, "expected a gzip file, got one that is corrupt")

    def test_no_gzip_at_all(self, tmp_path):
        (tmp_path / "file.gz").write_bytes(idx_bytes(IMAGES))
        refused(tmp_path / "file.gz", 3, "expected a gzip file, got one that is corrupt")

    def test_a_missing_file(self, tmp_path):
        refused(tmp_path / "file", 3, "expected a readable file, got No such file")


class TestMnistFormat:
    @pytest.mark.parametrize("compressed", [True, False])
    def test_both_splits(self, tmp_path, compressed):
        write_folder(tmp_path, small_files(n=12), compressed)
        train, test = load_mnist_format(tmp_path), load_mnist_format(tmp_path, "test", "abcdefghij")
        assert (len(train), len(test)) == (12, 6)
        assert train.images.shape == (12, 28, 28)
        assert (train.images.dtype, train.labels.dtype) == (torch.uint8, torch.int64)
        assert train.class_names == tuple(str(k) for k in range(int(train.labels.max()) + 1))
        assert test.class_names == tuple("abcdefghij")
        expected = np.random.default_rng(0).integers(0, 256, (12, 28, 28))
        np.testing.assert_array_equal(train.images.numpy(), expected)

    def test_a_missing_file(self, tmp_path):
        files = small_files()
        del files["train-labels-idx1-ubyte"]
        write_folder(tmp_path, files)
        with pytest.raises(XentflowError, match=r"train-labels-idx1-ubyte or train-labels-idx1-ubyte\.gz, got neither"):
            load_mnist_format(tmp_path)

    def test_labels_of_another_set(self, tmp_path):
        files = small_files()
        files["train-labels-idx1-ubyte"] = files["t10k-labels-idx1-ubyte"]
        write_folder(tmp_path, files)
        with pytest.raises(XentflowError, match=r"labels-idx1-ubyte\.gz: expected one label for each of the 12 images"):
            load_mnist_format(tmp_path)

    def test_too_few_class_names(self, tmp_path):
        write_folder(tmp_path, small_files())
        with pytest.raises(XentflowError, match="expected labels from 0 to 1, got"):
            load_mnist_format(tmp_path, class_names=["a", "b"])


class TestLabelledImages:
    @pytest.mark.parametrize(
        ("images", "labels", "message"),
        [
            (torch.zeros(2, 3, 3), torch.zeros(2, dtype=torch.long), "images: expected non-empty uint8"),
            (torch.zeros(2, 9, dtype=torch.uint8), torch.zeros(2, dtype=torch.long), "images: expected non-empty"),
            (torch.zeros(2, 3, 3, dtype=torch.uint8), torch.zeros(3, dtype=torch.long), "labels: expected int64 (2,)"),
            (torch.zeros(2, 3, 3, dtype=torch.uint8), torch.zeros(2), "labels: expected int64 (2,), got torch.float32"),
            (torch.zeros(2, 3, 3, dtype=torch.uint8), torch.tensor([0, 2]), "labels: expected 0 to 1, got 0 to 2"),
            (torch.zeros(2, 3, 3, dtype=torch.uint8), torch.tensor([-1, 0]), "labels: expected 0 to 1, got -1 to 0"),
        ],
    )
    def test_refuses_what_the_compiled_loop_could_not_bear(self, images, labels, message):
        with pytest.raises(XentflowError, match=re.escape(message)):
            LabelledImages(images, labels, ("a", "b"))
