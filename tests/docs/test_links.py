"""Links of the pages to each other, to their headings, and to files of the repository."""

import re
from functools import cache

from folders import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.M | re.S)
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,4} (.+)$", re.M)
PICTURES = ROOT / "docs" / "pictures"


def slug(heading):
    """The anchor of a heading, as GitHub and MyST make it of one without links."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


@cache
def anchors(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    return {slug(heading) for heading in HEADING.findall(text)}


def wrong(page):
    """(link, what is wrong) of each link of a page that leads nowhere in the repository."""
    for link in LINK.findall(CODE.sub("`", page.read_text())):
        if re.match(r"\w+:", link):
            continue  # an address
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.is_relative_to(ROOT) or not target.exists():
            yield link, "no such file"
        elif anchor and anchor not in anchors(target):
            yield link, "no such heading"


def test_links():
    assert not [(str(page.relative_to(ROOT)), *told) for page in PAGES for told in wrong(page)]


def test_a_wrong_link_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("test_links.ROOT", tmp_path)
    page = tmp_path / "a.md"
    page.write_text("# A b\n[x](#a-b) [y](#c) [z](no.md) [w](a.md#a-b) [v](../a.md) `[u](no.md)`\n")
    assert [link for link, _ in wrong(page)] == ["#c", "no.md", "../a.md"]


def test_every_picture_is_shown_and_they_are_small():
    shown = "".join(page.read_text() for page in PAGES)
    assert all(f"pictures/{file.name})" in shown for file in PICTURES.iterdir())
    assert sum(file.stat().st_size for file in PICTURES.glob("*.svg")) < 300_000
