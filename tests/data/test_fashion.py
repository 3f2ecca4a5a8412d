"""Where Fashion-MNIST is looked for, in which order, and what happens to files that are not right.

A small dataset stands in for the real one, with its own checksums; the network is never asked.
"""

import gzip
import hashlib
import io
import re
import stat
import subprocess

import pytest
from idx_files import small_files, write_folder

from xentflow.data import fashion, load_fashion_mnist
from xentflow.errors import XentflowError

FILES = small_files(seed=1)
NAME = "train-images-idx3-ubyte"


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine without the data: empty cache and system folder, no network, no Debian."""
    monkeypatch.setattr(
        fashion, "SHA256", {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    )
    monkeypatch.setattr(fashion, "SYSTEM_FOLDER", tmp_path / "system")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("XENTFLOW_DATA", raising=False)
    monkeypatch.setattr(fashion.shutil, "which", lambda tool: None)
    monkeypatch.setattr(fashion.urllib.request, "urlopen", no_network)


def no_network(url, timeout):
    assert 0 < timeout <= 10
    raise OSError("Name or service not known")


def cached():
    folder = fashion.cache_folder()
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


class TestOrder:
    def test_given_folder_first(self, tmp_path, monkeypatch):
        write_folder(tmp_path / "given", FILES)
        monkeypatch.setenv("XENTFLOW_DATA", str(tmp_path / "nowhere"))
        assert len(load_fashion_mnist(data_dir=tmp_path / "given")) == 12
        assert cached() == {}

    def test_then_the_environment(self, tmp_path, monkeypatch):
        write_folder(tmp_path / "named", FILES, compressed=False)
        monkeypatch.setenv("XENTFLOW_DATA", str(tmp_path / "named"))
        assert len(load_fashion_mnist("test")) == 6

    @pytest.mark.parametrize("how", ["argument", "environment"])
    def test_a_named_folder_without_the_files_is_an_error(self, tmp_path, monkeypatch, how):
        write_folder(tmp_path / "system", FILES)
        if how == "environment":
            monkeypatch.setenv("XENTFLOW_DATA", str(tmp_path / "empty"))
        with pytest.raises(XentflowError, match=rf"empty: expected a file {NAME} or .*, got no such folder"):
            load_fashion_mnist(data_dir=tmp_path / "empty" if how == "argument" else None)

    def test_the_cache_before_the_system_folder(self, tmp_path):
        write_folder(fashion.cache_folder(), FILES, compressed=False)
        assert len(load_fashion_mnist()) == 12
        assert not (tmp_path / "system").exists()

    def test_the_system_folder_fills_the_cache(self, tmp_path):
        write_folder(tmp_path / "system", FILES)
        data = load_fashion_mnist()
        assert data.class_names[8] == "Bag"
        assert cached() == FILES

    def test_a_download_fills_the_cache(self, monkeypatch):
        asked = []

        def urlopen(url, timeout):
            asked.append(url)
            return io.BytesIO(gzip.compress(FILES[url.rsplit("/", 1)[1].removesuffix(".gz")]))

        monkeypatch.setattr(fashion.urllib.request, "urlopen", urlopen)
        load_fashion_mnist()
        assert cached() == FILES
        assert len(asked) == 4
        assert all(url.startswith("https://") for url in asked)

    def test_debians_package_is_fetched_and_unpacked_without_root(self, tmp_path, monkeypatch):
        commands = []

        def run(command, cwd, **options):
            commands.append(command)
            if command[0] == "apt-get":
                (tmp_path.__class__(cwd) / "dataset-fashion-mnist_1_all.deb").touch()
            else:
                write_folder(tmp_path.__class__(cwd) / command[-1] / str(fashion.SYSTEM_FOLDER)[1:], FILES)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(fashion.shutil, "which", lambda tool: tool)
        monkeypatch.setattr(fashion.subprocess, "run", run)
        load_fashion_mnist()
        assert cached() == FILES
        assert [command[0] for command in commands] == ["apt-get", "dpkg-deb"]

    def test_package_lists_are_fetched_where_there_are_none(self, tmp_path, monkeypatch):
        commands = []

        def run(command, cwd, **options):
            commands.append(command)
            fresh = not any("update" in done for done in commands)
            if "download" in command and fresh:
                return subprocess.CompletedProcess(command, 100, "", "E: Unable to locate package\n")
            if "download" in command:
                (tmp_path.__class__(cwd) / "dataset-fashion-mnist_1_all.deb").touch()
            if command[0] == "dpkg-deb":
                write_folder(tmp_path.__class__(cwd) / command[-1] / str(fashion.SYSTEM_FOLDER)[1:], FILES)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(fashion.shutil, "which", lambda tool: tool)
        monkeypatch.setattr(fashion.subprocess, "run", run)
        load_fashion_mnist()
        assert cached() == FILES
        assert [command[0] for command in commands] == ["apt-get"] * 3 + ["dpkg-deb"]
        # The system's own lists are root's.
        assert all(any(word.startswith("Dir::State::Lists=") for word in command) for command in commands[1:3])

    def test_cache_follows_xdg(self, tmp_path, monkeypatch):
        assert fashion.cache_folder() == tmp_path / "cache/xentflow/fashion-mnist"
        monkeypatch.setenv("HOME", str(tmp_path))
        for value in ("", "relative"):
            monkeypatch.setenv("XDG_CACHE_HOME", value)
            assert fashion.cache_folder() == tmp_path / ".cache/xentflow/fashion-mnist"


class TestNothingWorked:
    def test_one_error_lists_all_that_was_tried(self, tmp_path):
        with pytest.raises(XentflowError) as caught:
            load_fashion_mnist()
        lines = str(caught.value).splitlines()
        assert [line.split(":")[0].strip() for line in lines[1:-1]] == [
            "cache", "system folder", "download", "download", "Debian package dataset-fashion-mnist",
        ]  # fmt: skip
        assert "got no such folder" in lines[1]
        assert "Name or service not known" in lines[3]
        assert "no apt-get on this machine" in lines[5]
        assert "XENTFLOW_DATA" in lines[-1]

    def test_without_fetching_only_folders_are_tried(self, monkeypatch):
        monkeypatch.setattr(fashion.urllib.request, "urlopen", None)
        with pytest.raises(XentflowError) as caught:
            load_fashion_mnist(fetch=False)
        assert "download" not in str(caught.value)

    def test_apt_says_why(self, monkeypatch):
        failed = subprocess.CompletedProcess([], 100, "", "W: first\nE: Some index files failed to download\n")
        monkeypatch.setattr(fashion.shutil, "which", lambda tool: tool)
        monkeypatch.setattr(fashion.subprocess, "run", lambda *args, **options: failed)
        with pytest.raises(XentflowError, match="apt-get -q update: E: Some index files failed"):
            load_fashion_mnist()


class TestCorrupt:
    def test_another_dataset_is_refused_by_name(self, tmp_path):
        write_folder(tmp_path / "given", small_files(seed=2))
        message = f"{tmp_path}/given/{NAME}.gz: expected the content of Fashion-MNIST's {NAME}"
        with pytest.raises(XentflowError, match=re.escape(message)):
            load_fashion_mnist(data_dir=tmp_path / "given")

    @pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b"\1" + content[1:]])
    def test_damaged_labels_are_refused_by_name(self, tmp_path, damage):
        labels = "train-labels-idx1-ubyte"
        write_folder(tmp_path / "given", FILES | {labels: damage(FILES[labels])}, compressed=False)
        with pytest.raises(XentflowError, match=f"given/{labels}: expected .* corrupt, truncated or another"):
            load_fashion_mnist(data_dir=tmp_path / "given")

    def test_a_damaged_cache_heals(self, tmp_path):
        write_folder(fashion.cache_folder(), FILES | {NAME: FILES[NAME][:-1]}, compressed=False)
        write_folder(tmp_path / "system", FILES)
        assert len(load_fashion_mnist()) == 12
        assert cached() == FILES

    def test_a_damaged_cache_is_named_where_nothing_else_helps(self):
        write_folder(fashion.cache_folder(), FILES | {NAME: FILES[NAME][:-1]}, compressed=False)
        with pytest.raises(XentflowError, match=f"cache: .*{NAME}: expected the content of Fashion-MNIST"):
            load_fashion_mnist()

    def test_a_damaged_download_is_refused_and_not_kept(self, monkeypatch):
        monkeypatch.setattr(fashion.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(gzip.compress(b"no")))
        with pytest.raises(XentflowError, match=r"download: https://.*: expected the content of Fashion-MNIST"):
            load_fashion_mnist()
        assert cached() == {}

    def test_a_truncated_download_is_refused(self, monkeypatch):
        half = gzip.compress(FILES[NAME])[:100]
        monkeypatch.setattr(fashion.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(half))
        with pytest.raises(XentflowError, match=r"download: https://.*end-of-stream"):
            load_fashion_mnist()


class TestCacheWriting:
    def test_a_failed_write_leaves_nothing_and_the_data_is_used(self, tmp_path, monkeypatch):
        write_folder(tmp_path / "system", FILES)

        def full(handle):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(fashion.os, "fsync", full)
        with pytest.warns(UserWarning, match="could not keep Fashion-MNIST there: No space left on device"):
            assert len(load_fashion_mnist()) == 12
        assert cached() == {}

    def test_an_interrupted_write_leaves_nothing(self, tmp_path, monkeypatch):
        write_folder(tmp_path / "system", FILES)

        def interrupt(handle):
            raise KeyboardInterrupt

        monkeypatch.setattr(fashion.os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_fashion_mnist()
        assert cached() == {}

    def test_files_have_ordinary_permissions(self, tmp_path):
        write_folder(tmp_path / "system", FILES)
        load_fashion_mnist()
        (tmp_path / "other").touch()
        expected = stat.S_IMODE((tmp_path / "other").stat().st_mode)
        assert stat.S_IMODE((fashion.cache_folder() / NAME).stat().st_mode) == expected
