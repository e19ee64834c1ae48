"""What MkDocs calls while it builds the site; and ``llms.txt``, which ``python docs/hooks.py`` writes."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings introduce examples as reStructuredText does; the site shows Markdown."""
    return html.replace("<p>Example::</p>", "<p>Example:</p>")


def on_post_build(config: Any, **_: Any) -> None:
    """Put ``llms.txt`` beside the pages."""
    (Path(config["site_dir"]) / "llms.txt").write_text(llms_txt())


def llms_txt() -> str:
    """The pages of the table of contents with their first sentences, as llmstxt.org describes."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    blocks = [f"# {site['site_name']}", f"> {site['site_description']}", "## Start"]
    for entry in site["nav"]:
        ((title, pages),) = entry.items()
        if isinstance(pages, list):
            blocks.append(f"## {title}")
        for page in pages if isinstance(pages, list) else [entry]:
            ((name, file),) = page.items()
            sentence = first_sentence((ROOT / "docs" / file).read_text())
            blocks.append(f"- [{name}]({site['repo_url']}/blob/main/docs/{file}): {sentence}")
    return re.sub(r"(?<=\n)(- .*)\n\n(?=- )", r"\1\n", "\n\n".join(blocks)) + "\n"


def first_sentence(page: str) -> str:
    """The first sentence of a page's first paragraph, without its links."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    paragraphs = [block for block in re.split(r"\n\s*\n", text) if re.match(r"[A-Za-z`]|\*\S", block)]
    sentence = re.split(r"(?<=[.!?])\s", " ".join(paragraphs[0].split()), maxsplit=1)[0]
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", sentence).replace("**", "")


if __name__ == "__main__":
    (ROOT / "llms.txt").write_text(llms_txt())
