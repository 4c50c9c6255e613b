"""The rendezvous of a group, and the errors of workers that cannot reach it."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.rendezvous import register_rendezvous_handler

import gradwire
from gradwire import rpc
from gradwire._core.group import rendezvous
from gradwire._core.group.made_up_token import MadeUpTokenFile, read_made_up_token
from gradwire.errors import SetupError
from gradwire.launch import free_port
from tests.processes import PATIENCE, freeze, processes, rendezvous_file

TOKEN = "the token of this test, of 32 bytes"
NOBODY = 65534


def whoami() -> str:
    return rpc.get_worker_info().name


def greet(me: int, **given: Any) -> str:
    """Join a group of two workers. Return the name that the other worker answers."""
    rpc.init_rpc(f"worker{me}", **given)
    answer: str = rpc.rpc_sync(f"worker{1 - me}", whoami)
    rpc.shutdown()
    return answer


def over_tcp(rank: int, port: int) -> Callable[[], str]:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    return lambda: greet(rank, rank=rank, world_size=2, rpc_backend_options=options)


def over_tcp_without_libuv(rank: int, port: int) -> Callable[[], str]:
    """Torch's other kind of store does not wake workers that wait for a `compare_set`."""
    place = f"tcp://127.0.0.1:{port}?use_libuv=0"
    options = rpc.Options(init_method=place, init_timeout=PATIENCE / 2)
    return lambda: greet(rank, rank=rank, world_size=2, rpc_backend_options=options)


def by_environment(rank: int, port: int) -> Callable[[], str]:
    def run() -> str:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
        }
        return greet(rank)

    return run


@pytest.mark.parametrize("body", [over_tcp, over_tcp_without_libuv, by_environment])
def test_a_rendezvous_works_over_tcp_and_through_the_environment(
    body: Callable[[int, int], Callable[[], str]],
) -> None:
    with free_port() as port, processes(body(0, port), body(1, port)) as started:
        assert [p.result() for p in started] == ["worker1", "worker0"]


@pytest.mark.parametrize("body", [over_tcp, by_environment])
def test_a_worker_that_starts_before_the_host_polls_it(
    body: Callable[[int, int], Callable[[], str]],
) -> None:
    """Torch would sleep for half a second or more between two attempts."""
    looks, seen = Pipe(duplex=False)

    def come_early() -> str:
        may_be_up = rendezvous._may_be_up

        def look(host: str, port: int) -> bool:
            is_up = may_be_up(host, port)
            seen.send(is_up)
            return is_up

        rendezvous._may_be_up = look
        return body(1, port)()

    with looks, seen, free_port() as port, processes(come_early) as (early,):
        for _ in range(3):
            assert looks.poll(PATIENCE)
            assert not looks.recv()
        with processes(body(0, port)) as (host,):
            assert [early.result(), host.result()] == ["worker0", "worker1"]


def test_a_rendezvous_without_a_host_names_its_address() -> None:
    with free_port() as port:
        place = f"tcp://127.0.0.1:{port}"
        options = rpc.Options(init_method=place, init_timeout=0.2)
        with pytest.raises(SetupError, match=rf"the rendezvous at '{place}' failed: "):
            gradwire.Worker("lonely", 1, 2, options)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_host_is_up_when_it_listens_or_is_on_another_machine(host: str) -> None:
    with socket.create_server((host, 0)) as holder:
        port = holder.getsockname()[1]
        assert rendezvous._may_be_up(host, port)
    assert not rendezvous._may_be_up(host, port)
    assert rendezvous._may_be_up("192.0.2.1", port)  # on another machine


def test_the_store_of_an_early_worker_has_the_full_timeout() -> None:
    def come_early() -> float:
        store, _, _ = rendezvous.open_store(f"tcp://127.0.0.1:{port}", 1, 2, PATIENCE)
        store.set("here", "yes")
        return float(store.timeout.total_seconds())

    def be_host() -> None:
        store, _, _ = rendezvous.open_store(f"tcp://127.0.0.1:{port}", 0, 2, PATIENCE)
        store.wait(["here"])

    with free_port() as port, processes(come_early, be_host) as (early, host):
        assert early.result() == PATIENCE
        host.result()


def test_a_custom_rendezvous_gets_the_rank_and_the_size() -> None:
    urls = []

    def meet_here(url: str, **_how: Any) -> Iterator[tuple[HashStore, int, int]]:
        urls.append(url)
        yield HashStore(), 1, 4

    register_rendezvous_handler("gradwire-test", meet_here)
    rendezvous.open_store("gradwire-test://here", 1, 4, PATIENCE)
    assert urls == ["gradwire-test://here?rank=1&world_size=4"]


