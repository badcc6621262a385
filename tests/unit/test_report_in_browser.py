"""The report in a real browser: nothing on the console, every picture drawn, examples can be stepped through. Left out
where there is no Chromium (``make browser`` installs Debian's).

Screenshots of a wide and a narrow window stay in ``build/screenshots``.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_report import FULL, RECORDS

from spectrain.evaluation.report.html import render_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: make browser")

# Runs behind the page's own script, and writes what it finds into the page.
PROBE = """
<script>
const found = {errors: window.seen, pictures: 0, passes: 0, said: []};
for (const svg of document.querySelectorAll("figure svg")) {
  const box = svg.getBoundingClientRect();
  const drawn = svg.querySelectorAll("path, rect, use, line").length > 2;
  if (box.width > 50 && box.height > 30 && drawn) found.pictures += 1;
}
found.figures = document.querySelectorAll("figure").length;
found.wide = document.documentElement.scrollWidth - window.innerWidth;
const example = document.querySelector(".example");
found.passes = example.querySelectorAll(".pass").length;
for (const name of ["first", "next", "next", "back", "all"]) {
  example.querySelector(`button[name=${name}]`).click();
  found.said.push(`${example.querySelector(".steps span").textContent} / ${example.querySelectorAll(".later").length}`);
}
document.title = JSON.stringify(found);
</script>
"""
LISTEN = "<script>window.seen = []; window.onerror = (m) => window.seen.push(m);</script>"


def chromium(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--log-level=0"]
    command += ["--disable-dev-shm-usage", f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


@pytest.fixture(scope="module")
def source() -> str:
    """With a sweep's figures, too."""
    return render_report(dataclasses.replace(FULL, sweep=RECORDS))


@pytest.mark.slow
def test_the_page_as_it_is_says_nothing_on_the_console_and_is_photographed(source: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(source, encoding="utf-8")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for name, size in (("wide", "1280,2400"), ("narrow", "420,2400")):
        picture = SCREENSHOTS / f"{name}.png"
        picture.unlink(missing_ok=True)
        done = chromium(page, f"--window-size={size}", f"--screenshot={picture}")
        assert not re.findall(r".*CONSOLE.*", done.stderr)
        assert picture.stat().st_size > 20_000


def test_pictures_are_there_and_examples_are_stepped_through(source: str, tmp_path: Path) -> None:
    page = tmp_path / "probed.html"
    # Scripts of the test itself are not in the page's policy, which the other test leaves as it is.
    open_page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", source)
    page.write_text(
        open_page.replace("<title>", LISTEN + "<title>").replace("</body>", PROBE + "</body>"), encoding="utf-8"
    )
    shown = chromium(page, "--window-size=420,2400", "--dump-dom").stdout
    found = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", shown, re.DOTALL)[1]))  # type: ignore[index]
    assert found["errors"] == []
    assert found["pictures"] == found["figures"] >= 7
    assert found["wide"] <= 0  # nothing sticks out of a narrow window
    assert found["passes"] == 2
    assert found["said"] == [
        "pass 1 of 2, 0 accepted drafts / 1",
        "pass 2 of 2, 2 accepted drafts / 0",
        "2 passes, 2 accepted drafts / 0",
        "pass 2 of 2, 2 accepted drafts / 0",
        "2 passes, 2 accepted drafts / 0",
    ]
