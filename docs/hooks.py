"""What the documentation site needs besides mkdocs.yml, so that one text serves GitHub and the site."""

import logging
import posixpath
import re
from fnmatch import fnmatch
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?P<sign>!?)\[(?P<text>[^\[\]]*)\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
REMOTE = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*\bhref=\"?(?:https?:)?//")

log = logging.getLogger("mkdocs.hooks.fednca")  # in a strict build every warning is an error


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that lie above docs/, and put the pages of a folder where the nav says `folder/*`."""
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    entries = [
        {title: pages_of(entry, files) if "*" in entry else entry}
        for item in config.nav or []
        for title, entry in item.items()
    ]
    config.nav = [item for item in entries if all(item.values())]  # a folder without pages is left out


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages, and let tables fold."""
    here = posixpath.dirname(page.file.src_uri)
    source = next((name for name, uri in PAGES.items() if uri == page.file.src_uri), f"docs/{page.file.src_uri}")

    def relink(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["target"]))
        uri = PAGES.get(path) or path.removeprefix("docs/")
        if (ROOT / path).is_dir():
            uri = next(iter(pages_of(f"{uri}/*", files)), "")  # a folder of pages is its first page
        elif uri == path and (ROOT / path).exists():
            uri = ""
        if not uri:
            return link["text"]  # what has no page, such as a script, is named without a link
        return f"{link['sign']}[{link['text']}]({posixpath.relpath(uri, here or '.')}{link['anchor'] or ''})"

    return LINK.sub(relink, markdown).replace("<details>", "<details markdown>")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> None:
    """Warn of a page that would load something from another server."""
    for found in REMOTE.findall(output):
        log.warning("%s loads something from another server: %s", page.file.src_uri, found)


def pages_of(pattern: str, files: Files) -> list[str]:
    """Return the pages that match, the first page of their folder before the others."""
    found = [file.src_uri for file in files.documentation_pages() if fnmatch(file.src_uri, pattern)]
    return sorted(found, key=lambda uri: (posixpath.basename(uri) not in {"index.md", "README.md"}, uri))


class Reference(griffe.Extension):
    """What the API reference shows of the source."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Fence the examples of a docstring, since Markdown takes `>>>` for a quotation."""
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **kwargs: object) -> None:
        """Leave out what `__init__` keeps without a type or a docstring."""
        for name, member in list(cls.members.items()):
            undescribed = not (member.docstring or getattr(member, "annotation", None))
            if member.labels == {"instance-attribute"} and undescribed:
                cls.del_member(name)