@pytest.mark.parametrize(("port", "complaint"), [("", "MASTER_PORT"), ("99999", "65535")])
def test_an_invalid_port_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, port: str, complaint: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(SetupError, match=complaint):
        rendezvous.open_store("env://", 1, 2, PATIENCE)


@pytest.mark.parametrize("over", ["file", "tcp"])
def test_a_missing_worker_is_named_at_the_deadline(over: str) -> None:
    def wait_in_vain(place: str) -> None:
        options = rpc.Options(init_method=place, init_timeout=0.3)
        with pytest.raises(
            SetupError, match=r"worker of rank 1 has not joined the group within 0.3 s"
        ):
            gradwire.Worker("lonely", 0, 2, options)

    with rendezvous_file() as file, free_port() as port:
        place = file if over == "file" else f"tcp://127.0.0.1:{port}"
        with processes(partial(wait_in_vain, place)) as (lonely,):
            lonely.result()


def test_ranks_are_checked(tmp_path: Path) -> None:
    options = rpc.Options(init_method=f"file://{tmp_path}/store")
    with pytest.raises(SetupError, match="rank parameter missing"):
        gradwire.Worker("w", world_size=2, options=options)
    with pytest.raises(SetupError, match="rank 2 is not below"):
        gradwire.Worker("w", 2, 2, options=options)


def try_to_join(name: str, rank: int, size: int | None, place: str, **options: Any) -> str:
    """Return the text of the error, or "joined"."""
    given = rpc.Options(**{"init_method": place, "init_timeout": PATIENCE / 2, **options})
    try:
        worker = gradwire.Worker(name, rank, size, given)
    except SetupError as error:
        return str(error)
    worker.shutdown(timeout=PATIENCE / 2)
    return "joined"


# -- workers that do not agree


@pytest.mark.parametrize("over", ["file", "tcp"])
@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        (
            [("a", 0, 2), ("b", 1, 3)],
            "the workers do not agree on the world_size: it is . for the worker of rank . and .",
        ),
        ([("a", 0, 2), ("b", 2, 2)], "rank 2 is not below the world_size of 2"),
        ([("a", 0, 3), ("b", 1, 3), ("c", 1, 3)], "worker id 1 is not unique: .*name=[bc].*[bc]"),
        ([("a", 0, 3), ("b", 1, 3), ("b", 2, 3)], "worker name 'b' is not unique: .*id=[12].*[12]"),
    ],
)
def test_a_disagreement_is_an_error_that_names_it_on_every_worker(
    over: str, members: list[tuple[str, int, int]], complaint: str
) -> None:
    with rendezvous_file() as file, free_port() as port:
        place = file if over == "file" else f"tcp://127.0.0.1:{port}"
        bodies = [partial(try_to_join, *member, place) for member in members]
        with processes(*bodies) as started:
            for process in started:
                assert re.search(complaint, process.result())


def test_a_worker_that_disagrees_does_not_disturb_a_complete_group() -> None:
    def join_and_wait(rank: int) -> str:
        options = rpc.Options(init_method=place)
        with gradwire.Worker(f"worker{rank}", rank, 2, options) as worker:
            if rank == 0:
                complete.send(True)
                assert may_go.poll(PATIENCE)
            return str(worker.rpc_sync(f"worker{1 - rank}", whoami))

    is_complete, complete = Pipe(duplex=False)
    may_go, go = Pipe(duplex=False)
    with is_complete, complete, may_go, go, rendezvous_file() as place:
        with processes(partial(join_and_wait, 0), partial(join_and_wait, 1)) as started:
            assert is_complete.poll(PATIENCE)
            with processes(partial(try_to_join, "late", 2, 3, place)) as (late,):
                assert "do not agree on the world_size" in late.result()
            go.send(True)
            assert [process.result() for process in started] == ["worker1", "worker0"]


# -- what answers at the address of the store


