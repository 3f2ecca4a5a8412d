import io

import pytest
import torch
from rich.console import Console
from small import config, write_files

from xentflow.experiments.reproduce import load, reproduce


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="session")
def finished(files, tmp_path_factory):
    """The folder of a finished run without its report."""
    output = tmp_path_factory.mktemp("finished")
    settings = config(files)
    reproduce(settings, output, load(settings), Console(file=io.StringIO()))
    return output


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
