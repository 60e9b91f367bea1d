"""A server of OpenAI's streaming API whose delays are known exactly: it logs when it sends.

    python known_delays.py '{"profiles": [{"ttft_ms": 30, "itl_ms": [10, 20]}]}' [--port PORT]

Plain asyncio in a process of its own. It prints its port. Request n follows profile n (they are
taken in turn): the first token after `ttft_ms`, token k after `itl_ms[k % len(itl_ms)]` more, until
`max_tokens`; `tokens_per_chunk` tokens go out together. `"stall": {"at_s": 1, "for_s": 1}` sends
nothing to anyone for a second, one second after the first request. `GET /log` has the times of all
requests (`due`: when a token should have gone out), `POST /reset` forgets them. Times are seconds
of the machine's monotonic clock, which its other processes read, too.
"""

import argparse
import asyncio
import json
import time

DEFAULT_PROFILE = {"ttft_ms": 20.0, "itl_ms": [5.0], "tokens_per_chunk": 1}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class KnownDelays:
    def __init__(self, plan):
        self.profiles = [DEFAULT_PROFILE | profile for profile in plan.get("profiles", [{}])]
        self.stall = plan.get("stall")
        self.reset()

    def reset(self):
        self.log = []
        self.stall_begins = self.stall_ends = None

    async def serve(self, reader, writer):
        try:
            while (head := await self._read_head(reader)) is not None:
                method, path, length = head
                body = await reader.readexactly(length)
                await self._answer(method, path.partition("?")[0], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    @staticmethod
    async def _read_head(reader):
        """Method, path and length of the body; None at the end of the connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ")
        fields = dict(line.lower().split(":", 1) for line in lines if line)
        return method, path, int(fields.get("content-length", "0"))

    async def _answer(self, method, path, body, writer):
        if method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            await self._stream(path.endswith("chat/completions"), json.loads(body), writer)
        elif path == "/log":
            self._whole(
                writer, {"requests": self.log, "stall": [self.stall_begins, self.stall_ends]}
            )
        elif path == "/v1/models":
            self._whole(writer, {"object": "list", "data": [{"id": "delays", "object": "model"}]})
        elif path in ("/health", "/reset"):
            if path == "/reset":
                self.reset()
            self._whole(writer, {})
        else:
            self._whole(writer, {"error": {"message": f"no {path} here"}}, "404 Not Found")

    @staticmethod
    def _whole(writer, content, status="200 OK"):
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def _stream(self, is_chat, request, writer):
        entry = {"received": time.monotonic(), "due": [], "sent": [], "tokens": []}
        profile = self.profiles[len(self.log) % len(self.profiles)]
        self.log.append(entry)
        if self.stall and self.stall_begins is None:
            self.stall_begins = entry["received"] + self.stall["at_s"]
            self.stall_ends = self.stall_begins + self.stall["for_s"]
        writer.write(HEAD)
        num_tokens = request.get("max_completion_tokens") or request["max_tokens"]
        done = 0
        due = entry["received"] + profile["ttft_ms"] / 1000
        while done < num_tokens:
            count = min(profile["tokens_per_chunk"], num_tokens - done)
            await self._sleep_until(due)
            if writer.is_closing():
                return
            done += count
            self._event(writer, self._chunk(is_chat, " word" * count, done == num_tokens))
            entry["sent"].append(time.monotonic())
            entry["due"].append(due)
            entry["tokens"].append(count)
            gaps = profile["itl_ms"]
            due = entry["sent"][-1] + gaps[(len(entry["sent"]) - 1) % len(gaps)] / 1000
        prompt = request.get("prompt")
        usage = {
            "prompt_tokens": len(prompt) if isinstance(prompt, list) else 7,
            "completion_tokens": num_tokens,
        }
        usage["total_tokens"] = sum(usage.values())
        self._event(writer, json.dumps(self._base(is_chat) | {"choices": [], "usage": usage}))
        self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _sleep_until(self, due):
        if self.stall and self.stall_begins <= due < self.stall_ends:
            due = self.stall_ends
        # The loop's clock is time.monotonic.
        await asyncio.sleep(max(0.0, due - time.monotonic()))

    @staticmethod
    def _base(is_chat):
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        return {"id": "x", "object": kind, "created": 1, "model": "delays"}

    def _chunk(self, is_chat, text, is_last):
        choice = {"index": 0, "finish_reason": "length" if is_last else None}
        choice |= {"delta": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        return json.dumps(self._base(is_chat) | {"choices": [choice]})

    @staticmethod
    def _event(writer, text):
        data = f"data: {text}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=json.loads)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    server = await asyncio.start_server(
        KnownDelays(options.plan).serve, "127.0.0.1", options.port, limit=1 << 22, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
