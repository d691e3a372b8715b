"""Allocation: every rank has one place, the fastest links come first, pools are spread over hosts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripool.control.allocation import Place, Placement, Want, allocate, check, cpus_of
from tripool.control.topology import Link, Machine, NumaNode, Site, Topology, mbit_between


def machine(*cores: int, mbit: int = 0) -> Machine:
    """NUMA nodes of so many cores."""
    begins = [sum(cores[:number]) for number in range(len(cores))]
    nodes = (NumaNode(n, tuple(range(at, at + many))) for n, (at, many) in enumerate(zip(begins, cores, strict=True)))
    return Machine(tuple(nodes), (Link("eth0", mbit),))


def topology(**machines: Machine) -> Topology:
    return Topology(tuple(Site(name, found) for name, found in machines.items()))


def hosts_of(placement: Placement, want: str) -> list[str]:
    return [place.host for place in sorted(placement.places, key=lambda one: one.rank) if place.want == want]


def test_ranks_of_an_instance_share_a_numa_node() -> None:
    wants = [Want("prefill-0", "prefill", 2, 2), Want("decode-0", "decode", 2, 4)]
    found = allocate(wants, topology(a=machine(8, 4)))
    assert [(place.want, place.node) for place in found.places] == [
        ("prefill-0", 1), ("prefill-0", 1), ("decode-0", 0), ("decode-0", 0),
    ]  # fmt: skip
    assert "node 1 has 4 free cores for 2 x 2" in found.places[0].reason
    assert cpus_of(found.places[0], topology(a=machine(8, 4))) == (8, 9, 10, 11)


def test_a_machine_without_a_choice_binds_nothing() -> None:
    (place,) = allocate([Want("decode-0", "decode", 1, 2)], topology(a=machine(8))).places
    assert place.node == 0 and cpus_of(place, topology(a=machine(8))) == ()
    full = allocate([Want("decode-0", "decode", 3, 2)], topology(a=machine(2, 2)))
    assert [place.node for place in full.places] == [0, 1, None]
    assert "any core" in full.places[2].reason and cpus_of(full.places[2], topology(a=machine(2, 2))) == ()


def test_an_instance_over_hosts_takes_the_fastest_links() -> None:
    sites = topology(a=machine(8, mbit=1000), b=machine(8, mbit=100_000), c=machine(8, mbit=100_000))
    found = allocate([Want("decode-0", "decode", 5, 1, hosts=2)], sites)
    assert hosts_of(found, "decode-0") == ["b", "b", "b", "c", "c"]
    assert "100000 Mbit/s" in found.places[0].reason
    assert mbit_between(sites.sites[0], sites.sites[1]) == 1000


def test_instances_of_a_role_are_spread_over_hosts() -> None:
    wants = [Want(f"{role}-{i}", role, 1, 1) for role in ("prefill", "decode") for i in range(2)]
    found = allocate(wants, topology(a=machine(8), b=machine(8)))
    for role in ("prefill", "decode"):
        assert {hosts_of(found, f"{role}-{i}")[0] for i in range(2)} == {"a", "b"}


def test_what_runs_stays_and_a_new_host_gets_the_share_that_is_missing() -> None:
    want = Want("decode-0", "decode", 4, 1, hosts=2)
    alone = allocate([want], topology(a=machine(4)))
    assert hosts_of(alone, "decode-0") == ["a", "a"]
    (missing,) = alone.missing
    assert missing.ranks == (2, 3) and "wants 2 hosts, and 1 are there" in missing.reason
    both = allocate([want], topology(a=machine(4), b=machine(64, mbit=10**6)), alone.places)
    assert hosts_of(both, "decode-0") == ["a", "a", "b", "b"] and not both.missing
    again = allocate([want], topology(a=machine(4), c=machine(4)), both.places)
    assert hosts_of(again, "decode-0") == ["a", "a", "c", "c"], "b is gone, and so are its ranks"


machines = st.builds(
    lambda cores, mbit: machine(*cores, mbit=mbit),
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
    st.sampled_from([0, 100, 1000, 10_000]),
)
topologies = st.lists(machines, max_size=5).map(
    lambda found: Topology(tuple(Site(f"h{n}", one) for n, one in enumerate(found)))
)
wanted = st.lists(
    st.tuples(st.sampled_from(["prefill", "decode"]), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)),
    max_size=5,
).map(lambda found: [Want(f"i{n}", *one) for n, one in enumerate(found)])


@given(wanted, topologies, st.data())
def test_invariants(wants: list[Want], sites: Topology, data: st.DataObject) -> None:
    found = allocate(wants, sites)
    check(found, wants, sites)
    assert allocate(wants, sites) == found, "the same question, the same answer"
    for want in wants:
        placed = len({place.host for place in found.places if place.want == want.name})
        assert placed == min(len(want.shares()), len(sites.sites)), "hosts are left unused, or ranks are crowded"
    if not sites.sites:
        return
    gone = data.draw(st.sampled_from(sites.sites))
    left = Topology(tuple(site for site in sites.sites if site is not gone))
    after = allocate(wants, left, found.places)
    check(after, wants, left)
    assert {place for place in found.places if place.host != gone.name} <= set(after.places), "what runs stays"
    back = allocate(wants, sites, after.places)
    check(back, wants, sites)
    assert not back.missing or len(sites.sites) < max(len(want.shares()) for want in wants)


def test_check_finds_what_is_wrong() -> None:
    wants, sites = [Want("x", "decode", 2, 1, hosts=2)], topology(a=machine(2), b=machine(2))
    good = allocate(wants, sites).places
    for wrong in (good[:1], (*good, good[0]), (good[0], Place("x", 1, good[0].host, 0)), (good[0], Place("x", 1, "z"))):
        with pytest.raises(AssertionError):
            check(Placement(tuple(wrong)), wants, sites)
    crowd = [Want("x", "decode", 3, 1)]
    with pytest.raises(AssertionError, match="more cores"):
        check(Placement(tuple(Place("x", rank, "a", 0) for rank in range(3))), crowd, sites)
