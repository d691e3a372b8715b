"""Which hosts a run has, and what its processes read of it."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from tripool.hosts.directory import RESERVED_S, SILENCE_S, DirectoryFile, Hosts, OwnHost, read_own, write_directory
from tripool.hosts.wire import Host

OWN = Host("server", "", {"m": ("cache-0",)})


def test_a_silent_host_is_forgotten_and_may_come_back() -> None:
    hosts, other = Hosts(OWN), Host("b", "tcp://b:1", {"m": ("cache-b",)}, ("decode",))
    assert hosts.present(other, 0.0) and not hosts.present(other, 1.0)
    assert hosts.expire(1.0 + SILENCE_S) == []
    assert hosts.expire(1.1 + SILENCE_S) == [other]
    assert hosts.directory().hosts == (OWN,)
    assert hosts.present(other, 10.0)
    assert hosts.directory().hosts == (OWN, other)


def test_nobody_takes_the_servers_own_name() -> None:
    hosts = Hosts(OWN)
    assert not hosts.present(Host("server", "tcp://elsewhere:1", {"m": ("cache-0",)}), 0.0)
    assert hosts.directory().hosts == (OWN,)


def test_there_are_not_more_hosts_than_a_run_can_have() -> None:
    hosts = Hosts(OWN)
    for number in range(600):
        hosts.present(Host(f"h{number}", ""), 0.0)
    assert len(hosts.directory().hosts) == 513
    assert hosts.present(Host("h0", "tcp://h0:1"), 0.0), "those that are known are heard"


def test_a_host_that_says_too_much_of_itself_is_not_heard() -> None:
    """All hosts together go into one message to each of them: one that talks nonsense must not keep it from them."""
    hosts = Hosts(OWN)
    assert not hosts.present(Host("b", "", {f"model-{i}": ("x" * 60,) for i in range(100)}), 0.0)
    assert hosts.directory().hosts == (OWN,)


def test_any_role_is_the_scarcer_one() -> None:
    hosts = Hosts(OWN)
    assert hosts.scarcer() == "decode"
    hosts.present(Host("b", "", {}, ("decode",)), 0.0)
    assert hosts.scarcer() == "prefill"
    hosts.present(Host("c", "", {}, ("prefill",)), 0.0)
    assert hosts.scarcer() == "decode"


def test_processes_notice_a_change(tmp_path: Path) -> None:
    file, hosts = DirectoryFile(tmp_path), Hosts(OWN)
    assert not file.changed() and file.hosts == ()
    write_directory(tmp_path, hosts.directory())
    assert file.changed() and not file.changed()
    hosts.present(Host("b", "tcp://b:1", {"m": ("cache-b",), "n": ("cache-n",)}), 0.0)
    write_directory(tmp_path, hosts.directory())
    assert file.changed()
    assert set(file.members("m")) == {"cache-0", "cache-b"}
    assert set(file.members(None)) == {"cache-0", "cache-b", "cache-n"}
    assert [host["host"] for host in file.describe()] == ["server", "b"]
    assert file.address_of("b") == file.member_address("cache-n") == "tcp://b:1"
    assert file.address_of("c") == file.member_address("cache-c") == ""


def test_the_token_lies_in_a_file_of_its_user_alone(tmp_path: Path) -> None:
    own = OwnHost("a", "t" * 24, True, members={"m": ("cache-0",)})
    own.write(tmp_path)
    assert read_own(tmp_path) == own
    assert (tmp_path / "host.json").stat().st_mode & 0o077 == 0
    assert read_own(tmp_path / "none") is None


def test_ranks_have_one_host() -> None:
    """One that was lost may come back after its ranks were given to another."""
    hosts = Hosts(replace(OWN, ranks={"d": (0, 1)}))
    hosts.reserve(Host("b", "tcp://b:1", ranks={"d": (2, 3)}), 0.0)
    assert hosts.expire(RESERVED_S + SILENCE_S) == [], "its processes are starting"
    assert not hosts.present(Host("b", "tcp://b:1", ranks={"d": (2, 3)}), 1.0)
    hosts.present(Host("c", "tcp://c:1", ranks={"d": (1, 3, 4)}), 1.0)
    assert [host.ranks for host in hosts.directory().hosts] == [{"d": (0, 1)}, {"d": (2, 3)}, {"d": (4,)}]
    assert [host.name for host in hosts.expire(2.0 + SILENCE_S)] == ["b", "c"]
