"""Whatever is done to a picture or to the form around it, the answer is 200 or 4xx, and the next one is right again."""

from __future__ import annotations

import random
from collections import Counter

import vitlab


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Bytes changed, cut, doubled, or put elsewhere."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 2, 8, 40))):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(5):
            case 0:
                found[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del found[at : at + chance.choice((1, 4, 100, 10_000))]
            case 2:
                found[at:at] = found[at : at + chance.choice((1, 4, 100))]
            case 3:
                found[at : at + 4] = chance.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"))
            case 4:
                here = chance.randrange(len(found) + 1)
                found[at : at + 8] = found[here : here + 8]
    return bytes(found)


def test_mutated_pictures(client, models, picture, ask):
    chance, codes = random.Random(0), Counter()
    kinds = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
    seeds = [picture(n, 17, 23, kind) for n, kind in enumerate(kinds)]
    for number in range(210):
        found = ask(client, "/predict", mutated(seeds[number % len(seeds)], chance))
        codes[found.status_code] += 1
        assert found.status_code in (200, 400, 413, 415), found.text
        assert set(found.json()) == {"error", "remedy"} or found.status_code == 200
    assert codes[200] > 10 and codes[400] > 10 and codes[415] > 10
    found = ask(client, "/predict", picture(1)).json()["scores"]
    assert [s["label"] for s in found] == [label for label, _ in vitlab.predict(models["small"], picture(1))[0].scores]


def test_mutated_forms(client, picture):
    chance = random.Random(1)
    body = (
        b'--bound\r\nContent-Disposition: form-data; name="image"; filename="x.png"\r\nContent-Type: image/png\r\n\r\n'
    )
    body += (
        picture(1, 9, 11) + b'\r\n--bound\r\nContent-Disposition: form-data; name="labels"\r\n\r\na,b\r\n--bound--\r\n'
    )
    headers = {"content-type": "multipart/form-data; boundary=bound"}
    assert client.post("/zeroshot", content=body, headers=headers).status_code == 200
    edge = body.index(b"\r\n\r\n") + 4
    for _ in range(80):
        changed = mutated(body[:edge], chance) + body[edge:] if chance.random() < 0.7 else mutated(body, chance)
        found = client.post("/zeroshot", content=changed, headers=headers)
        assert found.status_code == 200 or 400 <= found.status_code < 500, found.text