@contextmanager
def foreign_server(greeting: bytes | None) -> Iterator[int]:
    """Accept connections and say nothing, or send a greeting and hang up. Yield the port."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                accepted.append(connection)
                if greeting is not None:
                    connection.sendall(greeting)
                    connection.close()

    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in accepted:
                connection.close()


def fail_to_join(place: str, rank: int = 1) -> tuple[str, list[str]]:
    """Return the text of the error, and the names of the threads that are left."""
    text = try_to_join("worker", rank, 2, place, init_timeout=0.5)
    return text, [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("greeting", "complaint"),
    [
        (None, "a process listens at 127.0.0.1:{} but does not answer"),
        # A slow machine may reach the timeout before it has seen what the process answers.
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "listens at 127.0.0.1:{} (but )?does not answer"),
        (b"", "listens at 127.0.0.1:{} (but )?does not answer"),
    ],
)
def test_init_timeout_holds_if_a_foreign_server_has_the_port(
    greeting: bytes | None, complaint: str
) -> None:
    with foreign_server(greeting) as port:
        place = f"tcp://127.0.0.1:{port}"
        with processes(partial(fail_to_join, place), partial(fail_to_join, place, 0)) as (p1, p0):
            text, threads = p1.result()
            assert re.search(complaint.format(port), text), text
            assert threads == ["MainThread"]
            assert f"another process listens at 127.0.0.1:{port} already" in p0.result()[0]


def test_init_timeout_holds_if_the_host_of_the_store_is_frozen() -> None:
    def be_host() -> None:
        store, _, _ = rendezvous.open_store(place, 0, 2, PATIENCE)
        listens.send(True)
        store.wait(["gradwire/never"])

    is_up, listens = Pipe(duplex=False)
    with is_up, listens, free_port() as port:
        place = f"tcp://127.0.0.1:{port}"
        with processes(be_host) as (host,):
            assert is_up.poll(PATIENCE)
            freeze(host.pid)
            with processes(partial(fail_to_join, place)) as (newcomer,):
                text, threads = newcomer.result()
    assert f"a process listens at 127.0.0.1:{port} but does not answer" in text
    assert threads == ["MainThread"]


def test_a_host_that_ends_while_others_join_is_named() -> None:
    with free_port() as port:
        place = f"tcp://127.0.0.1:{port}"
        host = partial(try_to_join, "host", 0, 3, place, init_timeout=0.5, token=TOKEN)
        other = partial(try_to_join, "other", 1, 3, place, token=TOKEN)
        with processes(host, other) as started:
            assert "the worker of rank 2 has not joined the group" in started[0].result()
            assert "ended while this worker waited for the worker of rank 2" in started[1].result()


# -- who can reach the store, and what strangers learn there


@pytest.mark.parametrize("query", ["", "?use_libuv=0"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_store_listens_at_the_address_of_the_group_only(host: str, query: str) -> None:
    def be_host() -> None:
        store, _, _ = rendezvous.open_store(f"tcp://{host}:{port}{query}", 0, 2, PATIENCE)
        store.set("who", "the host")
        store.wait(["done"])

    with free_port() as port, processes(be_host) as (process,):
        store, _, _ = rendezvous.open_store(f"tcp://{host}:{port}{query}", 1, 2, PATIENCE)
        assert store.get("who") == b"the host"
        with pytest.raises(ConnectionRefusedError):  # A store of torch's own listens there too.
            socket.create_connection(("127.0.0.2", port), PATIENCE)
        store.set("done", "")
        process.result()


def test_other_parts_of_the_program_can_share_the_store() -> None:
    def body() -> list[bytes]:
        place = f"tcp://127.0.0.1:{port}"
        ours, _, _ = rendezvous.open_store(place, 0, 2, PATIENCE)
        theirs = TCPStore("127.0.0.1", port, is_master=True, multi_tenant=True)
        ours.set("key", "value")
        # Now with a store that torch has opened first.
        first = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True)
        second, _, _ = rendezvous.open_store(f"tcp://127.0.0.1:{first.port}", 0, 2, PATIENCE)
        first.set("key", "other value")
        return [theirs.get("key"), second.get("key")]

    with free_port() as port, processes(body) as (process,):
        assert process.result() == [b"value", b"other value"]


def as_nobody(body: Callable[[], Any]) -> Callable[[], Any]:
    """Run `body` as another user. Only root can do this."""

    def run() -> Any:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        return body()

    return run


def read_token_key(port: int) -> str:
    store, _, _ = rendezvous.open_store(f"tcp://127.0.0.1:{port}", 1, 2, PATIENCE)
    store.wait(["gradwire/0/here/token"])
    return str(store.get("gradwire/0/token").decode())


def fail_to_read(folder: str, name: str) -> str:
    """As another user, try to read the made-up token of the test's user."""
    tempfile.tempdir = os.path.dirname(folder)
    with pytest.raises(PermissionError):
        Path(folder, name).read_text()
    with pytest.raises(SetupError) as error:
        read_made_up_token(name)
    return str(error.value)


