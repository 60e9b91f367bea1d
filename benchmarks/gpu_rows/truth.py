"""What the CPU platform answers, in float32: greedy answers and log-probabilities of fixed texts.

Passages are of the text that ``cardan eval`` measures with, so that they are long enough for
several blocks and none is made for this.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from gpu_rows.agreement import answer_of, plain

ANSWER = 64
# Characters of the passages that are continued, and their number for each.
_LENGTHS = (12, 40, 90, 160, 300, 500, 900, 1400)
_NUM_PROMPTS = 20
_NUM_TEXTS = 4
_TEXT_CHARACTERS = 1000
# The likeliest tokens that a table has; the text's or answer's own is in it, too.
TABLE = 5
SETTINGS = {"dtype": "float32", "quantization": "none", "num_blocks": 1024}


@dataclass(frozen=True, slots=True)
class Truth:
    """Prompts with their answers, and texts with a table for each token but the first.

    ``digest`` is of the model's file; answers are (token ids, tables).
    """

    digest: str
    prompts: list[list[int]]
    answers: list[tuple[list[int], list[dict[int, float]]]]
    texts: list[list[int]]
    tables: list[list[dict[int, float]]]

    @classmethod
    def computed(cls, model):
        """By the CPU platform, now."""
        from cardan import LLM, SamplingParams

        with LLM(model, platform="cpu", **SETTINGS) as llm:
            encode = llm.get_tokenizer().encode
            prompts = [encode(text) for text in _passages(_NUM_PROMPTS, _LENGTHS)]
            texts = [encode(text) for text in _passages(_NUM_TEXTS, (_TEXT_CHARACTERS,))]
            outputs = llm.generate(prompts, greedy(), use_tqdm=False)
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TABLE)
            read = llm.generate(texts, params, use_tqdm=False)
        return cls(
            digest_of(model),
            prompts,
            [answer_of(output) for output in outputs],
            texts,
            [prompt_tables(output) for output in read],
        )

    def save(self, path):
        tables = [[_pairs(table) for table in item] for item in self.tables]
        answers = [[ids, [_pairs(table) for table in item]] for ids, item in self.answers]
        fields = {"digest": self.digest, "prompts": self.prompts, "texts": self.texts}
        Path(path).write_text(json.dumps({**fields, "answers": answers, "tables": tables}))

    @classmethod
    def read(cls, path, model):
        """
        Raises:
            ValueError: it is of another model than ``model``.
        """
        found = json.loads(Path(path).read_text())
        if found["digest"] != digest_of(model):
            raise ValueError(f"{path} was recorded of another file than {model}; record it anew")
        return cls(
            found["digest"],
            found["prompts"],
            [(ids, [_table(pairs) for pairs in item]) for ids, item in found["answers"]],
            found["texts"],
            [[_table(pairs) for pairs in item] for item in found["tables"]],
        )


def greedy():
    """Settings of all greedy answers."""
    from cardan import SamplingParams

    return SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=TABLE)


def prompt_tables(output):
    """Tables of a prompt's tokens but the first."""
    return [plain(table) for table in output.prompt_logprobs[1:]]


def digest_of(model):
    """Of the model's GGUF file; of a directory, of its configuration."""
    from cardan.core.weights.resolve import resolve_model

    files = resolve_model(model)
    with (files.gguf or files.path / "config.json").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _passages(count, lengths):
    """Parts of the text, from one place after the other, in lengths by turns."""
    import cardan.eval

    text = (Path(cardan.eval.__file__).parent / "texts" / "alice.txt").read_text()
    apart = len(text) // (count + 1)
    return [
        text[place * apart : place * apart + lengths[place % len(lengths)]].strip()
        for place in range(count)
    ]


def _pairs(table):
    return [[token, round(value, 7)] for token, value in table.items()]


def _table(pairs):
    return {token: value for token, value in pairs}
