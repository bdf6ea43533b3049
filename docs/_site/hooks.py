"""What mkdocs does not do by itself, for `mkdocs.yml`.

README is the start page, and what lies outside the docs is linked to in the repository,
if `REPOSITORY_URL` says where that is.
"""

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
log = logging.getLogger("mkdocs.hooks.vllm_h2o")
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Let README be the first page."""
    text = _LINK.sub(_from_docs, (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=text))
    return files


def _from_docs(link: re.Match[str]) -> str:
    """A link of README's as a page in the folder of the docs has it."""
    shown, target, anchor = link[1], link[2], link[3] or ""
    shown = _LINK.sub(_from_docs, shown)  # a picture that is a link
    if not target.startswith("https://"):
        inside = target.removeprefix("docs/")
        target = inside if inside != target else f"../{target}"
    return f"[{shown}]({target}{anchor})"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Link to what is no page in the repository, or not at all."""
    folder = (DOCS / page.file.src_uri).parent

    def there(link: re.Match[str]) -> str:
        path = Path(folder, link[2]).resolve()
        if link[2].startswith("https://") or path.is_relative_to(DOCS):
            return link[0]
        if not path.exists():
            log.warning("%s links to %s", page.file.src_uri, link[2])
        if not config.repo_url:
            return link[1]
        return f"[{link[1]}]({config.repo_url}/blob/main/{path.relative_to(ROOT)})"

    return _LINK.sub(there, markdown)