def test_a_made_up_token_is_not_in_a_store_that_others_can_reach(tmp_path: Path) -> None:
    """A stranger reads the key "token" there, and finds the name of a file that it cannot read."""

    def use_folder(body: Callable[[], str]) -> Callable[[], str]:
        def run() -> str:
            tempfile.tempdir = str(tmp_path)
            return body()

        return run

    folder = tmp_path / f"gradwire-{os.geteuid()}"
    tmp_path.chmod(0o777)
    with free_port() as port:
        place = f"tcp://127.0.0.1:{port}"
        host, member = (use_folder(partial(try_to_join, str(r), r, 2, place)) for r in range(2))
        with processes(host) as (first,):
            path = folder / read_token_key(port)
            assert path.parent == folder
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            if os.getuid() == 0:
                body = partial(fail_to_read, str(folder), path.name)
                with processes(as_nobody(body)) as (stranger,):
                    assert "cannot read the token" in stranger.result()
            with processes(member) as (second,):
                assert [second.result(), first.result()] == ["joined", "joined"]
    assert not list(folder.iterdir()), "the file is deleted when all workers have read it"


@pytest.fixture
def token_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder for the made-up tokens of this user, in a temporary folder of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"gradwire-{os.geteuid()}"
    folder.mkdir(0o700)
    return folder


def write_token(path: Path, content: str = 64 * "a") -> None:
    path.write_text(content)
    path.chmod(0o600)


def test_a_stranger_that_writes_to_the_store_cannot_choose_the_made_up_token(
    token_folder: Path,
) -> None:
    """The stranger names files of this user whose content it may know."""
    name = 32 * "0"
    elsewhere = token_folder.parent / "gradwire-token-known"
    write_token(elsewhere)
    write_token(token_folder / elsewhere.name)
    (token_folder / name).symlink_to(elsewhere)
    for bad in (
        str(elsewhere),
        f"../{elsewhere.name}",
        elsewhere.name,
        f"{name}/",
        name + "\n",
        "",
    ):
        with pytest.raises(SetupError, match=r"not the name of a token file.* GRADWIRE_TOKEN"):
            read_made_up_token(bad)
    with pytest.raises(SetupError, match=r"symbolic link.* GRADWIRE_TOKEN"):
        read_made_up_token(name)
    (token_folder / name).unlink()
    with pytest.raises(SetupError, match=r"No such file.* GRADWIRE_TOKEN"):
        read_made_up_token(name)
    for content in ("chosen by a stranger", 64 * "a" + "\n", 65 * "a", ""):
        write_token(token_folder / name, content)
        with pytest.raises(SetupError, match="does not hold a made-up token"):
            read_made_up_token(name)
    write_token(token_folder / name)
    assert read_made_up_token(name) == 64 * "a"
    (token_folder / name).chmod(0o640)
    with pytest.raises(SetupError, match="open to other users"):
        read_made_up_token(name)


def test_a_folder_for_tokens_that_another_user_can_use_is_refused(token_folder: Path) -> None:
    def refuse(complaint: str) -> None:
        with pytest.raises(SetupError, match=f"{complaint}.* GRADWIRE_TOKEN"):
            read_made_up_token(name)
        with pytest.raises(SetupError, match=f"{complaint}.* GRADWIRE_TOKEN"):
            MadeUpTokenFile(64 * "a")

    name = 32 * "0"
    write_token(token_folder / name)
    token_folder.chmod(0o755)
    refuse("is open to other users")
    token_folder.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(token_folder, NOBODY, -1)
        refuse(f"belongs to another user, {NOBODY}")
        os.chown(token_folder, 0, -1)
    token_folder.rename(token_folder.parent / "moved")
    token_folder.symlink_to(token_folder.parent / "moved")
    refuse("is not a folder")


def test_the_file_of_a_store_is_private_or_gets_no_made_up_token(tmp_path: Path) -> None:
    new, wide = tmp_path / "new", tmp_path / "wide"
    assert try_to_join("alone", 0, 1, f"file://{new}") == "joined"
    rendezvous.open_store(f"file://{new}", 0, 1, PATIENCE)
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    wide.touch(0o644)
    text = try_to_join("alone", 0, 1, f"file://{wide}")
    assert "is open to other users" in text
    assert "chmod 600" in text
    assert not wide.read_bytes().count(b"token")
    given = tmp_path / "given"
    given.touch(0o644)
    assert try_to_join("alone", 0, 1, f"file://{given}", token=TOKEN) == "joined"


