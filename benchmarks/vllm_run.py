"""One scenario of `cpu_peers.py` in vLLM; runs in an interpreter that has it.

python vllm_run.py MODEL_FOLDER A|B|D|start
"""

import json
import os
import random
import sys
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

OUTPUT = {"A": 256, "B": 128, "D": 32, "start": 1}
MEMORY_PART = 0.3


def prompts(scenario, seed):
    draw = random.Random(seed)

    def ids(count):
        return [draw.randrange(1000, 30000) for _ in range(count)]

    if scenario == "B":
        return [ids(256) for _ in range(32)]
    if scenario == "D":
        shared = ids(512)
        return [shared + ids(32) for _ in range(32)]
    return [ids(128 if scenario == "A" else 3)]


def stamps(llm, prompt, settings):
    """When tokens of one streamed request came."""
    times = []
    engine = llm.llm_engine
    engine.add_request(f"stream-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, settings)
    while engine.has_unfinished_requests():
        for output in engine.step():
            times += [time.monotonic()] * len(output.outputs[0].token_ids)
    return times


def main():
    model, scenario = sys.argv[1], sys.argv[2]
    llm = LLM(model=model, dtype="bfloat16", max_model_len=2048, gpu_memory_utilization=MEMORY_PART)
    streamed = scenario in ("A", "start")
    settings = SamplingParams(
        temperature=0,
        max_tokens=OUTPUT[scenario],
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
    )
    if scenario == "start":
        print(json.dumps({"first_token_at": stamps(llm, prompts("start", 0)[0], settings)[0]}))
        return
    # Once for what it compiles when work of this kind first comes.
    warm = [{"prompt_token_ids": ids[:64]} for ids in prompts(scenario, 1)]
    llm.generate(warm, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    work = prompts(scenario, 0)
    began = time.monotonic()
    if streamed:
        times = stamps(llm, work[0], settings)
        rate = (len(times) - 1) / (times[-1] - times[0])
        print(json.dumps({"decode_tok_s": rate, "ttft_ms": (times[0] - began) * 1000}))
        return
    done = llm.generate([{"prompt_token_ids": ids} for ids in work], settings, use_tqdm=False)
    seconds = time.monotonic() - began
    count = sum(len(output.outputs[0].token_ids) for output in done)
    print(json.dumps({"output_tok_s": count / seconds}))


if __name__ == "__main__":
    main()
