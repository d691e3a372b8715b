"""Verdicts over invented machines: what is wrong is named, with a remedy, and nothing else is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observe.machines import GB, GOOD
from tripool.observe import Finding, Machine, check_machine
from tripool.observe.machine import Cpu, Folder, Kernels, Leftover, Memory, Model, Package, Port, Shared


def bad(machine: Machine) -> list[Finding]:
    return [finding for finding in check_machine(machine) if finding.verdict != "ok"]


def only(machine: Machine) -> Finding:
    (finding,) = bad(machine)
    assert finding.remedy, "what is wrong comes with what to do"
    return finding


def cpu(**changes) -> Machine:
    return replace(GOOD, cpu=replace(GOOD.cpu, **changes))


def software(**changes) -> Machine:
    return replace(GOOD, software=replace(GOOD.software, **changes))


def test_a_good_machine_has_nothing_to_complain_about_and_is_told_what_runs():
    assert not bad(GOOD)
    told = {finding.name: finding.says for finding in check_machine(GOOD)}
    assert told["kernels"].startswith("avx512 runs")
    assert "20.0 GB of 32.0 GB" in told["memory"]


@pytest.mark.parametrize(
    ("machine", "name", "verdict", "word"),
    [
        (software(python=(3, 10, 4)), "python", "fail", "3.10.4"),
        (software(packages=()), "packages", "warn", "install"),
        (software(torch_error="no such symbol"), "torch", "fail", "no such symbol"),
        (replace(GOOD, kernels=Kernels(compiled=(), usable=())), "kernels", "warn", "float32"),
        (replace(GOOD, kernels=Kernels(compiled=("plain",), usable=("plain",))), "kernels", "warn", "avx512"),
        (
            replace(GOOD, kernels=Kernels(compiled=("plain",), usable=("plain",), error="truncated")),
            "kernels",
            "fail",
            "truncated",
        ),
        (cpu(quota_cores=1.5), "cpu", "warn", "1.5"),
        (cpu(load=30.0), "load", "warn", "30.0"),
        (replace(GOOD, open_files=256), "open files", "warn", "256"),
        (replace(GOOD, open_files=64, open_files_most=64), "open files", "fail", "64"),
        (replace(GOOD, loopback_error="no route"), "loopback", "fail", "no route"),
        (replace(GOOD, clock=replace(GOOD.clock, backwards=True)), "clock", "fail", "backwards"),
        (replace(GOOD, clock=replace(GOOD.clock, wall_s=1.8e9)), "clock", "warn", "before"),
        (replace(GOOD, clock=replace(GOOD.clock, jump_s=-3.0)), "clock", "warn", "-3.0 s"),
        (replace(GOOD, leftovers=(Leftover(path="/dev/shm/x", num_bytes=GB),)), "leftovers", "warn", "/dev/shm/x"),
        (
            replace(GOOD, model=Model(name="m", path="", present=False, error="no such model", hint="find it")),
            "model",
            "fail",
            "no such model",
        ),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(machine, name, verdict, word):
    finding = only(machine)
    assert (finding.name, finding.verdict) == (name, verdict)
    assert word in finding.says + finding.remedy


def test_an_old_cpu_is_slow_and_not_the_installations_fault():
    machine = replace(
        cpu(flags=frozenset({"sse2"})), kernels=Kernels(compiled=("avx2", "avx512", "plain"), usable=("plain",))
    )
    assert only(machine).name == "cpu flags"
    assert not bad(replace(machine, cpu=replace(machine.cpu, machine="aarch64")))


def test_a_quota_says_how_many_threads_to_use():
    assert "--threads 2" in only(cpu(quota_cores=1.5)).remedy
    assert "--threads 1" in only(cpu(quota_cores=0.2)).remedy
    assert not bad(cpu(quota_cores=8.0))


@pytest.mark.parametrize(
    ("memory", "verdict"),
    [
        (Memory(total_bytes=32 * GB, available_bytes=GB, limit_bytes=None), "fail"),
        (Memory(total_bytes=32 * GB, available_bytes=2 * GB, limit_bytes=None), "warn"),
        (Memory(total_bytes=32 * GB, available_bytes=4 * GB, limit_bytes=None), "ok"),
        (
            Memory(total_bytes=32 * GB, available_bytes=20 * GB, limit_bytes=8 * GB, limit_used_bytes=7 * GB),
            "fail",
        ),
        (Memory(total_bytes=32 * GB, available_bytes=20 * GB, limit_bytes=8 * GB, limit_used_bytes=6 * GB), "warn"),
        (Memory(total_bytes=32 * GB, available_bytes=20 * GB, limit_bytes=8 * GB), "ok"),
    ],
)
def test_memory_is_what_is_free_under_the_tightest_bound(memory, verdict):
    machine = replace(GOOD, memory=memory)
    (finding,) = [finding for finding in check_machine(machine) if finding.name == "memory"]
    assert finding.verdict == verdict


@pytest.mark.parametrize(
    "shared",
    [
        Shared(path="/dev/shm", is_memory=True, total_bytes=64 * 2**20, free_bytes=64 * 2**20),
        Shared(path="/tmp", is_memory=False, total_bytes=100 * GB, free_bytes=100 * GB),
    ],
)
def test_little_or_no_shared_memory_only_matters_to_split_servers(shared):
    finding = only(replace(GOOD, shared=shared))
    assert finding.verdict == "warn"
    assert "--split" in finding.remedy


def test_a_port_in_use_is_named_with_its_holder_and_our_own_server_is_no_fault():
    taken = Port(host="127.0.0.1", port=8000, error="in use")
    ours = replace(taken, url="http://127.0.0.1:8000", server="0.1.0")
    assert "nginx (pid 7)" in only(replace(GOOD, port=replace(taken, holder="nginx (pid 7)"))).says
    assert only(replace(GOOD, port=taken)).verdict == "fail"
    assert not bad(replace(GOOD, port=replace(ours, ready=True)))
    assert "draining" in only(replace(GOOD, port=replace(ours, says="draining"))).says


def test_folders_are_checked_one_by_one():
    folders = (
        Folder(purpose="state", path="/a", writable=False, free_bytes=9 * GB),
        Folder(purpose="models", path="/b", writable=True, free_bytes=GB, needs_bytes=2 * GB),
        Folder(purpose="blocks", path="/c", writable=True, free_bytes=GB),
    )
    assert [finding.verdict for finding in check_machine(replace(GOOD, folders=folders)) if finding.name == "disk"] == [
        "warn",
        "warn",
        "ok",
    ]


@pytest.mark.parametrize(
    ("needs", "found", "fits"),
    [
        (">=2.11,<=2.13.0", "2.13.0+cpu", True),
        (">=2.11,<=2.13.0", "2.14.0", False),
        (">=2.11,<=2.13.0", "2.9.1", False),
        (">=0.115", "0.115.0", True),
        ("<2", "2.0", False),
        ("<2", "1.99rc1", True),
        ("!=1.5,>1", "1.5", False),
        ("~=1.4", "1.9", True),
        ("~=1.4", "2.0", False),
        ("", "whatever", True),
        ("", None, False),
    ],
)
def test_versions_are_numbers_not_letters(needs, found, fits):
    machine = software(packages=(Package(name="torch", needs=needs, found=found),))
    wrong = [finding for finding in bad(machine) if finding.name == "packages"]
    assert (not wrong) == fits
    assert all("pip install" in finding.remedy for finding in wrong)


sizes = st.integers(0, 2**40)


@given(
    total=sizes,
    available=sizes,
    limit=st.none() | sizes,
    used=sizes,
    weights=sizes,
    kv=sizes,
    free=sizes,
    files=st.integers(0, 10**7),
    usable=st.integers(1, 512),
    quota=st.none() | st.floats(0.01, 600),
)
def test_any_machine_is_judged_and_every_complaint_has_a_remedy(
    total, available, limit, used, weights, kv, free, files, usable, quota
):
    changed: Cpu = replace(GOOD.cpu, num_usable=usable, quota_cores=quota)
    machine = replace(
        GOOD,
        cpu=changed,
        memory=Memory(total_bytes=total, available_bytes=available, limit_bytes=limit, limit_used_bytes=used),
        shared=replace(GOOD.shared, free_bytes=free),
        open_files=files,
        model=replace(GOOD.model, weight_bytes=weights, kv_bytes=kv),
    )
    findings = check_machine(machine)
    assert {finding.name for finding in check_machine(GOOD)} <= {finding.name for finding in findings}
    assert all(finding.says for finding in findings)
    assert all(finding.remedy for finding in findings if finding.verdict != "ok")
    # More memory never makes the verdict worse.
    order = ("ok", "warn", "fail")
    richer = replace(machine, memory=replace(machine.memory, available_bytes=available + GB, limit_bytes=None))
    before, after = (
        next(f.verdict for f in check_machine(one) if f.name == "memory")
        for one in (replace(machine, memory=replace(machine.memory, limit_bytes=None)), richer)
    )
    assert order.index(after) <= order.index(before)
