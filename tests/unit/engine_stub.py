"""A process that speaks an engine's protocol without an engine. Its config is what it does.

``answer``: end each request with one token; ``hang``: report a step that never finishes;
``broken``: complain instead of getting ready; ``limp``: fail at a request, and not end;
``babble``: answer a request with what is no message; ``deaf``: read nothing. ``WHAT>FILE``: what
the file says, if there is one.
"""

import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path

from cardan.core.engine.engine_process import receive_config
from cardan.core.engine.messages import Beat, Failed, Outputs, Ready, Shutdown, Submit
from cardan.core.engine.wire import Connection
from cardan.core.types.engine_info import EngineInfo
from cardan.core.types.outputs import EngineStats, Finish, StepOutputs
from cardan.core.types.request import EngineRequest, FinishReason
from cardan.core.types.sampling_params import SamplingParams

INFO = EngineInfo(
    model="stub", architecture="Stub", platform="none", device="none", dtype="float32",
    vocab_size=9, max_model_len=99, max_num_seqs=4, max_num_batched_tokens=99, max_logprobs=0,
    block_size=4, num_blocks=9, kv_cache_bytes=0, weight_bytes=0,
)  # fmt: skip


def request(key: int, num_prompt_tokens: int = 2) -> EngineRequest:
    return EngineRequest(
        key=key,
        request_id=str(key),
        prompt_token_ids=[1] * num_prompt_tokens,
        params=SamplingParams(max_tokens=1),
        max_tokens=1,
        arrival_time=time.monotonic(),
    )


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    what = receive_config(sock).decode()
    connection = Connection(sock)
    kind, _, later = what.partition(">")
    if later and Path(later).exists():
        kind = Path(later).read_text()
    if kind == "broken":
        connection.send(Failed("no memory left", is_config=True))
        return
    connection.send(Ready(INFO))
    if kind == "deaf":
        threading.Event().wait()
    if kind == "hang":
        threading.Thread(target=_beat, args=(connection,), daemon=True).start()
    for message in connection.receive():
        if isinstance(message, Submit) and kind == "answer":
            key = message.request.key
            finish = Finish(FinishReason.LENGTH)
            outputs = StepOutputs(keys=[key], token_ids=[os.getpid()], finished={key: finish})
            outputs.stats = EngineStats(num_running=1)
            connection.send(Outputs(outputs))
        elif isinstance(message, Submit) and kind == "limp":
            connection.send(Failed("the device is lost"))
            threading.Event().wait()
        elif isinstance(message, Submit) and kind == "babble":
            sock.sendall(struct.pack("<IB", 1, 7) + b"\xc1")
        elif isinstance(message, Shutdown):
            return


def _beat(connection: Connection) -> None:
    began = time.monotonic()
    while True:
        connection.send(Beat(time.monotonic() - began))
        time.sleep(0.1)


if __name__ == "__main__":
    main()
