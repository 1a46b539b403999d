"""Hooks of mkdocs: what the pages link to outside of ``docs/`` becomes part of the site.

Raw data, examples and source files are copied to ``source/`` of the site; README, CHANGELOG,
CONTRIBUTING and SECURITY become pages, README as ``readme.md``: mkdocs would write a page
``README.md`` over the start page. Links are rewritten accordingly, so that the same Markdown works
in the repository and on the site. The site links to the repository of the clone it was built from.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
}
"""File of the repository beside ``docs/`` -> its page."""
_LINK = re.compile(r"(\]\()(?!https?://|#)([^)\s#]+)(#[^)\s]*)?(\))")
_ROLE = re.compile(r":(?:py:)?(?:class|func|mod|meth|data|attr|exc):<code>~?([^<]*)</code>")


def _on_site(target: str) -> str:
    """The path on the site of a file of the repository."""
    if target in PAGES:
        return PAGES[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else f"source/{target}"


def _rewritten(markdown: str, page: str, found: set[str] | None = None) -> str:
    """Markdown with its links for the site; ``found`` collects the files that they lead to."""

    file = next((file for file, made in PAGES.items() if made == page), f"docs/{page}")
    base = posixpath.dirname(file)

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(base, match[2]))
        if found is not None:
            found.add(target)
        site = posixpath.relpath(_on_site(target), posixpath.dirname(page) or ".")
        return f"{match[1]}{site}{match[3] or ''}{match[4]}"

    return _LINK.sub(replace, markdown)


def repository_url(remote: str) -> str | None:
    """The page of a git remote, without user and password; None if it has none."""
    found = re.fullmatch(
        r"(?:https?://(?:[^@/]*@)?|(?:ssh://)?git@)([^:/]+)[:/](.+?)(?:\.git)?/?", remote
    )
    return f"https://{found[1]}/{found[2]}" if found else None


def on_config(config: Any) -> Any:
    """Link to the remote ``origin`` of this clone, if it has one with a page."""
    git = shutil.which("git")
    if git is None or config.repo_url:
        return config
    asked = [git, "-C", str(ROOT), "remote", "get-url", "origin"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    url = repository_url(found.stdout.strip())
    if url is not None:
        config.repo_url, config.repo_name = url, url.rsplit("/", 2)[-1]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages beside ``docs/`` and the files that pages link to."""
    from mkdocs.structure.files import File  # tests read this file where mkdocs is not

    for file, page in PAGES.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    found: set[str] = set()
    for file in files.documentation_pages():
        _rewritten(file.content_string, file.src_uri, found)
    for target in sorted(found):
        outside = target not in PAGES and not target.startswith("docs/")
        if outside and (ROOT / target).is_file():
            name = f"source/{target}"
            if name.endswith(".md"):  # as it is: a page of the site would need links of its own
                name += ".txt"
            files.append(File.generated(config, name, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to where their targets are on the site."""
    text = _rewritten(markdown, page.file.src_uri)
    return re.sub(r"(\]\([^)\s]*source/[^)\s#]+\.md)(#[^)\s]*)?\)", r"\1.txt)", text)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Show Sphinx roles in docstrings as plain names."""
    return _ROLE.sub(r"<code>\1</code>", html)
