"""A stand-in for a vLLM server: speaks enough HTTP for the pool, and misbehaves as told. Also a program, to be started
as one: ``python fake_server.py --uds PATH`` (further options below)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading

OK, DROP, HANG = 200, "drop", "hang"


def completion(body, **changes):
    """A reply as vLLM 0.32 gives it: the answer to [a, b, …] is [b + 1, b + 2, …], of max_tokens tokens."""
    ids = [body["prompt"][-1] + 1 + number for number in range(body["max_tokens"])]
    choice = {
        "index": 0,
        "text": "",
        "finish_reason": "length",
        "token_ids": ids,
        "prompt_token_ids": body["prompt"],
        **changes,
    }
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": body["model"],
        "choices": [choice],
        "kv_transfer_params": None,
    }


class FakeServer:
    """``behave(body, count)`` says what becomes of the count-th attempt (from 0) at a prompt: a status, or (status,
    reply), DROP, HANG.

    ``with FakeServer(behave) as server: server.url``. ``bodies``: requests received; ``peak``: most under way at once;
    ``held``: while it is set, answers are held back.
    """

    def __init__(self, behave=lambda body, count: OK, health=200, models=None):
        self.behave = behave
        self.health = health
        self.models = [{"id": "tiny", "root": "/models/tiny", "max_model_len": 256}] if models is None else models
        self.bodies = []
        self.peak = 0
        self.now = 0
        self.seen = {}
        self.held = threading.Event()
        self.delay_s = 0.0

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self.listen(), self.loop).result(10)
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *error):
        self.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    async def listen(self):
        self.tasks = set()
        self.server = await asyncio.start_server(self.converse, "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()[1]

    def stop(self):
        """Refuse connections from now on, and drop those there are."""

        async def close():
            self.server.close()
            for task in list(self.tasks):
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), self.loop).result(10)

    async def converse(self, reader, writer):
        self.tasks.add(asyncio.current_task())
        with contextlib.suppress(asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                lengths = [int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length")]
                body = await reader.readexactly(lengths[0]) if lengths else b""
                reply = await self.respond(lines[0].split(" ")[1], body)
                if reply is None:
                    break
                status, content, headers = reply
                text = json.dumps(content).encode()
                extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(text)}\r\n{extra}\r\n".encode() + text)
                await writer.drain()
        writer.close()
        self.tasks.discard(asyncio.current_task())

    async def respond(self, path, body):
        if path == "/health":
            return self.health, {}, {}
        if path == "/v1/models":
            return 200, {"data": self.models}, {}
        body = json.loads(body)
        self.bodies.append(body)
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            while self.held.is_set():
                await asyncio.sleep(0.005)
            await asyncio.sleep(self.delay_s)
            count = self.seen.get(key := tuple(body["prompt"]), 0)
            self.seen[key] = count + 1
            outcome = self.behave(body, count)
            if outcome == DROP:
                return None
            if outcome == HANG:
                await asyncio.sleep(3600)
            status, reply, headers = (
                (*outcome, {}) if isinstance(outcome, tuple) and len(outcome) == 2 else (outcome, None, {})
            )
            if reply is None:
                reply = (
                    completion(body)
                    if status == 200
                    else {"error": {"message": f"told to say {status}", "code": status}}
                )
            return status, reply, headers
        finally:
            self.now -= 1


async def run(options):
    answered = 0

    def behave(body, count):
        nonlocal answered
        answered += 1
        if options.die_after is not None and answered > options.die_after:
            sys.stderr.write("RuntimeError: told to die\n")
            sys.stderr.flush()
            os._exit(3)
        return OK

    fake = FakeServer(behave)
    fake.tasks = set()
    async with await asyncio.start_unix_server(fake.converse, options.uds) as server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    parser.add_argument("--die-after", type=int)
    asyncio.run(run(parser.parse_args()))
