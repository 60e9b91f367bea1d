"""How byte-level vocabularies cut text before BPE, by the name that GGUF files give it.

GGUF stores no pre-tokenizer, only its name in ``tokenizer.ggml.pre``. The patterns are those of the
models' own published tokenizers.
"""

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from cardan.core.text.errors import TextError
from cardan.core.types.errors import shown

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Words that begin where lower case turns into upper case.
_LOWER_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_CASE_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_LLAMA3 = "|".join((_CONTRACTION, _WORD, r"\p{N}{1,3}", _PUNCTUATION, _SPACES))
_QWEN2 = "|".join((_CONTRACTION, _WORD, r"\p{N}", _PUNCTUATION, _SPACES))
_QWEN35 = "|".join(
    (
        _CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        _SPACES,
    )
)
_TEKKEN = "|".join((_LOWER_WORD, _UPPER_WORD, r"\p{N}", _CASE_PUNCTUATION, _SPACES))
_GPT4O = "|".join(
    (
        f"{_LOWER_WORD}{_CONTRACTION}?",
        f"{_UPPER_WORD}{_CONTRACTION}?",
        r"\p{N}{1,3}",
        _CASE_PUNCTUATION,
        _SPACES,
    )
)
_CJK = r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
_DEEPSEEK3_WORDS = "|".join(
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        _SPACES,
    )
)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """One way to cut text.

    `patterns` apply one after the other, each match becoming a piece of its own; empty means
    GPT-2's pattern. `digits` cuts every digit off first. `ignore_merges` takes a piece that is a
    token as that token at once; `adds_bos` is what the family does when the file does not say.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        """The rule for the tokenizers library, down to the byte alphabet."""
        steps: list[PreTokenizer] = []
        if self.digits:
            steps.append(Digits(individual_digits=True))
        steps.extend(Split(Regex(pattern), behavior="isolated") for pattern in self.patterns)
        steps.append(ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return Sequence(steps) if len(steps) > 1 else steps[0]


_GPT2_RULE = SplitRule()
_DIGITS_RULE = SplitRule(digits=True)
_LLAMA3_RULE = SplitRule((_LLAMA3,), ignore_merges=True, adds_bos=True)
_CL100K_RULE = SplitRule((_LLAMA3,))
_QWEN2_RULE = SplitRule((_QWEN2,))
_GPT4O_RULE = SplitRule((_GPT4O,))
_DEEPSEEK3_RULE = SplitRule((r"\p{N}{1,3}", _CJK, _DEEPSEEK3_WORDS))

_RULES: dict[str, SplitRule] = {
    "default": _GPT2_RULE,
    "gpt-2": _GPT2_RULE,
    "gpt2": _GPT2_RULE,
    "phi-2": _GPT2_RULE,
    "mpt": _GPT2_RULE,
    "olmo": _GPT2_RULE,
    "jais": _GPT2_RULE,
    "roberta-bpe": _GPT2_RULE,
    "exaone": _GPT2_RULE,
    "smollm": _DIGITS_RULE,
    "starcoder": _DIGITS_RULE,
    "refact": _DIGITS_RULE,
    "command-r": _DIGITS_RULE,
    "codeshell": _DIGITS_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "falcon3": _LLAMA3_RULE,
    "pixtral": _LLAMA3_RULE,
    "dbrx": _CL100K_RULE,
    "smaug-bpe": _CL100K_RULE,
    "chatglm-bpe": _CL100K_RULE,
    "glm4": _CL100K_RULE,
    "qwen2": _QWEN2_RULE,
    "stablelm2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "megrez": _QWEN2_RULE,
    "qwen35": SplitRule((_QWEN35,)),
    "tekken": SplitRule((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": _GPT4O_RULE,
    "llama4": _GPT4O_RULE,
    "deepseek-v3": _DEEPSEEK3_RULE,
}


def split_rule(name: str) -> SplitRule:
    """The rule of a ``tokenizer.ggml.pre`` value.

    Raises:
        TextError: an unknown name; guessing would give wrong ids without a sign.
    """
    rule = _RULES.get(name)
    if rule is None:
        raise TextError(
            f"tokenizer.ggml.pre is {shown(name)}, which is not known; use the model's "
            f"directory with a tokenizer.json instead. Known: {', '.join(sorted(_RULES))}"
        )
    return rule
