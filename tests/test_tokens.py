"""The token: where it comes from, and where it never shows."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradwire
from gradwire import rpc
from gradwire._core.transport.registry import TransportSettings
from gradwire._core.transport.tcp import TcpTransport
from gradwire._core.transport.unix import UnixTransport
from gradwire.errors import AuthenticationError, SetupError
from gradwire.options import Options
from tests.processes import processes, rendezvous_file

SECRET = "correct horse battery staple"


def in_a_process(body: Callable[[], Any]) -> Any:
    """Return the result of `body`, run in a process of its own, because a process remembers the
    token of its environment."""
    with processes(body) as (process,):
        return process.result()


def call_between_workers(first: Options, second: Options) -> bool:
    with gradwire.Worker("a", options=first) as a, gradwire.Worker("b", options=second):
        return bool(a.rpc_sync("b", max, (1, 2)) == 2)


# -- where the token comes from


def test_the_token_comes_from_the_environment() -> None:
    def body() -> bool:
        os.environ["GRADWIRE_TOKEN"] = SECRET
        with rendezvous_file() as place:
            return call_between_workers(
                Options(init_method=place), Options(init_method=place, token=SECRET)
            )

    assert in_a_process(body)


@pytest.mark.parametrize("source", ["option", "variable"])
def test_the_token_comes_from_a_file(tmp_path: Path, source: str) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)

    def body() -> bool:
        chosen: dict[str, Any] = {"token_file": file} if source == "option" else {}
        if source == "variable":
            os.environ["GRADWIRE_TOKEN_FILE"] = str(file)
        with rendezvous_file() as place:
            return call_between_workers(
                Options(init_method=place, **chosen), Options(init_method=place, token=SECRET)
            )

    assert in_a_process(body)


def make_file(folder: Path, content: bytes = SECRET.encode(), mode: int = 0o600) -> Path:
    file = folder / "token"
    file.write_bytes(content)
    file.chmod(mode)
    return file


def make_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "token", 0o600)
    return folder / "token"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: make_file(folder, mode=0o640), "open to other users.*chmod 600"),
        (lambda folder: make_file(folder, mode=0o604), "open to other users.*chmod 600"),
        (lambda folder: make_file(folder, b"short\n"), "has only 5; a token has at least 16"),
        (lambda folder: make_file(folder, b"\n"), "is empty; a token has at least 16"),
        (lambda folder: make_file(folder, b"\xff" * 30), "is no text"),
        (lambda folder: make_file(folder, b"x" * 5000), "more than 4096 bytes"),
        (lambda folder: folder / "missing", "cannot be read: No such file"),
        (lambda folder: folder, "cannot be read|is not a regular file"),
        (make_pipe, "is not a regular file"),
    ],
    ids=["group", "others", "short", "empty", "binary", "huge", "missing", "folder", "pipe"],
)
def test_a_token_file_that_is_no_secret_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    file = make(tmp_path)
    with pytest.raises(SetupError, match=message) as refused:
        gradwire.Worker("a", options=Options(token_file=file))
    assert str(file) in str(refused.value)
    assert "option token_file" in str(refused.value)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root may do this")
def test_a_token_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = make_file(tmp_path)
    os.chown(file, 65534, -1)
    with pytest.raises(SetupError, match="belongs to user 65534"):
        gradwire.Worker("a", options=Options(token_file=file))


@pytest.mark.parametrize("token", ["", "x", 15 * "x", "\udcff" * 20])
def test_tokens_that_are_easy_to_guess_are_refused(token: str) -> None:
    with pytest.raises(SetupError, match=r"the option token .*secrets.token_hex"):
        Options(token=token)

    def body() -> str:
        os.environ["GRADWIRE_TOKEN"] = token
        with pytest.raises(SetupError, match=r"GRADWIRE_TOKEN .*secrets.token_hex") as refused:
            gradwire.Worker("a", 0, 1, Options(init_method="file:///nowhere"))
        return str(refused.value)

    assert "xxx" not in in_a_process(body)


def test_a_token_of_another_type_is_refused() -> None:
    with pytest.raises(SetupError, match="the option token must be a string, not bytes"):
        Options(token=SECRET.encode())  # type: ignore[arg-type]


def test_a_token_and_a_token_file_are_refused() -> None:
    with pytest.raises(SetupError, match="one of the options token and token_file"):
        Options(token=SECRET, token_file="/nowhere")


# -- where it goes to


def token_of_a_child() -> str | None:
    """Return the token in the environment of a program that this process starts."""
    program = "import os; print(os.environ.get('GRADWIRE_TOKEN'))"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_programs_that_a_worker_starts_do_not_inherit_the_token() -> None:
    def body() -> tuple[str | None, str | None]:
        os.environ["GRADWIRE_TOKEN"] = SECRET
        before = token_of_a_child()
        with rendezvous_file() as place, gradwire.Worker("a", 0, 1, Options(init_method=place)):
            return before, token_of_a_child()

    assert in_a_process(body) == (SECRET, "None")


def test_a_process_can_join_again_after_the_token_is_removed() -> None:
    def body() -> list[bool]:
        os.environ["GRADWIRE_TOKEN"] = SECRET
        results = []
        for _ in range(2):
            with rendezvous_file() as place:
                same = Options(init_method=place, token=SECRET)
                results.append(call_between_workers(Options(init_method=place), same))
        return results

    assert in_a_process(body) == [True, True]


def test_a_new_token_in_the_environment_replaces_the_one_before() -> None:
    def body() -> bool:
        for token in ("an earlier token of this process", SECRET):
            os.environ["GRADWIRE_TOKEN"] = token
            with rendezvous_file() as place:
                same = Options(init_method=place, token=token)
                assert call_between_workers(Options(init_method=place), same)
        return True

    assert in_a_process(body)


def test_a_forked_child_of_a_worker_remembers_the_token() -> None:
    def child() -> bool:
        with rendezvous_file() as place:
            same = Options(init_method=place, token=SECRET)
            return call_between_workers(Options(init_method=place), same)

    def body() -> bool:
        os.environ["GRADWIRE_TOKEN"] = SECRET
        with rendezvous_file() as place, gradwire.Worker("a", 0, 1, Options(init_method=place)):
            return bool(in_a_process(child))

    assert in_a_process(body)


def _call_the_parent(place: str) -> None:
    with gradwire.Worker("child", options=Options(init_method=place)) as worker:
        assert worker.rpc_sync("parent", max, (1, 2)) == 2


def test_a_spawned_child_of_a_worker_can_join_with_a_token_file(tmp_path: Path) -> None:
    file = make_file(tmp_path)

    def body() -> int | None:
        os.environ["GRADWIRE_TOKEN_FILE"] = str(file)
        with rendezvous_file() as place:
            with gradwire.Worker("parent", options=Options(init_method=place)):
                child = multiprocessing.get_context("spawn").Process(
                    target=_call_the_parent, args=(place,)
                )
                child.start()
                child.join()
                return child.exitcode

    assert in_a_process(body) == 0


# -- where it never shows


def test_the_token_is_in_no_repr() -> None:
    secret = SECRET.encode()
    for shown in (
        Options(token=SECRET),
        TransportSettings(secret),
        TcpTransport(secret),
        UnixTransport(secret),
    ):
        assert "horse" not in repr(shown)


class Mistaken:
    """An object with options, of which one has a wrong type."""

    token = SECRET
    num_worker_threads = "many"

    def __repr__(self) -> str:
        return f"Mistaken({self.token})"


@pytest.mark.parametrize("options", [Mistaken(), {"token": SECRET}, SECRET])
def test_options_of_another_type_are_refused_without_showing_them(options: Any) -> None:
    with pytest.raises(SetupError, match=f"not of type {type(options).__name__}") as refused:
        rpc.Options.of(options)
    assert "horse" not in str(refused.value)


def test_the_token_is_in_no_error_of_a_refused_caller() -> None:
    with rendezvous_file() as place:
        mine = Options(init_method=place, token=SECRET)
        other = Options(init_method=place, token=SECRET + " of another group")
        with gradwire.Worker("a", options=mine) as a, gradwire.Worker("b", options=other):
            with pytest.raises(AuthenticationError) as refused:
                a.rpc_sync("b", max, (1, 2))
    assert "horse" not in str(refused.value)
