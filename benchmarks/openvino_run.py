"""One scenario of `cpu_peers.py` in OpenVINO GenAI; runs in an interpreter that has it.

python openvino_run.py MODEL.gguf A|B|D|start NUM_THREADS
"""

import json
import random
import sys
import time

import numpy as np
import openvino
import openvino_genai

OUTPUT = {"A": 256, "B": 128, "D": 32, "start": 1}


def prompts(scenario):
    draw = random.Random(0)

    def ids(count):
        return [draw.randrange(1000, 30000) for _ in range(count)]

    if scenario == "B":
        return [ids(256) for _ in range(32)]
    if scenario == "D":
        shared = ids(512)
        return [shared + ids(32) for _ in range(32)]
    return [ids(128 if scenario == "A" else 3)]


class Stamps(openvino_genai.StreamerBase):
    """When tokens came."""

    def __init__(self):
        super().__init__()
        self.times = []

    def write(self, token):
        self.times += [time.monotonic()] * (len(token) if isinstance(token, list) else 1)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self):
        pass


def main():
    model, scenario, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = 2
    scheduling.enable_prefix_caching = True
    scheduling.max_num_batched_tokens = 4096
    pipeline = openvino_genai.LLMPipeline(
        model, "CPU", scheduler_config=scheduling, INFERENCE_NUM_THREADS=threads
    )
    wanted = openvino_genai.GenerationConfig()
    wanted.max_new_tokens = wanted.min_new_tokens = OUTPUT[scenario]
    wanted.ignore_eos, wanted.do_sample, wanted.apply_chat_template = True, False, False

    def generate(batch, streamer=None):
        ids = np.array(batch, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        return pipeline.generate(inputs, wanted, *([] if streamer is None else [streamer]))

    if scenario != "start":
        generate([[5, 6, 7]])
    stamps = Stamps() if scenario in ("A", "start") else None
    began = time.monotonic()
    done = generate(prompts(scenario), stamps)
    seconds = time.monotonic() - began
    if stamps is None:
        count = sum(len(tokens) for tokens in done.tokens)
        print(json.dumps({"output_tok_s": count / seconds}))
    elif scenario == "start":
        print(json.dumps({"first_token_at": stamps.times[0]}))
    else:
        times = stamps.times
        rate = (len(times) - 1) / (times[-1] - times[0])
        print(json.dumps({"decode_tok_s": rate, "ttft_ms": (times[0] - began) * 1000}))


if __name__ == "__main__":
    main()