@pytest.fixture
def other_machine() -> Iterator[tuple[str, str]]:
    """Make a network namespace, which stands for another machine. Yield its name and the address
    of this machine as seen from there."""
    name, ours = f"gw{os.getpid()}", f"gwv{os.getpid()}"
    commands = [
        f"netns add {name}",
        f"link add {ours} type veth peer name eth0 netns {name}",
        f"addr add 10.213.77.1/30 dev {ours}",
        f"link set {ours} up",
        f"-n {name} addr add 10.213.77.2/30 dev eth0",
        f"-n {name} link set eth0 up",
    ]
    try:
        for command in commands:
            try:
                subprocess.run(["ip", *command.split()], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                pytest.skip("this user may not make network namespaces")
        yield name, "10.213.77.1"
    finally:
        with suppress(OSError):
            subprocess.run(["ip", "link", "del", ours], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_another_machine_cannot_reach_the_store_of_a_group_on_loopback(
    other_machine: tuple[str, str], tmp_path: Path
) -> None:
    def be_host() -> None:
        tempfile.tempdir = str(tmp_path)
        try_to_join("host", 0, 2, f"tcp://127.0.0.1:{port}")

    name, address = other_machine
    connect = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)"

    def reaches(port: int) -> bool:
        command = ["ip", "netns", "exec", name, sys.executable, "-c", connect, address, str(port)]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        assert not ended.returncode or "ConnectionRefusedError" in ended.stderr
        return not ended.returncode

    with socket.create_server((address, 0)) as control:
        assert reaches(control.getsockname()[1])
    with free_port() as port, processes(be_host):
        read_token_key(port)
        assert not reaches(port)


# -- entries that strangers write


def exchange_addresses(place: str) -> None:
    """Let all entries of "worker0" lead to another address, as a stranger could do."""
    store, _, _ = rendezvous.open_store(place, -1, None, PATIENCE)
    for key in ("gradwire/0/name/worker0", "gradwire/0/member/0"):
        entry = store.get(key).decode()
        changed = re.sub(r'\["(unix|tcp)", "[^"]*"\]', '["tcp", "127.0.0.1|1"]', entry)
        assert changed != entry
        store.set(key, changed)


def test_an_entry_whose_addresses_a_stranger_has_exchanged_is_refused_in_a_fixed_group() -> None:
    """Worker 0 waits for worker 1 while a stranger exchanges worker 0's addresses."""
    with rendezvous_file() as place:
        host, late = (
            partial(try_to_join, f"worker{r}", r, 2, place, token=TOKEN) for r in range(2)
        )
        with processes(host):
            store, _, _ = rendezvous.open_store(place, -1, None, PATIENCE)
            store.wait(["gradwire/0/here/member/0"])
            exchange_addresses(place)
            with processes(late) as (second,):
                complaint = "the entry of rank 0 .* was not written by a worker that knows"
                assert re.search(complaint, second.result())


@pytest.mark.parametrize("to", ["worker0", 0])
def test_an_entry_whose_addresses_a_stranger_has_exchanged_is_refused_in_an_open_group(
    to: str | int,
) -> None:
    with rendezvous_file() as place:
        options = rpc.Options(init_method=place, token=TOKEN)
        with (
            gradwire.Worker("worker0", 0, options=options),
            gradwire.Worker("worker1", 1, options=options) as worker,
        ):
            exchange_addresses(place)
            whose = "worker named 'worker0'" if to == "worker0" else "worker id 0"
            with pytest.raises(SetupError, match=f"the entry of .*{whose} .* was not written by"):
                worker.rpc_sync(to, whoami)


def test_the_entry_of_one_member_is_not_valid_as_the_entry_of_another() -> None:
    with rendezvous_file() as place:
        options = rpc.Options(init_method=place, token=TOKEN)
        with (
            gradwire.Worker("worker0", 0, options=options),
            gradwire.Worker("worker1", 1, options=options),
            gradwire.Worker("worker2", 2, options=options) as worker,
        ):
            store, _, _ = rendezvous.open_store(place, -1, None, PATIENCE)
            store.set("gradwire/0/name/worker0", store.get("gradwire/0/name/worker1"))
            store.set("gradwire/0/member/0", store.get("gradwire/0/member/1"))
            for to in ("worker0", 0):
                with pytest.raises(SetupError, match="was not written by"):
                    worker.rpc_sync(to, whoami)
