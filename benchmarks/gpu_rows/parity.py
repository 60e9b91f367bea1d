"""Rows that say whether a platform answers as the CPU platform does, however requests run."""

from gpu_rows.agreement import GAPS, Agreement, answer_of
from gpu_rows.truth import SETTINGS, TABLE, Truth, greedy, prompt_tables

# Steps that a platform can plan ahead; more than it declares is not asked of it.
_DEPTH = "async_depth"
# Engines by what is theirs; the first one is also asked in several ways.
_PLAIN = "as it comes"
_PREEMPTED = "preempted"
VARIANTS = {
    _PLAIN: {},
    "without graphs": {"enforce_eager": True},
    "no step ahead": {_DEPTH: 0},
    "one step ahead": {_DEPTH: 1},
    "in chunks": {"max_num_batched_tokens": 48},
    _PREEMPTED: {"num_blocks": 40, "block_size": 16, "max_model_len": 512, "max_num_seqs": 20},
}
_SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "ignore_eos": True}


def run_parity_rows(rows, model, platform, truth_file=None, dtypes=("float32", "bfloat16")):
    """A row for each dtype and variant; the truth is recorded in ``truth_file`` or computed."""
    found = []

    def read():
        truth = Truth.read(truth_file, model) if truth_file else Truth.computed(model)
        found.append(truth)
        return {"prompts": len(truth.prompts), "texts": len(truth.texts)}

    if not rows.run("parity truth", read):
        return
    for dtype in dtypes:
        for variant, changes in VARIANTS.items():
            settings = {**SETTINGS, "dtype": dtype, "platform": platform, **changes}
            _run_variant(rows, f"parity {dtype}", variant, (model, settings, found[0]))


def _run_variant(rows, label, variant, given):
    model, settings, truth = given
    dtype = settings["dtype"]
    opened = []

    def first():
        from cardan import LLM

        depth = declared_depth(settings["platform"])
        if settings.get(_DEPTH, 0) > depth:
            return {"unit": "faults", "skipped": f"the platform plans {depth} steps ahead"}
        llm = LLM(model, **settings)
        opened.append(llm)
        row = compared(llm, truth, dtype)
        preemptions = llm.get_metrics().num_preemptions
        if variant == _PREEMPTED and not preemptions:
            row["failures"].append("nothing was preempted")
        return {**row, "preemptions": preemptions}

    rows.run(f"{label}, {variant}", first)
    if variant == _PLAIN:
        ways = {"alone": alone, "prefix cached": cached}
        ways |= {"seeded alone and in a batch": seeded} if dtype == "float32" else {}
        for way, measure in ways.items():
            if opened:
                rows.run(
                    f"{label}, {way}", lambda measure=measure: measure(opened[0], truth, dtype)
                )
            else:
                rows.not_run(f"{label}, {way}", "there is no engine")
    for llm in opened:
        llm.close()


def declared_depth(platform_name):
    """How many steps the platform says can be planned ahead."""
    from cardan.core.discovery import Discovery
    from cardan.core.platform_selection import installed_platforms, select_platform

    selection = select_platform(platform_name, installed_platforms(Discovery()))
    return selection.platform.capabilities(selection.devices[0]).async_depth


def compared(llm, truth, dtype):
    """All answers in one batch, and the texts' log-probabilities."""
    from cardan import SamplingParams

    found = Agreement(dtype)
    for place, output in enumerate(llm.generate(truth.prompts, greedy(), use_tqdm=False)):
        found.answer(f"prompt {place}", answer_of(output), truth.answers[place])
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TABLE)
    for place, output in enumerate(llm.generate(truth.texts, params, use_tqdm=False)):
        for token, (got, want) in enumerate(
            zip(prompt_tables(output), truth.tables[place], strict=True)
        ):
            found.table(f"text {place}, token {token + 1}", got, want)
    return found.fields()


def alone(llm, truth, dtype):
    found = Agreement(dtype)
    for place, prompt in enumerate(truth.prompts):
        llm.reset_prefix_cache()
        [output] = llm.generate([prompt], greedy(), use_tqdm=False)
        found.answer(f"prompt {place}", answer_of(output), truth.answers[place])
    return found.fields()


def cached(llm, truth, dtype):
    """Twice, the second time with prefixes that the first has left."""
    llm.reset_prefix_cache()
    found = Agreement(dtype)
    hits = []
    for _ in range(2):
        before = llm.get_metrics().prefix_hits
        outputs = llm.generate(truth.prompts, greedy(), use_tqdm=False)
        hits.append(llm.get_metrics().prefix_hits - before)
        for place, output in enumerate(outputs):
            found.answer(f"prompt {place}", answer_of(output), truth.answers[place])
    row = found.fields()
    if not hits[1]:
        row["failures"].append("no prefix was found in the cache")
    return {**row, "cached_tokens": hits}


def seeded(llm, truth, dtype):
    """Sampled with a seed, a request gets the same tokens alone and among others, of other kinds
    too."""
    from cardan import SamplingParams

    params = [
        SamplingParams(seed=place, max_tokens=32, logprobs=0, **_SEEDED)
        for place in range(len(truth.prompts))
    ]
    llm.reset_prefix_cache()
    others = SamplingParams(temperature=1.0, max_tokens=40, repetition_penalty=1.2, ignore_eos=True)
    prompts = [prompt for prompt in truth.prompts for _ in range(2)]
    mixed = [item for own in params for item in (own, others)]
    batch = llm.generate(prompts, mixed, use_tqdm=False)[::2]
    failures = []
    for place, (prompt, own) in enumerate(zip(truth.prompts, params, strict=True)):
        llm.reset_prefix_cache()
        [output] = llm.generate([prompt], own, use_tqdm=False)
        got, want = batch[place].outputs[0].token_ids, output.outputs[0].token_ids
        if got != want:
            first = next(
                at for at, pair in enumerate(zip(got, want, strict=True)) if len(set(pair)) > 1
            )
            failures.append(f"prompt {place}: token {first} of the batch is another than alone")
    return {
        "unit": "faults",
        "figure": len(failures),
        "cases": len(params),
        "declared_gap": GAPS[dtype],
        "failures": failures[:5],
    }
