"""Files with keys, URLs and settings, as editors and shells on every system write them."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from service.errors import CannotStartError
from service.model.keys import digest_of
from service.server.bootstrap_keys import operator_keys
from service.settings import Settings
from spark_agent.cli.profile import read_profile
from spark_agent.client.credentials import UnusableKeyError, key_source
from tests.unit.agent.test_inspection import run

SECRET = "operator-0123456789abcdef0123456789abcdef"

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16"]
ENDS = ["", "\n", "\r\n", "\r\n\r\n", " \n"]


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TIDEGAUGE_KEY", "TIDEGAUGE_KEY_FILE", "TIDEGAUGE_ADMIN_KEY", "TIDEGAUGE_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("end", ENDS, ids=repr)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_key_is_read_from_any_file(tmp_path: Path, encoding: str, end: str) -> None:
    file = tmp_path / "key"
    file.write_bytes(f"{SECRET}{end}".encode(encoding))
    assert key_source(None, str(file), {}).read() == SECRET
    assert key_source(None, None, {"TIDEGAUGE_KEY_FILE": str(file)}).read() == SECRET
    [admin] = operator_keys(Settings(admin_key_file=file))
    assert admin.digest == digest_of(SECRET)
    [scrape] = operator_keys(Settings(scrape_key_file=file))
    assert scrape.digest == digest_of(SECRET)


@pytest.mark.parametrize("value", [SECRET, f"\ufeff{SECRET}", f"{SECRET}\r", f"\ufeff{SECRET}\r\n"])
def test_a_key_is_read_from_a_variable_as_a_shell_took_it_from_a_file(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    assert key_source(None, None, {"TIDEGAUGE_KEY": value}).read() == SECRET
    assert key_source(value, None, {}).read() == SECRET
    monkeypatch.setenv("TIDEGAUGE_ADMIN_KEY", value)
    [admin] = operator_keys(Settings())
    assert admin.digest == digest_of(SECRET)


@pytest.mark.parametrize(
    "content", [b"", b"\xef\xbb\xbf", b"\xff\xfe", b"two keys", b"\xff\xff", b"k" * 10_000]
)
def test_what_is_no_key_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(UnusableKeyError, match=r"cannot be used: it contains no key"):
        key_source(None, str(tmp_path / "key"), {}).read()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_url_is_read_from_any_file(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "url").write_bytes("redis://:secret@redis:6379/0\r\n".encode(encoding))
    assert Settings(live_url_file=tmp_path / "url").live_url == "redis://:secret@redis:6379/0"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_settings_are_read_from_any_file(tmp_path: Path, encoding: str) -> None:
    (tmp_path / ".env").write_bytes(
        f"TIDEGAUGE_ADMIN_KEY={SECRET}\r\nTIDEGAUGE_PORT=5\r\n".encode(encoding)
    )
    assert Settings().port == 5
    [admin] = operator_keys(Settings())
    assert admin.digest == digest_of(SECRET)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_profile_is_read_from_any_file(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "config.toml").write_bytes(
        '[default]\r\nurl = "http://gauge"\r\nkey_file = "/key"\r\n'.encode(encoding)
    )
    profile = read_profile({"TIDEGAUGE_CONFIG": str(tmp_path / "config.toml")})
    assert (profile.url, profile.key_file) == ("http://gauge", "/key")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_job_is_read_from_any_file(tmp_path: Path, encoding: str) -> None:
    """The service is not there: the file was read, or its own error would have come first."""
    text = json.dumps({"job": "scores", "stages": {"taps": {"shards": ["north"]}}})
    (tmp_path / "job.json").write_bytes(text.encode(encoding))
    done = run("apply", str(tmp_path / "job.json"), "--url", "http://127.0.0.1:1")
    assert done.exit_code == 4, done.stderr


@pytest.mark.timeout(30)
def test_a_pipe_without_a_writer_has_no_key_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnusableKeyError, match="it contains no key"):
        key_source(None, str(tmp_path / "pipe"), {}).read()
    with pytest.raises(CannotStartError, match="has 0 characters"):
        operator_keys(Settings(admin_key_file=tmp_path / "pipe"))
    with pytest.raises(ValueError, match="must have one line"):
        Settings(live_url_file=tmp_path / "pipe")


def test_a_key_is_read_from_a_pipe_with_a_writer(tmp_path: Path) -> None:
    """As a shell's `<(command)` is."""
    for read in (
        lambda path: key_source(None, path, {}).read(),
        lambda path: operator_keys(Settings(admin_key_file=Path(path)))[0].digest,
    ):
        ours, theirs = os.pipe()
        writer = threading.Thread(target=_write_and_close, args=(theirs, SECRET))
        writer.start()
        assert read(f"/dev/fd/{ours}") in {SECRET, digest_of(SECRET)}
        writer.join()
        os.close(ours)


def _write_and_close(descriptor: int, text: str) -> None:
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)
