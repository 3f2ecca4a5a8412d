"""What every test shares: the ``--shapes`` option and a generator of its own for each test."""

import os
import sys
import zlib

# Tensors here are small, and tests run in one process a core: a second thread costs more than it brings, and far more
# on a busy machine. What reads this does so when it is first imported, in tests' own subprocesses too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption(
        "--shapes",
        action="store_true",
        help="check every annotated shape and type in xentflow at run time (jaxtyping with beartype)",
    )


def pytest_configure(config):
    torch.set_num_threads(1)
    if not config.getoption("--shapes"):
        return
    if "xentflow" in sys.modules:
        raise pytest.UsageError("--shapes: xentflow was imported before its import hook could be installed")
    from jaxtyping import install_import_hook

    install_import_hook("xentflow", "shapes.typechecker")


def pytest_ignore_collect(collection_path, config):
    # Checked annotations refuse bad input before our own messages can, so those messages have nothing to say then.
    if config.getoption("--shapes") and collection_path.name == "bad_input":
        return True
    return None


@pytest.fixture
def generator(request):
    """Random numbers that depend on the test's own name alone: not on the order of tests, nor on global state."""
    return torch.Generator().manual_seed(zlib.crc32(request.node.name.encode()))
