"""Every link of a built site leads somewhere: ``python tools/check_links.py site``. Links to other sites are listed, not followed."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Targets of links and images, and the anchors a page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name in ("id", "name") and value:
                self.anchors.add(value)


def broken(site: Path) -> list[str]:
    """Links that lead nowhere, as ``page: link``."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are absolute, for wherever the site will be
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            known = pages.get(target)
            if not target.exists() or (anchor and known is not None and anchor not in known.anchors):
                found.append(f"{path.name}: {link}")
    return found


if __name__ == "__main__":
    lost = broken(Path(sys.argv[1]))
    print("\n".join(lost) or "all links lead somewhere")
    sys.exit(bool(lost))
