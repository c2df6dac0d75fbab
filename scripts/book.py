#!/usr/bin/env python3
"""Builds the book of docs/ into target/book, and checks the links of all documents.

The pages are in target/book/docs, and beside them, at their paths here, the files to which
they link. Links are checked twice: in the documents, as a forge shows them, and in the pages,
whose chapters link to each other under other names. Every document of docs/ is a chapter.

Run it by target/python/bin/python, whose packages have mdBook's program.
"""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from manifests import problem, report

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BOOK = ROOT / "target/book"
MDBOOK = Path(sys.executable).parent / "mdbook"
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted(ROOT.glob("deploy/**/*.md")),
]


def prose(text):
    """The text without code, whose brackets are no links."""
    without_blocks = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", without_blocks)


def links(text):
    """The targets of relative links."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return [unquote(target) for target in found if not re.match(r"[a-z]+:", target)]


def anchors(document):
    """The anchors of the headings, as forges make them."""
    text = re.sub(r"^ *```.*?^ *```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    made = []
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        made.append(f"{anchor}-{made.count(anchor)}" if anchor in made else anchor)
    return set(made)


def check_documents():
    """Reports broken links; returns what chapters link to outside of docs/."""
    outside = set()
    for document in DOCUMENTS:
        where = document.relative_to(ROOT)
        for link in links(document.read_text()):
            path, _, anchor = link.partition("#")
            target = (document.parent / path).resolve() if path else document
            if not target.exists():
                problem(where, f"links to {link}, which does not exist")
            elif anchor and anchor not in anchors(target):
                problem(where, f"links to {link}, and there is no such heading")
            elif document.is_relative_to(DOCS) and not target.is_relative_to(DOCS):
                outside.add(target)
    return outside


def check_chapters():
    chapters = {DOCS / link for link in links((DOCS / "SUMMARY.md").read_text())}
    for document in DOCS.rglob("*.md"):
        if document not in chapters and document.name != "SUMMARY.md":
            problem("docs/SUMMARY.md", f"lacks {document.relative_to(DOCS)}")


def build(outside):
    shutil.rmtree(BOOK, ignore_errors=True)
    built = subprocess.run(
        [MDBOOK, "build", DOCS, "--dest-dir", BOOK / "docs"], stderr=subprocess.PIPE, text=True
    )
    if built.returncode:
        sys.exit(built.stderr)
    for path in outside:
        copy = BOOK / path.relative_to(ROOT)
        if path.is_dir():
            shutil.copytree(path, copy, dirs_exist_ok=True)
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)


class Page(HTMLParser):
    """The ids of a page, and the links of its text."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.in_text = set(), [], False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.in_text = self.in_text or tag == "main"
        self.ids.add(given.get("id"))
        if self.in_text and tag == "a" and not re.match(r"[a-z]+:", given.get("href", "#")):
            self.links.append(unquote(given.get("href", "")))

    def handle_endtag(self, tag):
        self.in_text = self.in_text and tag != "main"


def check_pages():
    names = [path for path in (BOOK / "docs").rglob("*.html") if path.name not in ("print.html", "toc.html")]
    pages = {path: Page(path) for path in names}
    for path, page in pages.items():
        for link in page.links:
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            if not target.exists():
                problem(path.relative_to(BOOK), f"links to {link}, which the book lacks")
            elif anchor and target in pages and anchor not in pages[target].ids:
                problem(path.relative_to(BOOK), f"links to {link}, and the page has no such id")


def main():
    outside = check_documents()
    check_chapters()
    build(outside)
    check_pages()
    report("book: target/book/docs/index.html, and every link resolves")


if __name__ == "__main__":
    main()
