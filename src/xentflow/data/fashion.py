"""Fashion-MNIST: found on this machine or fetched, and never used unless its SHA-256 is right.

Looked for, in this order:

1. the folder given (``data_dir``), and no further where one is given;
2. the folder in the environment variable ``XENTFLOW_DATA``, and no further where it is set;
3. the cache, ``xentflow/fashion-mnist`` in ``XDG_CACHE_HOME`` (by default ``~/.cache``);
4. the folder that Debian's package ``dataset-fashion-mnist`` fills;
5. a download from the dataset's own address, or from a copy;
6. that Debian package, fetched by ``apt-get download`` and unpacked without being installed, which needs no root.

What 4 to 6 find is kept in the cache, uncompressed, so that the next load is a plain read. Checksums are of the
uncompressed content, since Debian compressed the files anew. Every file is written beside its place and then renamed:
a cache holds whole files or none.
"""

import getpass
import gzip
import hashlib
import os
import shutil
import subprocess
import tempfile
import urllib.request
import warnings
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path

import numpy as np

from xentflow.data.idx import Bytes, LabelledImages, Split, file_names, find, pair, parse, read_bytes
from xentflow.errors import XentflowError

CLASS_NAMES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""Of the uncompressed files."""

URLS = (
    "https://fashion-mnist.s3.eu-central-1.amazonaws.com",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
)
"""The dataset's own address, and the copy that Keras reads."""

SYSTEM_FOLDER = Path("/usr/share/datasets/fashion-mnist")
PACKAGE = "dataset-fashion-mnist"
CONNECT_SECONDS = 5.0
APT_SECONDS = 180.0

Files = dict[str, Bytes]


def cache_folder() -> Path:
    """Where verified files are kept; no folder is made by asking."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return root / "xentflow" / "fashion-mnist"


def load_fashion_mnist(
    split: Split = "train", data_dir: Path | str | None = None, *, fetch: bool = True
) -> LabelledImages:
    """One split of Fashion-MNIST: 60,000 ("train") or 10,000 ("test") images of 28 × 28.

    data_dir: a folder with the four files, plain or ``.gz``; fetch: whether the network may be used where no folder
    of this machine has them.
    """
    names = file_names(split)
    source = data_dir if data_dir is not None else os.environ.get("XENTFLOW_DATA") or None
    files = _from_folder(Path(source), names) if source is not None else _search(names, fetch)
    images, labels = parse(files[names[0]], names[0], 3), parse(files[names[1]], names[1], 1)
    return pair(images, labels, CLASS_NAMES, names)


def _search(names: tuple[str, ...], fetch: bool) -> Files:
    cache = cache_folder()
    installed = partial(_from_folder, SYSTEM_FOLDER, tuple(SHA256))
    attempts: list[tuple[str, Callable[[], Files]]] = [
        ("cache", partial(_from_folder, cache, names)),
        ("system folder", partial(_kept, installed, cache)),
    ]
    if fetch:
        for url in URLS:
            attempts.append(("download", partial(_kept, partial(_download, url), cache)))
        attempts.append((f"Debian package {PACKAGE}", partial(_kept, _from_debian, cache)))
    failures = []
    for name, attempt in attempts:
        try:
            return attempt()
        except (XentflowError, OSError) as error:
            failures.append(f"  {name}: {error}")
    remedy = "Put the four files in a folder and name it by data_dir or XENTFLOW_DATA."
    tried = "\n".join(failures)
    raise XentflowError(f"Fashion-MNIST: expected it in one of these places, got it from none:\n{tried}\n{remedy}")


def _from_folder(folder: Path, names: tuple[str, ...]) -> Files:
    files = {}
    for name in names:
        path = find(folder, name)
        if path is None:
            state = "got neither" if folder.is_dir() else "got no such folder"
            raise XentflowError(f"{folder}: expected a file {name} or {name}.gz, {state}")
        files[name] = _verified(read_bytes(path), name, str(path))
    return files


def _verified(content: Bytes, name: str, origin: str) -> Bytes:
    came = hashlib.sha256(content.data).hexdigest()
    if came != SHA256[name]:
        raise XentflowError(
            f"{origin}: expected the content of Fashion-MNIST's {name}, SHA-256 {SHA256[name]}, got {came} "
            f"({len(content)} bytes): the file is corrupt, truncated or another dataset's"
        )
    return content


def _kept(source: Callable[[], Files], cache: Path) -> Files:
    files = source()
    # The data is at hand and right: a cache that cannot be written costs time at the next load, not this result.
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _write(cache / name, content)
    except OSError as error:
        warnings.warn(f"{cache}: could not keep Fashion-MNIST there: {error.strerror or error}", stacklevel=4)
    return files


def _write(path: Path, content: Bytes) -> None:
    # One name for each process: two that fill the same cache at once do not write into each other's file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content.data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _download(address: str) -> Files:
    files = {}
    for name in SHA256:
        url = f"{address}/{name}.gz"
        try:
            with urllib.request.urlopen(url, timeout=CONNECT_SECONDS) as response:
                compressed = response.read()
            content = gzip.decompress(compressed)
        except (OSError, EOFError, zlib.error, HTTPException) as error:
            raise XentflowError(f"{url}: {getattr(error, 'reason', error)}") from None
        files[name] = _verified(np.frombuffer(bytearray(content), dtype=np.uint8), name, url)
    return files


def _from_debian() -> Files:
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise XentflowError(f"no {tool} on this machine")
    with tempfile.TemporaryDirectory(prefix="xentflow-") as folder:
        _download_package(folder)
        archives = list(Path(folder).glob(f"{PACKAGE}_*.deb"))
        if len(archives) != 1:
            raise XentflowError(f"apt-get download {PACKAGE}: expected one package file, got {len(archives)}")
        _run(["dpkg-deb", "-x", str(archives[0]), "unpacked"], folder)
        unpacked = Path(folder) / "unpacked" / SYSTEM_FOLDER.relative_to("/")
        return _from_folder(unpacked, tuple(SHA256))


def _download_package(folder: str) -> None:
    try:
        _run(["apt-get", "-q", "download", PACKAGE], folder)
    except XentflowError:
        # A fresh machine has no package lists yet, and only root may fetch them to where the system keeps them.
        lists, archives = Path(folder, "lists"), Path(folder, "archives")
        for place in (lists, archives):
            (place / "partial").mkdir(parents=True)
        places = {"Dir::State::Lists": lists, "Dir::Cache": folder, "Dir::Cache::Archives": archives}
        # Otherwise root's apt-get becomes a user who may not write here.
        places["APT::Sandbox::User"] = getpass.getuser()
        options = [word for name, value in places.items() for word in ("-o", f"{name}={value}")]
        _run(["apt-get", "-q", "update"], folder, options)
        _run(["apt-get", "-q", "download", PACKAGE], folder, options)


def _run(command: list[str], folder: str, options: Sequence[str] = ()) -> None:
    try:
        done = subprocess.run(
            [*command, *options],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=APT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise XentflowError(f"{' '.join(command)}: {error}") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise XentflowError(f"{' '.join(command)}: {lines[-1]}")
