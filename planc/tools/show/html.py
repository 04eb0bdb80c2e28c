"""HTML as text: what is not written as HTML here is escaped, whatever a name contains."""

from base64 import b64encode
from hashlib import sha256
from html import escape
from pathlib import Path

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title><style>
{style}</style></head>
<body>{body}<script>{script}</script></body></html>
"""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *content: str, **attributes: str | int | None) -> Html:
    """An element; what is not `Html` is escaped. `class_` is the attribute `class`, `data_at` is
    `data-at`.
    """
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(c if isinstance(c, Html) else escape(c) for c in content)
    return Html(f"<{name}{words}>{inside}</{name}>")


def package_files(*names: str) -> Html:
    """Style sheets and scripts of this package."""
    return Html("".join(Path(__file__).with_name(name).read_text("utf-8") for name in names))


def page(title: str, *body: Html) -> str:
    """A whole page. Its policy lets it load nothing, and run no script but its own."""
    script, style = package_files("page.js"), package_files("picture.css", "page.css")
    known = b64encode(sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{known}'"
    parts = {"title": escape(title), "body": "".join(body), "style": style, "script": script}
    return _PAGE.format(policy=policy, **parts)
