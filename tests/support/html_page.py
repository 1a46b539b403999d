"""A report as a browser would read it."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = frozenset({"meta", "link", "br", "img", "use", "path", "hr"})


class Page(HTMLParser):
    """Collects what a browser would fetch, ids, names of plots, widths of bars, and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.widths: list[float] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        links = [values.get(key) or "" for key in ("src", "href", "xlink:href") if key in values]
        self.fetched += [link for link in links if not link.startswith(("#", "data:"))]
        self.fetched += [tag] if tag in ("script", "iframe", "link") else []
        self.ids += [str(values["id"])] if values.get("id") else []
        if tag == "div" and values.get("role") == "img":
            self.labels.append(str(values["aria-label"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()
        self.widths += [float(str(dict(attrs)["width"]))] if tag == "rect" else []

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
