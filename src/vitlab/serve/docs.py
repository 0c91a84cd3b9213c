"""GET /docs: the OpenAPI description as one page without scripts. GET /openapi.json is FastAPI's own."""

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
        for method, operation in methods.items():
            parts.append(_operation(schema, base, method.upper(), path, operation))
    body = "\n".join(parts)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>vitlab</title>'
    return f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>'


def _operation(schema: dict[str, Any], base: str, method: str, path: str, operation: dict[str, Any]) -> str:
    options = [(p["name"], f"in the {p['in']}", p.get("description", "")) for p in operation.get("parameters", [])]
    fields: dict[str, Any] = {}
    alternatives: list[list[str]] = []  # where the form holds one field or another
    for content in operation.get("requestBody", {}).get("content", {}).values():
        fields = content["schema"].get("properties", {})
        alternatives = [one["required"] for one in content["schema"].get("oneOf", [])]
    options += [(name, "in the form", value.get("description", "")) for name, value in fields.items()]
    arguments = [
        "".join(f" -F {name}={'@cat.jpg' if name == 'image' else '...'}" for name in names)
        for names in alternatives or [fields]
    ]
    parts = [f"<h2>{method} {escape(path)}</h2><p>{escape(operation.get('description', ''))}</p>"]
    parts.append("<pre>" + "\n".join(f"curl{escape(one)} {escape(base + path)}" for one in arguments) + "</pre>")
    if options:
        parts.append(_table(("option", "where", ""), options))
    responses = [_response(schema, status, one) for status, one in operation["responses"].items()]
    parts.append(_table(("answer", "", ""), responses))
    return "\n".join(parts)


def _response(schema: dict[str, Any], status: str, response: dict[str, Any]) -> tuple[str, str, str]:
    """Status, description and keys."""
    keys = ""
    for content in response.get("content", {}).values():
        reference = content.get("schema", {}).get("$ref", "")
        component = schema.get("components", {}).get("schemas", {}).get(reference.rpartition("/")[2], {})
        keys = ", ".join(component.get("properties", {}))
    return status, response.get("description", ""), keys


def _table(heads: tuple[str, ...], rows: list[tuple[str, str, str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"
