"""A new process that opens an engine and generates one token: python first_token.py MODEL SETTINGS.

Prints one JSON line: when what was done, in seconds of the machine's monotonic clock, and the
engine's own phases.
"""

import json
import sys
import time

_PROMPT = 128


def main():
    model, settings = sys.argv[1], json.loads(sys.argv[2])
    times = {"began": time.monotonic()}
    from cardan import LLM, SamplingParams

    times["imported"] = time.monotonic()
    with LLM(model, load_format="dummy", **settings) as llm:
        times["ready"] = time.monotonic()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        [output] = llm.generate([list(range(3, 3 + _PROMPT))], params, use_tqdm=False)
        times["first_token"] = time.monotonic()
        if len(output.outputs[0].token_ids) != 1:
            raise RuntimeError("no token came")
        print(json.dumps({**times, "phases": llm.info.startup_seconds}))


if __name__ == "__main__":
    main()
