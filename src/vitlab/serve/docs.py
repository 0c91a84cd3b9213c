"""GET /docs: the OpenAPI description as one plain page that loads nothing. GET /openapi.json is FastAPI's own."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem; font-family: ui-monospace, monospace; font-size: 1.15rem }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8884 }
pre { overflow-x: auto; padding: .6rem; border: 1px solid #8884; border-radius: .3rem }
"""


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    page = _page(request.app.openapi(), str(request.base_url).rstrip("/"))
    return HTMLResponse(page, headers={"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"})


def _page(schema: dict[str, Any], base: str) -> str:
    info = schema["info"]
    parts = [f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info.get('description', ''))} "]
    parts.append('For machines: <a href="openapi.json">openapi.json</a>.</p>')
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            parts.append(_operation(schema, base, method.upper(), path, about))
    body = "\n".join(parts)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>vitlab</title>'
    return f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>'


def _operation(schema: dict[str, Any], base: str, method: str, path: str, about: dict[str, Any]) -> str:
    rows = [(p["name"], f"in the {p['in']}", p.get("description", "")) for p in about.get("parameters", [])]
    form: dict[str, Any] = {}
    ways: list[list[str]] = []  # where the form holds either this or that
    for content in about.get("requestBody", {}).get("content", {}).values():
        form = content["schema"].get("properties", {})
        ways = [way["required"] for way in content["schema"].get("oneOf", [])]
    rows += [(name, "in the form", value.get("description", "")) for name, value in form.items()]
    curls = [
        "".join(f" -F {name}={'@cat.jpg' if name == 'image' else '...'}" for name in way) for way in ways or [form]
    ]
    found = [f"<h2>{method} {escape(path)}</h2><p>{escape(about.get('description', ''))}</p>"]
    found.append("<pre>" + "\n".join(f"curl{escape(files)} {escape(base + path)}" for files in curls) + "</pre>")
    if rows:
        found.append(_table(("option", "where", ""), rows))
    answers = [_answer(schema, status, one) for status, one in about["responses"].items()]
    found.append(_table(("answer", "", ""), answers))
    return "\n".join(found)


def _answer(schema: dict[str, Any], status: str, about: dict[str, Any]) -> tuple[str, str, str]:
    names = ""
    for content in about.get("content", {}).values():
        reference = content.get("schema", {}).get("$ref", "")
        parts = schema.get("components", {}).get("schemas", {}).get(reference.rpartition("/")[2], {})
        names = ", ".join(parts.get("properties", {}))
    return status, about.get("description", ""), names


def _table(heads: tuple[str, ...], rows: list[tuple[str, str, str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"
