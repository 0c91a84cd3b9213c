"""One client process of benchmarks/server.py: asks as it is told, checks every answer, prints what came, as JSON.

    python benchmarks/server_client.py JOB.json

Plain sockets and the standard library, so that the client takes little of the machine that it shares with the server.
A job: port, path, images (files), expected (per image: [[label, probability], ...] or null), connections, seconds or
count, and rate (requests a second, whether answered or not; 0: each connection asks as soon as it was answered).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

TOLERANCE = 1e-5
EDGE = "vitlab-benchmark-edge"


class Client:
    def __init__(self, job: dict[str, Any]):
        self.job = job
        self.bodies = [request(job["port"], job["path"], Path(file).read_bytes()) for file in job["images"]]
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.rows: list[list[Any]] = []  # began, sent, done, status, what is wrong
        self.next = job.get("first", 0)

    async def one(self) -> bool:
        """One request; False when nobody listens any more."""
        number = self.next % len(self.bodies)
        self.next += 1
        row: list[Any] = [time.monotonic(), None, None, 0, None]
        self.rows.append(row)
        self.idle = [link for link in self.idle if not link[0].at_eof()]  # the server ends those that rest too long
        try:
            link = self.idle.pop() if self.idle else await asyncio.open_connection("127.0.0.1", self.job["port"])
        except OSError:
            row[4] = "not connected"
            return False
        reader, writer = link
        try:
            writer.write(self.bodies[number])
            await writer.drain()
            row[1] = time.monotonic()
            status, headers, body = await asyncio.wait_for(answer(reader), 120)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError) as error:
            row[4] = f"no answer ({type(error).__name__})"
            writer.close()
            return True
        row[2], row[3] = time.monotonic(), status
        row[4] = self.wrong(number, status, headers, body)
        if headers.get("connection") == "close":
            writer.close()
        else:
            self.idle.append(link)
        return True

    def wrong(self, number: int, status: int, headers: dict[str, str], body: bytes) -> str | None:
        found = json.loads(body)
        if status == 503:
            return None if headers.get("retry-after", "").isdecimal() else "503 without Retry-After"
        if status != 200:
            return None if set(found) == {"error", "remedy"} else "an error in another form"
        expected = self.job["expected"][number] if self.job["expected"] else None
        if expected is None:
            return None
        scores = [(score["label"], score["probability"]) for score in found["scores"]]
        near = all(abs(p - dict(expected).get(label, 9.0)) <= TOLERANCE for label, p in scores)
        return None if near and len(scores) == len(expected) else f"another answer: {scores} for {expected}"

    async def run(self) -> None:
        job, rate = self.job, self.job.get("rate", 0)
        end = time.monotonic() + job.get("seconds", 1e9)
        count = job.get("count", 10**9)
        if not rate:
            asked = 0

            async def again() -> None:
                nonlocal asked
                while time.monotonic() < end and asked < count:
                    asked += 1
                    if not await self.one():
                        return

            await asyncio.gather(*(again() for _ in range(job["connections"])))
            return
        under_way: set[asyncio.Task[bool]] = set()
        began, sent = time.monotonic(), 0
        while time.monotonic() < end:
            due = int((time.monotonic() - began) * rate) - sent
            for _ in range(min(due, job["connections"] - len(under_way))):
                task = asyncio.create_task(self.one())
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            sent += max(due, 0)
            await asyncio.sleep(0.002)
        await asyncio.gather(*under_way)


def request(port: int, path: str, image: bytes) -> bytes:
    head = f'--{EDGE}\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n'
    form = head.encode() + image + f"\r\n--{EDGE}--\r\n".encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Length: {len(form)}"]
    return "\r\n".join([*lines, f"Content-Type: multipart/form-data; boundary={EDGE}", "", ""]).encode() + form


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.lower()] = value.strip()
    return int(first.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


def main() -> None:
    client = Client(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    asyncio.run(client.run())
    json.dump(client.rows, sys.stdout)


if __name__ == "__main__":
    main()
