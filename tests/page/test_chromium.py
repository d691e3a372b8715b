"""Pages as a browser shows them, narrow and wide, light and dark: nothing scrolls sideways, no words cover others, and
the console is empty. Needs Chromium; what it draws is measured by a script beside the page, in frames of two widths."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_page import SAMPLES, report
from tests.simulate.supernode.small import small_layout
from tripool.bench.page import render_page as render_bench
from tripool.bench.trace import TraceRequest
from tripool.planner.hardware import named_hardware
from tripool.planner.models import named_model
from tripool.planner.page import render_plan
from tripool.planner.reproduce import cloudmatrix_figures, cloudmatrix_tables
from tripool.planner.reproduce.page import render_page as render_reproduced
from tripool.planner.search import PlanGoal, make_plan
from tripool.simulate.supernode import parse_fault, simulate_trace
from tripool.simulate.supernode.page import render_comparison, render_run

WIDTHS = (390, 1280)
FAULTS = ("chip:decode-0.1@1s+1s", "node:decode-0.0@1.1s+1s", "link:prefill-1@1.2s+1s", "slow:decode-0@2.9s+1sx2")
MEASURE = """<pre id="found"></pre><script>
const words = (root) => [...root.querySelectorAll("text")].filter((word) => word.textContent.trim());
const box = (element) => element.getBoundingClientRect();
const covers = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2.5;
const leaves = (a, b) => a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument, covered = [], cut = [];
    for (const figure of page.querySelectorAll("figure")) {
      const all = words(figure);
      all.forEach((one, i) => {
        if (leaves(box(one), box(figure))) cut.push(one.textContent);
        for (const other of all.slice(i + 1))
          if (covers(box(one), box(other))) covered.push([one.textContent, other.textContent]);
      });
    }
    const texts = [...page.querySelectorAll(".tile,figcaption,h1,h2,p,dt,dd")];
    return {
      width: frame.contentWindow.innerWidth, figures: page.querySelectorAll("figure").length, covered, cut,
      beyond: page.scrollingElement.scrollWidth - page.scrollingElement.clientWidth,
      spilt: texts.filter((text) => text.scrollWidth > text.clientWidth + 1).map((text) => text.textContent),
      back: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    };
  });
  document.getElementById("found").textContent = JSON.stringify(found);
};
</script>"""


def simulated(*faults: str) -> dict[str, Any]:
    layout = small_layout()
    asks = [TraceRequest(0.01 * number, 40, 60, tenant=f"tenant-{number % 3}") for number in range(300)]
    struck = [parse_fault(text, layout) for text in faults]
    return simulate_trace(layout, asks, trace="made up", faults=struck, slice_s=0.1)


def plan_page() -> str:
    ask = PlanGoal(
        model=named_model("deepseek-r1"), hardware=named_hardware("ascend-910c"), chips=384, ttft_s=2.0, tpot_s=0.05,
        input_tokens=4096.0, output_tokens=256.0, cached_share=0.3,
    )  # fmt: skip
    return render_plan(ask, make_plan(ask))


PAGES: dict[str, Callable[[], str]] = {
    "bench": lambda: render_bench(report(SAMPLES)),
    "plan": plan_page,
    "reproduce": lambda: render_reproduced(cloudmatrix_tables(), cloudmatrix_figures()),
    "simulate": lambda: render_run(simulated(*FAULTS)),
    "compare": lambda: render_comparison(simulated(), simulated(*FAULTS), ("calm", "struck")),
}


def browse(page: str, folder: Path, *, dark: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """What each width shows, and what was said on the console."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    frames = "".join(f'<iframe width="{width}" height="4000" srcdoc="{escape(page)}"></iframe>' for width in WIDTHS)
    file = folder / "frames.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><style>iframe{{border:0}}</style>{frames}{MEASURE}", "utf-8")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=10000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={sum(WIDTHS) + 60},4000",
        "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    measured = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert measured is not None, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(unescape(measured[1]))
    return found, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.prove
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_looks_right(name: str, dark: bool, tmp_path: Path) -> None:
    found, said = browse(PAGES[name](), tmp_path, dark=dark)
    assert said == []
    assert [each["width"] for each in found] == list(WIDTHS)
    for each in found:
        assert each["figures"] >= 3
        assert each["back"] == ("rgb(20, 23, 27)" if dark else "rgb(251, 251, 250)")
        assert (each["beyond"], each["covered"], each["cut"], each["spilt"]) == (0, [], [], [])


@pytest.mark.prove
def test_what_looks_wrong_is_seen(tmp_path: Path) -> None:
    words = '<text x="10" y="20">one</text><text x="12" y="22">other</text><text x="150" y="20">far away</text>'
    page = (
        f'<body style="background:#000;margin:0"><figure style="margin:0;width:100px"><svg>{words}</svg></figure>'
        '<h2 style="width:50px">unbreakableheading</h2><div style="width:2000px">wide</div>'
        "<script>console.log('hello')</script></body>"
    )
    found, said = browse(page, tmp_path, dark=False)
    assert len(said) == len(WIDTHS) and all("hello" in line for line in said)
    for each in found:
        assert each["covered"] == [["one", "other"]] and each["cut"] == ["far away"]
        assert each["beyond"] > 0 and each["spilt"] == ["unbreakableheading"]
